"""Every tile of a grid, for each Triton kernel of each mechanism: compiled by many processes, timed by one.

    python scripts/gpu_tiles.py --output tiles.json --minutes 3          # on a machine with a CUDA device
    python scripts/gpu_tiles.py --compile 0 2                            # half of what that compiles; needs no GPU

What the library comes with (src/subquad/kernels/triton/measured_tiles.py) was chosen from this. `subquad tune` is what
chooses for one's own shapes. An operation is recorded as a CUDA graph with one of its kernels changed; its time is that
of a replay, the least of three times six.
"""

import argparse
import contextlib
import gc
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from subquad.attention import ATTENTION
from subquad.grid import TokenGrid
from subquad.kernels.triton import launch, tuning
from subquad.kernels.triton.tile_table import watching
from subquad.models.layers import SelfAttention
from subquad.substituting import substituted

SHAPES = (64, 1024, 3, 64), (16, 3136, 12, 32)
"""Images, tokens, heads and channels of each."""

HOPPER = 132
"""Multiprocessors of an H100 or H200, which kernels are compiled for where there is none."""

PARTS = 4
"""Pieces of a mechanism's grid, which different processes compile."""

SUMS = "local.", "pool", "query_sum"
BACKWARD = "dq", "dk", "gradient"

Choice = dict[str, Any]
Found = tuple[tuning.Call, str, dict[str, int], list[Choice]]


def grid_of(key: str, default: dict[str, int]) -> list[Choice]:
    """What is tried of a kernel; PROGRAMS are those of each multiprocessor."""
    name = key.split()[0]
    if "BLOCK" not in default:
        return [{"num_warps": warps, "PRECISION": kind} for warps in (4, 8) for kind in ("ieee", "halves")]
    if any(part in name for part in SUMS):
        pairs = (16, 1), (32, 1), (32, 2), (32, 4), (64, 1), (64, 2), (64, 4), (128, 4), (128, 8)
        return [{"BLOCK": block, "num_warps": warps} for block, warps in pairs]
    blocks, ahead = ((32, 64), (1, 2)) if any(part in name for part in BACKWARD) else ((32, 64, 128), (2, 3))
    tiles = [
        {"BLOCK": block, "num_warps": warps, "num_stages": stages}
        for block, warps, stages in itertools.product(blocks, (4, 8), ahead)
    ]
    return tiles + [tiles[1] | {"PROGRAMS": programs} for programs in (2, 8, 16)]


@contextmanager
def chosen(key: str, choice: Choice) -> Iterator[None]:
    """Let the kernel of that key have these settings."""
    settings = {"PROGRAMS": launch.PROGRAMS} | choice
    with (
        substituted(launch, "PROGRAMS", settings.pop("PROGRAMS")),
        watching(lambda found, defaults: settings if found == key else {}),
    ):
        yield


def layer(name: str, shape: Sequence[int], device: torch.device) -> Callable[[], None]:
    """A mechanism forward and backward on views of one projection, in bf16."""
    b, n, h, d = shape
    grid, like = TokenGrid(math.isqrt(n), math.isqrt(n)), {"device": device, "dtype": torch.bfloat16}
    torch.manual_seed(0)
    module = SelfAttention(h * d, h, ATTENTION[name], grid=grid).to(**like)
    projected = torch.randn(b, n, len(module.projected), module.all_heads, d, **like).permute(2, 0, 3, 1, 4)
    tokens = [x.detach().requires_grad_() for x in projected.unbind(0)]
    supply = dict(zip(module.projected, tokens, strict=True)) | {"x": torch.randn(b, n, h * d, **like)}
    given = {key: supply.get(key) for key in module.inner.inputs}

    def run() -> None:
        y = module.inner(**given, grid=grid, kv_grid=grid)
        torch.autograd.grad(y.sum(), [*tokens, *module.inner.parameters()], allow_unused=True)

    return run


def kernels_of(task: tuple[str, Sequence[int]], device: torch.device) -> Iterator[Found]:
    """Each operation of a layer, with each of its kernels, what that comes with, and what is tried."""
    for call in tuning.calls_of(layer(*task, device)):
        for key, default in tuning.keys_of(call).items():
            yield call, key, default, grid_of(key, default)


def compile_part(tasks: Sequence[tuple[str, Sequence[int]]], worker: int, workers: int) -> None:
    """What one of some processes compiles."""
    from subquad.kernels.triton.offline import compiling

    count = 0
    with compiling(HOPPER):
        for place, (task, part) in enumerate(itertools.product(tasks, range(PARTS))):
            if place % workers != worker:
                continue
            for call, key, _, choices in kernels_of(task, torch.device("cpu")):
                for choice in choices[part::PARTS]:
                    # whatever a compiler says of tiles that it can't take
                    with contextlib.suppress(Exception), chosen(key, choice):
                        call()
                        count += 1
    print(f"process {worker}: {count} compiled", flush=True)


def replay_us(call: Callable[[], Any]) -> float:
    """Microseconds of a replay of an operation's graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # the collection that stands before each recording takes longer than all else here
    with substituted(gc, "collect", lambda *given: 0), torch.cuda.graph(graph):
        call()
    graph.replay()
    start, end, times = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), []
    for _ in range(3):
        start.record()
        for _ in range(6):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / 6)
    return min(times)


def time_all(tasks: Sequence[tuple[str, Sequence[int]]], output: Path, deadline: float) -> None:
    """Time every choice of every kernel, and write what was found."""
    rows = []
    for task in tasks:
        for call, key, default, choices in kernels_of(task, torch.device("cuda")):
            if time.monotonic() > deadline:
                print(f"the time is up at {task[0]}, {key}")
                return
            tried: list[tuple[float, Choice]] = []
            for choice in choices:
                with contextlib.suppress(Exception), chosen(key, choice):
                    tried.append((round(replay_us(call), 1), choice))
            tried.sort(key=lambda one: one[0])
            before = round(replay_us(call), 1)
            rows.append({"task": task, "operation": call.name, "key": key, "default": default, "us": before})
            rows[-1]["tried"] = tried
            best = "/".join(map(str, tried[0][1].values())) if tried else "nothing"
            print(f"{task[0]:8}{call.name:36}{key.split()[0]:24}{before:8.1f}{tried[0][0]:8.1f}  {best}", flush=True)
            output.write_text(json.dumps(rows))


def main() -> None:
    """Compile in many processes, then time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", nargs="+", default=[name for name in ATTENTION if name != "softmax"])
    parser.add_argument("--output", type=Path, default=Path("tiles.json"))
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--compile", nargs=2, type=int, metavar=("PROCESS", "PROCESSES"), help="only compile a part")
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes
    torch.set_num_threads(1)
    tasks = [(name, shape) for shape in SHAPES for name in arguments.attention]
    if arguments.compile:
        compile_part(tasks, *arguments.compile)
        return
    if not torch.cuda.is_available():
        sys.exit("gpu_tiles: there is no CUDA device; --compile 0 1 compiles for one")
    processes = max(1, (os.cpu_count() or 2) - 2)
    words = [sys.executable, __file__, "--attention", *arguments.attention, "--compile"]
    started = [subprocess.Popen([*words, str(place), str(processes)]) for place in range(processes)]
    for process in started:
        process.wait()
    time_all(tasks, arguments.output, deadline)


if __name__ == "__main__":
    main()
