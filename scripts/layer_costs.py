"""What attention layers cost beside their own projections, in seconds of one thread: kernels and formulas in turn.

    python scripts/layer_costs.py --dim 64 --num-heads 2 --tokens 784 3136
    python scripts/layer_costs.py --backward --backends auto eager
    python scripts/layer_costs.py --attention agent --tokens 784 --parts

`subquad bench` takes the time of a clock, and both cores; here other work of the machine counts as little as it can.
One image, fp32 where nothing is said. Medians, and in brackets ratios of the lowest tenths: where the two disagree, the
machine was busy. With `--parts` the operators inside a layer, by the time that is spent in each of them alone; what is
left of the layer is Python's.
"""

import argparse
import math
import random
import time
from collections.abc import Callable

import torch

from subquad import ATTENTION, use_backend
from subquad.benchmarks.layers_on_squares import layer_on_tokens

Pass = Callable[[], object]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def passes_of(name: str, tokens: int, given: argparse.Namespace) -> dict[str, Pass]:
    """The layer by each backend, and its two projections alone."""
    shape, device = (1, tokens, given.dim), torch.device("cpu")
    layer, x, grid = layer_on_tokens(name, shape, given.num_heads, device=device, backward=given.backward)
    layer, x = layer.to(DTYPES[given.dtype]), x.detach().to(DTYPES[given.dtype]).requires_grad_(given.backward)
    read = x.detach().new_zeros(1, tokens, layer.proj.in_features).requires_grad_(given.backward)

    def by(backend: str) -> Pass:
        def run() -> torch.Tensor:
            with use_backend(backend):
                return layer(x, grid=grid)

        return run

    def projections() -> torch.Tensor | list[torch.Tensor]:
        both = [layer.qkv(x), layer.proj(read)]
        return torch.cat([y.flatten() for y in both]) if given.backward else both

    passes: dict[str, Pass] = {"projections": projections} | {name: by(name) for name in given.backends}
    if not given.backward:
        return passes

    def learning(run: Pass) -> Pass:
        gradient = torch.ones_like(run())  # written out, as that of a network is

        def both_ways() -> None:
            run().backward(gradient)

        return both_ways

    return {key: learning(run) for key, run in passes.items()}


def microseconds(passes: dict[str, Pass], repeats: int) -> dict[str, list[float]]:
    """Of each pass, sorted; all in turn, in another order each time."""
    times: dict[str, list[float]] = {key: [] for key in passes}
    order = random.Random(0)
    for number in range(-3, repeats):
        for key in order.sample(list(passes), len(passes)):
            start = time.thread_time()
            passes[key]()
            if number >= 0:
                times[key].append(1e6 * (time.thread_time() - start))
    return {key: sorted(of_pass) for key, of_pass in times.items()}


def print_parts(run: Pass, repeats: int, whole: float) -> None:
    """What is spent in each operator alone, in microseconds of a pass."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(repeats):
            run()
    averages = sorted(profiler.key_averages(), key=lambda row: -row.self_cpu_time_total)
    for row in averages[:16]:
        print(f"    {row.self_cpu_time_total / repeats:8.1f} µs  {row.count / repeats:5.1f} ×  {row.key}")
    spent = sum(row.self_cpu_time_total for row in averages) / repeats
    print(f"    {spent:8.1f} µs in all, with the profiler's own; {whole:.1f} without it")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", nargs="+", choices=list(ATTENTION), help="all but softmax if left out")
    parser.add_argument("--tokens", nargs="+", type=int, default=[784, 3136], help="square numbers")
    parser.add_argument("--dim", type=int, default=192, help="channels")
    parser.add_argument("--num-heads", type=int, default=3, help="heads")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32", help="of tokens and weights")
    parser.add_argument("--backward", action="store_true", help="forward and backward together")
    parser.add_argument("--backends", nargs="+", default=["auto"], help="auto, eager, …")
    parser.add_argument("--repeats", type=int, default=101, help="of each pass with 784 tokens, fewer with more")
    parser.add_argument("--parts", action="store_true", help="print what is spent in each operator")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| mechanism | tokens | projections µs | " + " | ".join(f"{b} µs | ÷ proj." for b in options.backends) + " |")
    print("|---|---:|---:|" + "---:|---:|" * len(options.backends))
    for mechanism in options.attention or [name for name in ATTENTION if name != "softmax"]:
        for length in options.tokens:
            to_time = passes_of(mechanism, length, options)
            count = max(9, math.ceil(options.repeats * min(1, 784 / length)))
            with torch.set_grad_enabled(options.backward):
                sorted_times = microseconds(to_time, count)
            floor = sorted_times["projections"]
            cells = []
            for backend in options.backends:
                own = sorted_times[backend]
                ratios = own[count // 2] / floor[count // 2], own[count // 10] / floor[count // 10]
                cells.append(f"{own[count // 2]:.0f} | {ratios[0]:.2f} ({ratios[1]:.2f})")
            print(f"| {mechanism} | {length} | {floor[count // 2]:.0f} | {' | '.join(cells)} |", flush=True)
            if options.parts:
                with torch.set_grad_enabled(options.backward):
                    print_parts(to_time[options.backends[0]], count, sorted_times[options.backends[0]][count // 2])
