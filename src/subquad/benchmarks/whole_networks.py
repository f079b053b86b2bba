"""What whole networks cost at several image sizes, against their hosts with softmax, in one interleaved run."""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from subquad.benchmarks.blocks import dtype_of
from subquad.benchmarks.cuda_graphs import recorded
from subquad.benchmarks.layers_on_squares import last_descent
from subquad.benchmarks.memory import peak_memory_mb
from subquad.errors import SubquadError, unknown_name
from subquad.models import VARIANTS, create_model
from subquad.models.networks import NETWORKS
from subquad.ranges import check_positive
from subquad.tasks import TASKS
from subquad.text import columns, counted
from subquad.timing import interleaved_ms, timed_pass, warmed_up


@dataclass(frozen=True)
class NetworkRow:
    """One network at one image size: medians over interleaved repeats.

    Attributes:
        reference: the same host in the same size with softmax attention; itself where that is what it is.
        ms: a pass of the whole batch in milliseconds; spread is (max − min) / median.
        images_per_s: of the batch.
        reference_ms, reference_mb: the reference's.
        gain: how many times faster than the reference; more is better.
    """

    network: str
    px: int
    batch_size: int
    dtype: str
    ms: float
    images_per_s: float
    peak_mb: float
    spread: float
    reference: str
    reference_ms: float | None
    reference_mb: float | None
    gain: float | None


def measure_networks(
    names: Sequence[str],
    sizes: Sequence[int],
    *,
    head: str | None = None,
    batch_size: int = 1,
    dtype: str = "fp32",
    device: torch.device | str = "cpu",
    backward: bool = False,
    compile: bool = False,
    graphs: bool = False,
    repeats: int = 7,
    max_seconds: float = 60,
    log: Callable[[str], None] = lambda line: None,
) -> list[NetworkRow]:
    """Time networks by name on square images; each takes turns with the others and with their references.

    With `compile` all are made by torch.compile, on a GPU with CUDA graphs; with `graphs` they are recorded as CUDA
    graphs as they are. With `head`, one of a task of `TASKS`, they
    are backbones under it, with as many classes as its usual data have. A network is left out from the size on at which
    a first pass takes longer than `max_seconds`.
    """
    check_positive(repeats=repeats, batch_size=batch_size)
    if head is not None and head not in (known := [name for task in TASKS.usable() for name in task.heads]):
        raise unknown_name("head", head, known)
    if head is not None and backward:
        raise SubquadError("dense networks are measured forward: leave out --backward")
    for name in names:
        if name not in VARIANTS and name not in NETWORKS:
            raise unknown_name("model", name, [*VARIANTS, *NETWORKS])
    kind, device = dtype_of(dtype), torch.device(device)
    references = {name: _reference_of(name) for name in names}
    running = list(dict.fromkeys([*names, *references.values()]))
    rows: list[NetworkRow] = []
    for px in sorted(sizes):
        x = torch.randn(batch_size, 3, px, px, device=device, dtype=kind)
        passes = {
            name: _pass(_network(name, px, head).to(device=device, dtype=kind), x, backward, compile)
            for name in running
        }
        plain = passes
        if graphs:
            passes = {name: recorded(run, device) for name, run in passes.items()}
        passes, slow = warmed_up(passes, device, is_too_slow=lambda seconds: seconds > max_seconds)
        for name, seconds in slow.items():
            log(f"{name} is left out from {px} px on: {seconds:.0f} s a pass")
        running = list(passes)
        log(f"{px} px: {counted(len(passes), 'network')}, {counted(repeats, 'time')} each")
        times = interleaved_ms(passes, repeats, device)
        medians = {name: statistics.median(milliseconds) for name, milliseconds in times.items()}
        memory = {name: peak_memory_mb(plain[name], device) for name in running}
        for name in [name for name in names if name in running]:
            reference_ms, ms = medians.get(references[name]), medians[name]
            rows.append(
                NetworkRow(
                    network=name,
                    px=px,
                    batch_size=batch_size,
                    dtype=dtype,
                    ms=ms,
                    images_per_s=1000 * batch_size / ms,
                    peak_mb=memory[name],
                    spread=(max(times[name]) - min(times[name])) / ms,
                    reference=references[name],
                    reference_ms=reference_ms,
                    reference_mb=memory.get(references[name]),
                    gain=None if reference_ms is None else reference_ms / ms,
                )
            )
    return rows


def _reference_of(name: str) -> str:
    """The host of a network with softmax; a network that has nothing else is its own, and nothing is gained over it."""
    network = NETWORKS.get(name)
    if network is None or (network.attention == "softmax" and not network.settings):
        return name
    return f"{network.variant} with softmax"


def _network(name: str, px: int, head: str | None) -> nn.Module:
    variant, _, softmax = name.partition(" with ")
    arguments: dict[str, Any] = {"name": variant, "img_size": px, **({"attention": softmax} if softmax else {})}
    if head is None:
        return create_model(**arguments)
    task = next(task for task in TASKS.usable() if head in task.heads)
    return task.bench_network(head, arguments, px)


def _pass(model: nn.Module, x: Tensor, backward: bool, compile: bool) -> Callable[[], object]:
    model.train(backward)
    if compile:
        # networks are objects of a few classes, of whose code each has graphs of its own
        torch._dynamo.config.recompile_limit = sys.maxsize
    run = torch.compile(model, mode="reduce-overhead") if compile else model

    def compute() -> Tensor:
        if backward:
            model.zero_grad()
        if compile:
            # what a graph gave before may be written over
            torch.compiler.cudagraph_mark_step_begin()
        result: Tensor = run(x)
        return result

    return timed_pass(compute, backward)


def faster_from(rows: Sequence[NetworkRow]) -> dict[tuple[str, int, str], float | None]:
    """By network, batch size and dtype the image size from which on it is faster than its reference, if it is."""
    crossings = {}
    for key in dict.fromkeys((row.network, row.batch_size, row.dtype) for row in rows):
        own = [row for row in rows if (row.network, row.batch_size, row.dtype) == key]
        crossings[key] = last_descent([(row.px, 1 / row.gain) for row in own if row.gain is not None])
    return crossings


def networks_table(rows: Sequence[NetworkRow]) -> str:
    """The rows for a terminal, and from which size on each network is faster than its reference."""
    several = len({(row.batch_size, row.dtype) for row in rows}) > 1
    heads = ["network", "px", *(["batch", "dtype"] if several else [])]
    lines = [[*heads, "ms", "images/s", "softmax ÷", "peak MB", "softmax MB", "spread"]]
    for row in rows:
        gain = "" if row.gain is None else f"{row.gain:.2f}"
        other = "" if row.reference_mb is None else f"{row.reference_mb:.0f}"
        lines.append([row.network, str(row.px), *([str(row.batch_size), row.dtype] if several else [])])
        lines[-1] += [
            f"{row.ms:.{1 if row.ms >= 10 else 3}f}",
            f"{row.images_per_s:.1f}",
            gain,
            f"{row.peak_mb:.0f}",
            other,
            f"{row.spread:.0%}",
        ]
    smallest = min(row.px for row in rows) if rows else 0
    said = [columns(lines), "", "Faster than the same host with softmax:"]
    for (name, batch_size, dtype), px in faster_from(rows).items():
        where = "at no size measured" if px is None else f"from about {px:.0f} px on"
        at = f" (batch {batch_size}, {dtype})" if several else ""
        said.append(f"  {name}{at} {'at every size measured' if px == smallest else where}")
    return "\n".join(said)
