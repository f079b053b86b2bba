"""What attention costs beside its projections, against softmax and the textbook form, in one interleaved run."""

import csv
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from subquad.attention import traits_of
from subquad.benchmarks.cuda_graphs import recorded
from subquad.benchmarks.floors import copy_gb_per_s, moved_bytes
from subquad.benchmarks.layers_on_squares import check_mechanisms, last_descent, layer_on_tokens
from subquad.benchmarks.memory import peak_memory_mb
from subquad.benchmarks.textbook import TEXTBOOK
from subquad.errors import SubquadError, check_suffix, unknown_name
from subquad.models.assembling import settings_of
from subquad.models.attention_names import parse_attention
from subquad.ranges import check_positive
from subquad.text import columns, counted
from subquad.timing import interleaved_ms, timed_pass, warmed_up
from subquad.writing import replacing, write_json

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(name: str) -> torch.dtype:
    """A name of DTYPES as torch has it."""
    if name not in DTYPES:
        raise unknown_name("dtype", name, DTYPES)
    return DTYPES[name]


@dataclass(frozen=True)
class BlockRow:
    """One mechanism at one length: medians in milliseconds over interleaved repeats, and ratios of these medians.

    What was not timed is None, and so is what would follow of it.

    Attributes:
        block_ms: an attention layer, projections included.
        projections_ms: the layer's own two projections alone, its floor on a CPU.
        core_ms, textbook_ms, softmax_ms: between the projections: the mechanism, its textbook form, SDPA softmax.
        softmax_block_ms: a layer with softmax.
        floor_ms: the core's tokens read and written once, at the speed of a copy on this device.
        over_projections: block over projections; least is best.
        of_floor: the floor over the core: 1 is as fast as a copy.
        textbook_gain, softmax_gain: how many times faster the core is than these; more is better.
        images_per_s: of the block, or of the core where the whole layer was not timed.
        spread: (max − min) / median of the repeats, and peak_mb the memory of the same.
    """

    mechanism: str
    tokens: int
    batch_size: int
    dtype: str
    block_ms: float | None
    projections_ms: float | None
    core_ms: float | None
    textbook_ms: float | None
    softmax_ms: float | None
    softmax_block_ms: float | None
    floor_ms: float | None
    over_projections: float | None
    of_floor: float | None
    textbook_gain: float | None
    softmax_gain: float | None
    images_per_s: float
    spread: float
    peak_mb: float


PARTS = ("core", "block", "projections", "textbook")
"""What can be timed of a layer: what lies between its projections, all of it, these alone, and the textbook form."""


def measure_blocks(
    mechanisms: Sequence[str],
    tokens: Sequence[int],
    *,
    parts: Sequence[str] = PARTS,
    dim: int = 192,
    num_heads: int = 3,
    batch_size: int = 1,
    dtype: str = "fp32",
    device: torch.device | str = "cpu",
    backward: bool = False,
    ops: bool = False,
    compile: bool = False,
    graphs: bool = False,
    repeats: int = 15,
    max_softmax_tokens: int | None = None,
    time_budget_s: float = math.inf,
    log: Callable[[str], None] = lambda line: None,
) -> list[BlockRow]:
    """Time attention layers on square grids; all parts of all mechanisms take turns within each repeat.

    Mechanisms may have settings behind their names, "inline:local=false", and have no textbook form then. With `ops`
    the operations alone: without projections and without the branch that is local. Softmax, beside which all are set,
    is left out above `max_softmax_tokens` (16,384 if not given, 65,536 on a GPU), where a repeat would take seconds,
    and above 4,096 its textbook form, which writes its map out. With `compile` all that is timed is made by
    torch.compile, textbook forms too; with `graphs` passes are recorded as CUDA graphs, and what is timed is their
    replay. A mechanism whose repeats at a length would not fit what is left of `time_budget_s` is left out from there
    on, and `log` hears of it.
    """
    check_mechanisms(mechanisms)
    check_positive(repeats=repeats, batch_size=batch_size)
    kind, device = dtype_of(dtype), torch.device(device)
    if max_softmax_tokens is None:
        max_softmax_tokens = 16384 if device.type == "cpu" else 65536
    deadline = time.perf_counter() + time_budget_s
    asked, whole = _asked_parts(parts, ops)
    speed = copy_gb_per_s(device) if "core" in asked else None
    if speed is not None:
        log(f"a copy moves {speed:.1f} GB/s")
    rows: list[BlockRow] = []
    running = list(dict.fromkeys([*mechanisms, "softmax"]))
    for length in sorted(tokens):
        shape = (batch_size, length, dim)
        if length > max_softmax_tokens and "softmax" in running:
            running.remove("softmax")
            if "softmax" in mechanisms:
                log(f"softmax is left out from {length} tokens on: it is timed up to {max_softmax_tokens}")
        passes: dict[tuple[str, str], Callable[[], Any]] = {}
        inputs: dict[str, tuple[int, tuple[int, int, int]]] = {}
        for name in running:
            made, inputs[name] = _parts(name, shape, num_heads, kind, device, backward, ops, compile, graphs)
            passes |= {(name, part): run for part, run in made.items() if part in asked}
        plain = passes
        if graphs:
            passes = {key: recorded(run, device) for key, run in passes.items()}
        passes, slow = warmed_up(
            passes, device, is_too_slow=lambda seconds: seconds * (repeats + 2) > deadline - time.perf_counter()
        )
        for name, seconds in {name: seconds for (name, _), seconds in slow.items()}.items():
            running.remove(name)
            if name in mechanisms:
                log(f"{name} is left out from {length} tokens on: {seconds:.1f} s a pass")
        passes = {key: run for key, run in passes.items() if key[0] in running}
        if not any(name in running for name in mechanisms):
            continue
        log(f"{length} tokens: {counted(len(passes), 'pass')}, {counted(repeats, 'time')} each")
        times = interleaved_ms(passes, repeats, device)
        for name in [name for name in mechanisms if name in running]:
            bytes_moved = moved_bytes(*inputs[name], kind, backward=backward)
            floor_ms = None if speed is None else bytes_moved / speed / 1e6
            peak_mb = peak_memory_mb(plain[name, whole], device)
            rows.append(_row(name, length, batch_size, dtype, times, whole, floor_ms, peak_mb))
    return rows


def _asked_parts(parts: Sequence[str], ops: bool) -> tuple[set[str], str]:
    """What is timed of a layer, and which part of it images a second, spread and memory are of."""
    for part in parts:
        if part not in PARTS:
            raise unknown_name("part of a layer", part, PARTS)
    asked = set(parts) - ({"block", "projections"} if ops else set())
    whole = next((part for part in ("block", "core") if part in asked), None)
    if whole is None:
        without = "core, as operations alone have no block" if ops else "block or core"
        raise SubquadError(f"the parts that are timed must have {without}: got {', '.join(parts) or 'none'}")
    return asked, whole


def _parts(
    name: str,
    shape: tuple[int, int, int],
    num_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    backward: bool,
    ops: bool,
    compile: bool,
    graphs: bool,
) -> tuple[dict[str, Callable[[], Any]], tuple[int, tuple[int, int, int]]]:
    """What is timed of a mechanism: the layer, its projections, its core, its textbook form; how many inputs it has.

    The number comes with the shape of each of them, which is wider than the layer's where a mechanism has more heads.
    """
    mechanism, own = parse_attention(name)
    settings = {"local": False} if ops and "local" in settings_of(mechanism) else {}
    layer, x, grid = layer_on_tokens(
        name, shape, num_heads, device=device, dtype=dtype, backward=backward, settings=settings
    )
    with torch.no_grad():
        heads = rearrange(layer.qkv(x), "b n (p h d) -> p b h n d", p=len(layer.projected), h=layer.all_heads)
    heads.requires_grad_(backward)
    others = {"x": x, "padding": None, "mask": None, "rotation": None}
    cut = dict(zip(layer.projected, heads.unbind(0), strict=True)) | others

    def supply() -> dict[str, Any]:
        # what is recorded goes back over nothing that was computed outside
        return dict(zip(layer.projected, heads.unbind(0), strict=True)) | others if graphs else cut

    def core() -> Tensor:
        given = supply()
        result: Tensor = layer.inner(**{key: given[key] for key in layer.inner.inputs}, grid=grid, kv_grid=grid)
        return result

    # the output projection reads heads that a mechanism has beside the layer's as well
    core_shape = (shape[0], shape[1], layer.proj.in_features)
    read = x if core_shape == shape else x.new_zeros(core_shape)

    def projections() -> Tensor | tuple[Tensor, Tensor]:
        return layer.qkv(x).sum() + layer.proj(read).sum() if backward else (layer.qkv(x), layer.proj(read))

    parts: dict[str, Callable[[], Any]] = {"core": core}
    if not ops:
        parts |= {"block": lambda: layer(x, grid=grid), "projections": projections}
    # the textbook's forms are of the mechanisms as published
    if not own and mechanism in TEXTBOOK and (shape[1] <= 4096 or not traits_of(layer.inner).quadratic):
        parts["textbook"] = lambda: TEXTBOOK[mechanism](layer.inner, supply(), grid)
    if compile:
        # each is a graph of its own, and all lambdas are of the same few lines
        torch._dynamo.config.recompile_limit = sys.maxsize
        parts = {part: torch.compile(run) for part, run in parts.items()}
    # heads are cut from one tensor for all of them
    timed = {part: timed_pass(run, backward, shares_graph=not graphs) for part, run in parts.items()}
    return timed, (len(layer.projected), core_shape)


def _row(
    name: str,
    length: int,
    batch_size: int,
    dtype: str,
    times: dict[tuple[str, str], list[float]],
    whole: str,
    floor_ms: float | None,
    peak_mb: float,
) -> BlockRow:
    medians = {key: statistics.median(repeats) for key, repeats in times.items()}
    core, block, projections, textbook = (medians.get((name, part)) for part in PARTS)
    softmax = medians.get(("softmax", "core"))
    return BlockRow(
        mechanism=name,
        tokens=length,
        batch_size=batch_size,
        dtype=dtype,
        block_ms=block,
        projections_ms=projections,
        core_ms=core,
        textbook_ms=textbook,
        softmax_ms=softmax,
        softmax_block_ms=medians.get(("softmax", "block")),
        floor_ms=floor_ms,
        over_projections=_ratio(block, projections),
        of_floor=_ratio(floor_ms, core),
        textbook_gain=_ratio(textbook, core),
        softmax_gain=_ratio(softmax, core),
        images_per_s=1000 * batch_size / medians[name, whole],
        spread=(max(times[name, whole]) - min(times[name, whole])) / medians[name, whole],
        peak_mb=peak_mb,
    )


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def faster_than_softmax(rows: Sequence[BlockRow]) -> dict[tuple[str, int, str], float | None]:
    """By mechanism, batch size and dtype the number of tokens from which on it is faster than softmax, if it is.

    Layers are compared with layers, operations with operations. Between two measured lengths the ratio of the medians
    is interpolated in logarithms; faster from the first length on gives that length.
    """
    crossings = {}
    for key in dict.fromkeys((row.mechanism, row.batch_size, row.dtype) for row in rows if row.mechanism != "softmax"):
        own = [row for row in rows if (row.mechanism, row.batch_size, row.dtype) == key]
        ratios = []
        for row in sorted(own, key=lambda row: row.tokens):
            alone = row.block_ms is None
            pair = (row.core_ms, row.softmax_ms) if alone else (row.block_ms, row.softmax_block_ms)
            ratios.append((row.tokens, _ratio(*pair)))
        crossings[key] = last_descent([(tokens, ratio) for tokens, ratio in ratios if ratio is not None])
    return crossings


def blocks_table(rows: Sequence[BlockRow]) -> str:
    """The rows for a terminal, and from which length on each mechanism is faster than softmax."""
    several = len({(row.batch_size, row.dtype) for row in rows}) > 1
    alone = all(row.block_ms is None for row in rows)
    lines = [["operation" if alone else "layer", "tokens", *(["batch", "dtype"] if several else [])]]
    lines[0] += [*([] if alone else ["ms", "÷proj"]), "core ms", "img/s", "copy", "text", "soft", "MB", "±"]
    for row in rows:
        cells = [row.mechanism, str(row.tokens), *([str(row.batch_size), row.dtype] if several else [])]
        cells += [] if alone else [_milliseconds(row.block_ms), _number(row.over_projections)]
        cells += [
            _milliseconds(row.core_ms),
            f"{row.images_per_s:.{0 if row.images_per_s > 99 else 1}f}",
            "" if row.of_floor is None else f"{row.of_floor:.0%}",
        ]
        cells += [_number(row.textbook_gain), _number(row.softmax_gain), f"{row.peak_mb:.1f}", f"{row.spread:.0%}"]
        lines.append(cells)
    said = []
    for (name, batch_size, dtype), tokens in faster_than_softmax(rows).items():
        own = [row.tokens for row in rows if row.mechanism == name and (row.softmax_ms or row.softmax_block_ms)]
        if not own:
            continue
        every = tokens is not None and tokens <= min(own)
        where = "at no length measured" if tokens is None else f"from about {tokens:.0f} tokens on"
        at = f" (batch {batch_size}, {dtype})" if several else ""
        said.append(f"  {name}{at} {'at every length measured' if every else where}")
    legend = [] if alone else ["÷proj: the layer over its projections. core: what lies between them."]
    legend.append("copy: a copy of the core's tokens over the core. ±: spread over median.")
    legend.append("text, soft: how many times faster the core is than its textbook form, than SDPA.")
    return "\n".join([columns(lines), *legend, *(["", "Faster than softmax:", *said] if said else [])])


def _milliseconds(value: float | None) -> str:
    """Of short passes to microseconds."""
    return f"{value:.3f}" if value is not None and value < 1 else _number(value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


MEASUREMENTS = "measurements are", ".csv", ".json"
"""How rows are written."""


def save_rows(rows: Sequence[Any], path: Path, about: dict[str, Any]) -> None:
    """Write rows, dataclasses of one kind, as .csv, or as .json with what they are `about`.

    Raises:
        SubquadError: there are none, or the name of the file ends otherwise.
    """
    check_suffix(path, *MEASUREMENTS)
    if not rows:
        raise SubquadError(f"nothing was measured that could be written to {path}")
    records = [dataclasses.asdict(row) for row in rows]
    if path.suffix == ".json":
        write_json(path, {"about": about, "rows": records}, indent=1)
    else:
        with replacing(path) as aside, aside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(records[0]))
            writer.writeheader()
            writer.writerows(records)
