"""What attention costs beside its projections, against softmax and the textbook form, in one interleaved run."""

import csv
import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from subquad.attention import ATTENTION, QUADRATIC
from subquad.bench.memory import peak_memory_mb
from subquad.bench.scaling import interleaved_ms, square
from subquad.bench.textbook import TEXTBOOK
from subquad.errors import SubquadError, unknown_name
from subquad.models.layers import SelfAttention
from subquad.text import columns

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(name: str) -> torch.dtype:
    """A name of DTYPES as torch has it."""
    if name not in DTYPES:
        raise unknown_name("dtype", name, DTYPES)
    return DTYPES[name]


@dataclass(frozen=True)
class BlockRow:
    """One mechanism at one length: medians in milliseconds over interleaved repeats, and ratios of these medians.

    Attributes:
        block_ms: an attention layer, projections included; spread is (max − min) / median of its repeats.
        projections_ms: the layer's own two projections alone, its floor on a CPU.
        core_ms, textbook_ms, softmax_ms: between the projections: the mechanism, its textbook form, SDPA softmax.
        over_projections: block over projections; least is best.
        textbook_gain, softmax_gain: how many times faster the core is than these; more is better.
    """

    mechanism: str
    tokens: int
    block_ms: float
    projections_ms: float
    core_ms: float
    textbook_ms: float | None
    softmax_ms: float | None
    over_projections: float
    textbook_gain: float | None
    softmax_gain: float | None
    spread: float
    peak_mb: float


def measure_blocks(
    mechanisms: Sequence[str],
    tokens: Sequence[int],
    *,
    dim: int = 192,
    num_heads: int = 3,
    batch_size: int = 1,
    dtype: str = "fp32",
    device: torch.device | str = "cpu",
    backward: bool = False,
    repeats: int = 15,
    max_softmax_tokens: int = 16384,
    log: Callable[[str], None] = lambda line: None,
) -> list[BlockRow]:
    """Time attention layers on square grids; all parts of all mechanisms take turns within each repeat.

    Softmax is left out above `max_softmax_tokens`, where a repeat would take seconds, and above 4,096 its textbook
    form, which writes its map out.
    """
    for mechanism in mechanisms:
        if mechanism not in ATTENTION:
            raise unknown_name("attention", mechanism, ATTENTION)
    kind, device = dtype_of(dtype), torch.device(device)
    rows: list[BlockRow] = []
    for length in sorted(tokens):
        shape = (batch_size, length, dim)
        with_softmax = length <= max_softmax_tokens
        passes: dict[tuple[str, str], Callable[[], Any]] = {}
        for name in dict.fromkeys([*mechanisms, *(["softmax"] if with_softmax else [])]):
            if name == "softmax" and not with_softmax:
                continue
            for part, run in _parts(name, shape, num_heads, kind, device, backward).items():
                passes[name, part] = run
        log(f"{length} tokens: {len(passes)} passes, {repeats} times each")
        for run in passes.values():
            run()
        times = interleaved_ms(passes, repeats, device)
        for name in mechanisms:
            if (name, "block") in passes:
                rows.append(_row(name, length, times, peak_memory_mb(passes[name, "block"], device)))
    return rows


def _parts(
    name: str,
    shape: tuple[int, int, int],
    num_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    backward: bool,
) -> dict[str, Callable[[], Any]]:
    """What is timed of a mechanism: the layer, its projections, its core, its textbook form."""
    batch, length, dim = shape
    grid = square(length)
    if dim % num_heads:
        raise SubquadError(f"{num_heads} heads do not divide a width of {dim}: choose num_heads among its divisors")
    layer: Any = SelfAttention(dim, num_heads, ATTENTION[name], grid=grid).to(device=device, dtype=dtype).eval()
    x = torch.randn(batch, length, dim, device=device, dtype=dtype, requires_grad=backward)
    with torch.no_grad():
        heads = rearrange(layer.project(x), "b n (p h d) -> p b h n d", p=len(layer.projected), h=num_heads)
    supply = dict(zip(layer.projected, heads.requires_grad_(backward).unbind(0), strict=True))
    supply |= {"x": x, "padding": None, "mask": None}
    inputs = {key: supply[key] for key in layer.inner.inputs}

    def projections() -> Tensor:
        return layer.project(x).sum() + layer.proj(x).sum() if backward else (layer.project(x), layer.proj(x))[1]

    parts = {
        "block": _timed(lambda: layer(x, grid=grid), backward),
        "projections": _timed(projections, backward),
        "core": _timed(lambda: layer.inner(**inputs, grid=grid, kv_grid=grid), backward),
    }
    if name not in QUADRATIC or length <= 4096:
        parts["textbook"] = _timed(lambda: TEXTBOOK[name](layer.inner, supply, grid), backward)
    return parts


def _timed(run: Callable[[], Tensor], backward: bool) -> Callable[[], Any]:
    def forward() -> None:
        with torch.inference_mode():
            run()

    def both() -> None:
        run().sum().backward(retain_graph=True)

    return both if backward else forward


def _row(name: str, length: int, times: dict[tuple[str, str], list[float]], peak_mb: float) -> BlockRow:
    block, projections, core = (statistics.median(times[name, part]) for part in ("block", "projections", "core"))
    textbook, softmax = (
        statistics.median(times[key]) if key in times else None for key in ((name, "textbook"), ("softmax", "core"))
    )
    return BlockRow(
        mechanism=name,
        tokens=length,
        block_ms=block,
        projections_ms=projections,
        core_ms=core,
        textbook_ms=textbook,
        softmax_ms=softmax,
        over_projections=block / projections,
        textbook_gain=None if textbook is None else textbook / core,
        softmax_gain=None if softmax is None else softmax / core,
        spread=(max(times[name, "block"]) - min(times[name, "block"])) / block,
        peak_mb=peak_mb,
    )


def blocks_table(rows: Sequence[BlockRow]) -> str:
    """The rows for a terminal."""
    heads = ["mechanism", "tokens", "block ms", "÷ proj.", "core ms", "textbook ÷", "softmax ÷", "peak MB", "spread"]
    lines = [heads]
    for row in rows:
        gains = ["" if gain is None else f"{gain:.2f}" for gain in (row.textbook_gain, row.softmax_gain)]
        cells = [row.mechanism, str(row.tokens), f"{row.block_ms:.2f}", f"{row.over_projections:.2f}"]
        cells += [f"{row.core_ms:.2f}", *gains, f"{row.peak_mb:.1f}", f"{row.spread:.0%}"]
        lines.append(cells)
    return columns(lines)


def save_rows(rows: Sequence[Any], path: Path, about: dict[str, Any]) -> None:
    """Write rows, dataclasses of one kind, as .csv, or as .json with what they are `about`."""
    records = [dataclasses.asdict(row) for row in rows]
    if path.suffix == ".json":
        path.write_text(json.dumps({"about": about, "rows": records}, indent=1) + "\n")
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(records[0]))
            writer.writeheader()
            writer.writerows(records)
    else:
        raise SubquadError(f"measurements are written as .csv or .json, got {path.name}")
