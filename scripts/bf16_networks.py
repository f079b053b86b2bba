"""Whole networks in bf16, PyTorch's and OpenVINO's, one image on all cores: python scripts/bf16_networks.py --help.

Engines are processes of their own, in turn, since their threads disturb each other; within PyTorch the networks take
turns. OpenVINO needs the extra `export` and reads files that `--export` writes first.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

MECHANISMS = ("linear", "inline", "agent", "pola")
FORMS = ("bf16", "optimized", "autocast", "fp32", "optimized_fp32")


def file_of(folder: Path, name: str, size: int) -> Path:
    """Where OpenVINO's form of a network lies."""
    return folder / f"deit_tiny_{name}_{size}.xml"


def milliseconds(passes: dict, repeats: int) -> dict:
    """Each pass once a round, two rounds unmeasured, and before each measured pass one that is not."""
    taken = {key: [] for key in passes}
    for repeat in range(repeats + 2):
        for key, run in passes.items():
            for _ in range(2):
                start = time.perf_counter()
                run()
                last = time.perf_counter() - start
            if repeat > 1:
                taken[key].append(last * 1e3)
    return taken


def by_torch(arguments: argparse.Namespace) -> dict:
    """PyTorch with our kernels."""
    import torch

    import subquad
    from subquad.models import NETWORKS

    torch.set_num_threads(arguments.threads)
    passes = {}
    for name in arguments.attention:
        for form in arguments.forms:
            chosen = {"name": name} if name in NETWORKS else {"name": "deit_tiny", "attention": name}
            model = subquad.create_model(**chosen, img_size=arguments.img_size).eval()
            image = torch.randn(1, 3, arguments.img_size, arguments.img_size)
            if form.startswith("optimized"):
                subquad.optimize(model, torch.bfloat16 if form == "optimized" else None)
            elif form == "bf16":
                model.bfloat16()
            image = image.to(next(model.parameters()).dtype)

            def run(model=model, image=image, lowered=form == "autocast"):
                with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=lowered):
                    model(image)

            passes[name, form] = run
    return milliseconds(passes, arguments.repeats)


def by_openvino(arguments: argparse.Namespace) -> dict:
    """OpenVINO in bf16, of what was exported."""
    import numpy as np
    import openvino

    settings = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": arguments.threads}
    core, passes = openvino.Core(), {}
    image = np.random.default_rng(0).standard_normal((1, 3, arguments.img_size, arguments.img_size), np.float32)
    for name in arguments.attention:
        path = file_of(arguments.folder, name, arguments.img_size)
        request = core.compile_model(path, "CPU", settings | {"PERFORMANCE_HINT": "LATENCY"}).create_infer_request()
        passes[name, "openvino"] = lambda request=request: request.infer([image])
    return milliseconds(passes, arguments.repeats)


def main() -> None:
    """Export, or time one engine, or both in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--img-size", type=int, default=448)
    parser.add_argument("--attention", nargs="+", default=MECHANISMS, help="of DeiT-T, or names of whole networks")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["bf16", "optimized"], help="of PyTorch")
    parser.add_argument("--engine", choices=["torch", "openvino"], help="both in turn, twice, if left out")
    parser.add_argument("--folder", type=Path, default=Path("build"), help="of OpenVINO's files")
    parser.add_argument("--export", action="store_true", help="write OpenVINO's files")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.export:
        import subquad

        for name in arguments.attention:
            model = subquad.create_model("deit_tiny", attention=name, img_size=arguments.img_size).eval()
            path = file_of(arguments.folder, name, arguments.img_size)
            subquad.export(model, path, format="openvino", img_size=arguments.img_size)
        return
    if arguments.engine is None:
        for engine in ("openvino", "torch") * 2:
            subprocess.run([sys.executable, *sys.argv, "--engine", engine], check=True)
        return
    for (name, form), taken in (by_torch if arguments.engine == "torch" else by_openvino)(arguments).items():
        middle, tenth = statistics.median(taken), sorted(taken)[len(taken) // 10]
        print(f"{arguments.img_size} px {name:8s} {form:9s} median {middle:7.1f} ms, tenth {tenth:7.1f}", flush=True)


if __name__ == "__main__":
    main()
