"""A step of Stable Diffusion's U-Net in PyTorch and engines, one latent on all cores: a table of docs/deployment.md.

python scripts/unet_engines.py --folder build/unets --sizes 512 1024   # on a machine that does nothing else

Files for any size are written where there are none (five to eight minutes each, 15 GB of memory, 3.4 GB of disk). A
round has a network in an engine after the other, each a process of its own; printed are medians of rounds. Weights are
random: no figure here says what an image looks like.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SUFFIXES = {"onnx": "onnx", "openvino": "xml"}


def network(name: str, attention: str) -> Any:
    """A U-Net with made-up weights."""
    import subquad
    from subquad.benchmarks.unets import unet_of

    model = unet_of(name).eval()
    return model if attention == "softmax" else subquad.convert(model, attention, in_place=True)


def file_of(folder: Path, name: str, attention: str, engine: str) -> Path:
    """Where the file of a network lies."""
    return folder / f"{name}-{attention}.{SUFFIXES[engine]}"


def write(folder: Path, name: str, attention: str, engine: str) -> None:
    """Write a file for any size and number of images."""
    import subquad

    model, start = network(name, attention), time.perf_counter()
    done = subquad.export(model, file_of(folder, name, attention, engine), format=engine, dynamic="batch,size")
    seconds, memory = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{done.path.name}: off by {done.difference:.0e}, {seconds:.0f} s, {memory:.1f} GiB", flush=True)


def measured(folder: Path, name: str, attention: str, engine: str, sizes: list[int], repeats: int) -> dict[str, float]:
    """Seconds of a step, by pixels of the image."""
    import torch

    from subquad.diffusion.called_with import arguments_of
    from subquad.exports import open_exported
    from subquad.exports.known_arguments import places_of_tensors, tensor_at

    model = network(name, attention if engine == "pytorch" else "softmax")
    run = None if engine == "pytorch" else open_exported(file_of(folder, name, attention, engine))
    found = {}
    for px in sizes:
        given: Any = arguments_of(model, (px // 8, px // 8))
        tensors: Any = [tensor_at(given, place) for place in places_of_tensors(given).values()]

        def step(given: Any = given, tensors: Any = tensors) -> Any:
            with torch.inference_mode():
                return model(**given) if run is None else run(*tensors)

        found[str(px)] = timed(step, repeats)
    return found


def timed(step: Callable[[], Any], repeats: int) -> float:
    """Median seconds, after one that is not counted."""
    step()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    """Write what is missing, time it in turn, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--unet", default="sd15", help="sd15, sd21 or sdxl (default: %(default)s)")
    parser.add_argument("--attention", nargs="+", default=["softmax", "linear"])
    parser.add_argument("--engines", nargs="+", default=["pytorch", "openvino"], choices=["pytorch", *SUFFIXES])
    parser.add_argument("--sizes", nargs="+", type=int, default=[512, 1024], help="pixels of the image")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2, help="steps in each round")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.cell:
        kind, attention, engine = arguments.cell.split(",")
        if kind == "write":
            write(folder, arguments.unet, attention, engine)
        else:
            of = arguments.sizes, arguments.repeats
            print(json.dumps(measured(folder, arguments.unet, attention, engine, *of)))
        return
    cells = [(attention, engine) for engine in arguments.engines for attention in arguments.attention]
    for attention, engine in cells:
        if engine != "pytorch" and not file_of(folder, arguments.unet, attention, engine).exists():
            in_a_process(f"write,{attention},{engine}")
    times: dict[tuple[str, str], list[dict[str, float]]] = {cell: [] for cell in cells}
    for _ in range(arguments.rounds):
        for cell in cells:
            times[cell].append(json.loads(in_a_process(f"time,{','.join(cell)}", quiet=True).splitlines()[-1]))
    print(f"| s a step | {' | '.join(f'{px:,} px' for px in arguments.sizes)} |\n|---|{'---:|' * len(arguments.sizes)}")
    for cell, rounds in times.items():
        medians = (statistics.median(one[str(px)] for one in rounds) for px in arguments.sizes)
        print(f"| {cell[1]}, {cell[0]} | {' | '.join(f'{one:.2f}' for one in medians)} |")


def in_a_process(cell: str, *, quiet: bool = False) -> str:
    """What this script prints for one cell."""
    done = subprocess.run([sys.executable, *sys.argv, "--cell", cell], stdout=subprocess.PIPE, text=True, check=True)
    if not quiet:
        print(done.stdout, end="", flush=True)
    return done.stdout


if __name__ == "__main__":
    main()
