"""Time layers, or whole networks, of two checkouts in turn: medians, and how many times as fast the second is.

    git worktree add ../before COMMIT
    python scripts/two_versions.py ../before/src src
    python scripts/two_versions.py ../before/src src --networks linear agent --img-size 224 448 1024 --threads 2

Layers with their projections, one image, one thread; seconds are those of the thread, so that other work of the machine
counts as little as it can. Networks are DeiT-T with a mechanism, those of other names, timm/NAME or
timm/NAME@MECHANISM, converted, made ready by `subquad.optimize`, in bf16 and fp32, by the clock: on a machine that does
nothing else. Rows whose lowest tenths disagree with their medians are of one that was not quiet.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

WORKER = """
import json, sys, time
import timm
import torch
import subquad
from subquad import ATTENTION, TokenGrid
from subquad.attention import traits_of
from subquad.models.layers import SelfAttention
wanted = json.loads(sys.stdin.readline())
torch.set_num_threads(wanted["threads"])
torch.manual_seed(0)
clock = time.perf_counter if wanted["networks"] else time.thread_time
cases = {}
for name in wanted["networks"]:
    for size in wanted["img_size"]:
        for dtype in (torch.bfloat16, torch.float32):
            chosen = {"attention": name} if name in ATTENTION else {}
            if chosen and "prefix" in traits_of(ATTENTION[name]).refuses:
                chosen["class_token"] = False
            if name.startswith("timm/"):
                own, _, mechanism = name.removeprefix("timm/").partition("@")
                model = timm.create_model(own, img_size=size)
                model = subquad.convert(model, mechanism) if mechanism else model
            else:
                model = subquad.create_model("deit_tiny" if chosen else name, img_size=size, **chosen)
            model, x = subquad.optimize(model, dtype), torch.randn(1, 3, size, size, dtype=dtype)
            cases[f"{name} {size} px {str(dtype)[6:]}"] = lambda model=model, x=x: model(x)
for width, num_heads in () if wanted["networks"] else ((64, 2), (192, 3)):
    for side in (14, 28, 56):
        grid = TokenGrid(side, side)
        for name in ATTENTION:
            if name != "softmax" or side < 56:
                layer = SelfAttention(width, num_heads, ATTENTION[name], grid=grid).eval()
                x = torch.randn(1, side * side, width)
                cases[f"{name} {width} {side * side}"] = lambda layer=layer, x=x, grid=grid: layer(x, grid=grid)
print(json.dumps(list(cases)), flush=True)
for line in sys.stdin:
    name, count = json.loads(line)
    seconds = []
    with torch.no_grad():
        for _ in range(count + 3):
            start = clock()
            cases[name]()
            seconds.append(clock() - start)
    seconds = sorted(seconds[3:])
    print(json.dumps([seconds[len(seconds) // 2], seconds[len(seconds) // 10]]), flush=True)
"""


class Version:
    """A process with the library of one checkout."""

    def __init__(self, source: str, wanted: argparse.Namespace) -> None:
        environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": str(wanted.threads)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", WORKER], env=environment, **pipes)
        chosen = {name: getattr(wanted, name) for name in ("networks", "img_size", "threads")}
        self.process.stdin.write(json.dumps(chosen) + "\n")
        self.process.stdin.flush()
        self.cases: list[str] = json.loads(self.process.stdout.readline())
        self.times: dict[str, list[list[float]]] = {name: [] for name in self.cases}

    def measure(self, name: str, count: int) -> None:
        """Time one case."""
        self.process.stdin.write(json.dumps([name, count]) + "\n")
        self.process.stdin.flush()
        self.times[name].append(json.loads(self.process.stdout.readline()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="the src folder of a checkout")
    parser.add_argument("after", help="that of another one")
    parser.add_argument("--rounds", type=int, default=7, help="of each case, in turn")
    parser.add_argument("--only", nargs="*", default=[], help='parts of names of cases, "linear 64 196"')
    parser.add_argument("--networks", nargs="*", default=[], help="mechanisms of DeiT-T, or names; instead of layers")
    parser.add_argument("--img-size", nargs="+", type=int, default=[224, 448, 1024])
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    before, after = Version(given.before, given), Version(given.after, given)
    print("| | before µs | after µs | times as fast | lowest tenths |\n|---|---:|---:|---:|---:|")
    for case in before.cases:
        if case not in after.times or (given.only and not any(part in case for part in given.only)):
            continue
        for number in range(given.rounds):
            for version in (before, after) if number % 2 else (after, before):
                version.measure(case, 5 if given.networks else 20 if case.endswith("3136") else 60)
        medians, lows = (
            [pick(1e6 * row[place] for row in version.times[case]) for version in (before, after)]
            for place, pick in ((0, statistics.median), (1, min))
        )
        print(
            f"| {case} | {medians[0]:.0f} | {medians[1]:.0f} | {medians[0] / medians[1]:.2f} | "
            f"{lows[0] / lows[1]:.2f} |",
            flush=True,
        )
