"""What replacing softmax can gain in a network at a size, before anything is spent on it.

In a block of n tokens and c channels, attention between its projections takes 2n²c products and the rest 12nc². Where
all of it were free, the block would be 1 + n/(6c) times as fast: the ceiling. In windows, with fewer keys, and beside
MLPs of another width there are other numbers of products: there they are counted. Measured, the same question is put to
the network with layers that mix nothing and hand their values on.
"""

import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from subquad.attention import ATTENTION, traits_of
from subquad.benchmarks.memory import peak_memory_mb
from subquad.benchmarks.time_shares import shares_of_time
from subquad.conversion.converted_attention import ConvertedAttention
from subquad.conversion.counted_products import Counted, count_mixing
from subquad.conversion.pyramids import in_common
from subquad.conversion.replacing import convert, converted_layers
from subquad.conversion.tower import Tower
from subquad.conversion.towers import find_tower
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.models.stated_inputs import image_channels
from subquad.ranges import check_repeats
from subquad.text import columns, one_line
from subquad.timing import Run, interleaved_ms

MIXING = "attention between its projections"
WORTH_A_WORD = 0.01
"""The least share of the time that is printed."""


class HandOn(nn.Module):
    """Mixes nothing: a query gets its own value. What is left of a layer is what no mechanism can save."""

    inputs = ("q", "k", "v", "padding")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None, *, grid: TokenGrid, kv_grid: TokenGrid
    ) -> Tensor:
        return v


@dataclass(frozen=True)
class AdviceRow:
    """A network at a size, with a mechanism in the blocks that can be converted.

    Attributes:
        attention: the mechanism; "" for the network as it is, "nothing" for layers that mix nothing.
        px: height and width of the image.
        tokens: of each block, prefix included.
        ms: the median of a pass over one image.
        gain: how many times as fast as the network as it is.
        of_ceiling: of the gain of layers that mix nothing, what part; None for the network as it is.
        peak_mb: memory of a pass beyond the weights.
    """

    attention: str
    px: tuple[int, int]
    tokens: int
    ms: float
    gain: float
    of_ceiling: float | None
    peak_mb: float


@dataclass(frozen=True)
class Advice:
    """Rows at several sizes, and what is known of each size without a clock.

    Attributes:
        rows: as measured.
        times: by size, which part of the time of the network as it is goes where: attention's mixing, as measured, and
            the kinds of `shares_of_time`, of layers that mix nothing. Without the sizes of other devices than CPUs.
        ceilings: 1 + n/(6c), of plain networks, and less where blocks keep their attention.
        counted: the share of attention's mixing in all products, of networks that are not plain (windows, pyramids);
            without the sizes at which they can't be counted.
        blocks: attention layers.
        converted: how many of them would be.
    """

    rows: list[AdviceRow]
    times: dict[tuple[int, int], dict[str, float]]
    ceilings: dict[tuple[int, int], float]
    counted: dict[tuple[int, int], Counted]
    blocks: int
    converted: int

    @property
    def text(self) -> str:
        """A table for a terminal."""
        head = ["size", "tokens", "attention", "ms", "gain", "of ceiling", "peak MB"]
        body = []
        for row in self.rows:
            name = {"": "as it is", "nothing": "(mixes nothing)"}.get(row.attention, row.attention)
            share = "" if row.of_ceiling is None else f"{row.of_ceiling:.0%}"
            size = f"{row.px[0]}×{row.px[1]}"
            body.append([size, str(row.tokens), name, f"{row.ms:.1f}", f"{row.gain:.2f}", share, f"{row.peak_mb:.0f}"])
        lines = [columns([head, *body])]
        for px, shares in self.times.items():
            parts = ", ".join(f"{share:.0%} {kind}" for kind, share in shares.items() if share >= WORTH_A_WORD)
            lines.append(textwrap.fill(f"{px[0]}×{px[1]}: its time is {parts}", 79, subsequent_indent="  "))
        for px, ceiling in self.ceilings.items():
            some = "" if self.converted == self.blocks else f" in {self.converted} of {self.blocks} blocks"
            lines.append(
                f"{px[0]}×{px[1]}: by counting products, 1 + n/(6c){some}, at most {ceiling:.2f} times as fast"
            )
        lines += [f"{px[0]}×{px[1]}: {counted.text}" for px, counted in self.counted.items()]
        lines.append(f"{self.converted} of {self.blocks} blocks would be converted")
        return "\n".join(lines)


def advise(
    make: Callable[[tuple[int, int]], nn.Module],
    sizes: Sequence[tuple[int, int]],
    attention: Sequence[str] | None = None,
    *,
    blocks: Sequence[int] | None = None,
    repeats: int = 5,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    log: Callable[[str], None] = lambda line: None,
) -> Advice:
    """Time a network as it is, with mechanisms in it, and with nothing in their place; all take turns.

    Args:
        make: the network for images of (height, width); weights do not matter.
        sizes: (height, width) of images.
        attention: mechanisms; if left out those that are not quadratic and can stand in its layers' place.
        blocks: see `convert`.
        repeats: passes of each.
        dtype: of weights and images.
        device: where.
        log: gets a line for each size.

    Raises:
        SubquadError: the network can't be converted, in one line.
    """
    check_repeats(repeats)
    names = attention
    if names is None:
        names = [name for name in ATTENTION.usable_names(log) if not traits_of(ATTENTION[name]).quadratic]
    where = torch.device(device)
    rows, spent, ceilings, counted = [], {}, {}, {}
    count = converted = 0
    for px in sizes:
        model = make(px)
        if getattr(model, "takes_lists", False):
            raise SubquadError(
                f"a {type(model).__name__} brings images to a size of its own, whichever it is given: advise on its "
                "backbone, a network by its name"
            )
        model = model.eval().to(where, dtype)
        tower = find_tower(model, img_size=px)
        networks: dict[str, nn.Module] = {"": model}
        for name in ["nothing", *names]:
            try:
                networks[name] = convert(model, "linear" if name == "nothing" else name, blocks=blocks, img_size=px)
            except SubquadError as refusal:
                # what the network itself refuses was said of nothing in its layers' place
                if attention is not None or name == "nothing":
                    raise
                log(f"{name} is left out: {refusal}")
        layers = converted_layers(networks["nothing"])
        for layer in layers.values():
            layer.inner = HandOn()
        count, converted = len(tower.layers), len(layers)
        if tower.is_plain and _has_usual_blocks(model, tower, layers):
            ceilings[px] = _ceiling(tower, layers)
        else:
            try:
                counted[px] = count_mixing(model, networks["nothing"], tower, px)
            except Exception as error:
                # without numbers networks of all kinds fail in ways of all kinds, and the rows are measured anyway
                log(f"{px[0]}×{px[1]}: products can't be counted, {one_line(error, 120)}")
        image = torch.randn(1, image_channels(model), *px, device=where, dtype=dtype)
        passes = {name: _pass(network, image) for name, network in networks.items()}
        for name, run in passes.items():
            log(f"{px[0]}×{px[1]} {name or 'as it is'}")
            run()
        times = {name: statistics.median(each) for name, each in interleaved_ms(passes, repeats, where).items()}
        highest = times[""] / times["nothing"]
        if where.type == "cpu":
            spent[px] = _where_time_goes(1 / highest, passes["nothing"])
        for name, ms in times.items():
            gain = times[""] / ms
            share = None if name == "" else gain / highest
            peak = peak_memory_mb(passes[name], where)
            rows.append(AdviceRow(name, px, tower.grid.num_tokens, ms, gain, share, peak))
    return Advice(rows, spent, ceilings, counted, count, converted)


def _where_time_goes(rest: float, without_mixing: Run) -> dict[str, float]:
    """Shares of the time, largest first, of which `rest` is that of the pass without mixing; 1 where noise has more."""
    rest = min(rest, 1.0)
    shares = {MIXING: 1 - rest}
    shares |= {kind: rest * share for kind, share in shares_of_time(without_mixing).items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _has_usual_blocks(model: nn.Module, tower: Tower, layers: dict[int, ConvertedAttention]) -> bool:
    """Whether what is not mixed takes 12nc² products in each block: four c × c projections, and an MLP 4c wide."""
    trunk = ".".join(in_common(layer.path for layer in tower.layers))
    if len(tower.layers) == 1:
        # "blocks.0.attn" of the block "blocks.0"
        trunk = trunk.rpartition(".")[0]
    layer = next(iter(layers.values()))
    linear = (part for part in model.get_submodule(trunk).modules() if isinstance(part, nn.Linear))
    return sum(part.weight.numel() for part in linear) == 12 * len(tower.layers) * (layer.num_heads * layer.width) ** 2


def _ceiling(tower: Tower, layers: dict[int, ConvertedAttention]) -> float:
    """1 + n/(6c) where all blocks are converted; what the others mix is left of it where some are."""
    layer = next(iter(layers.values()))
    kept = 1 - len(layers) / len(tower.layers)
    mixing = tower.grid.num_tokens / (6 * layer.num_heads * layer.width)
    return (1 + mixing) / (1 + kept * mixing)


def _pass(model: nn.Module, image: Tensor) -> Callable[[], Any]:
    def run() -> Any:
        with torch.inference_mode():
            return model(image)

    return run
