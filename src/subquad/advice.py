"""What another attention can gain in a network on this machine, and which engine and number format to take.

import subquad

print(subquad.advise("timm/vit_small_patch14_dinov2", img_size=[518, 1036]).text)
"""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from subquad.conversion import Advice, convert
from subquad.conversion import advise as advise_on_mechanisms
from subquad.conversion.measured_costs import check_sizes
from subquad.copying import copied
from subquad.errors import SubquadError
from subquad.exports import exporter_named
from subquad.exports.engine_times import INT8, EngineTime, time_engines
from subquad.inference import check_computes
from subquad.ranges import Positive, checks_arguments
from subquad.runs.untrained_networks import maker_of
from subquad.text import columns

AS_IT_IS = "as it is"
Size = tuple[int, int]


@dataclass(frozen=True)
class Advised:
    """What was measured.

    Attributes:
        source: the network that it is about.
        mechanisms: the network as it is, with other mechanisms and with none.
        engines: by size, passes of the network as it is and with the quickest mechanism in every engine.
        blocks: numbers of the attention layers that are replaced; None for all.
    """

    source: str
    mechanisms: Advice
    engines: dict[Size, list[EngineTime]]
    blocks: Sequence[int] | None = None

    @property
    def text(self) -> str:
        """Tables for a terminal, and what to take at each size."""
        return "\n\n".join([self.mechanisms.text, *(self._engines_text(px) for px in self.engines)])

    def fastest(self, px: Size, *, int8: bool = False) -> EngineTime | None:
        """The quickest pass of an image of a size, whichever network it is of; None where there is none.

        Those in int8 are asked for alone: what they cost in accuracy shows in no time.
        """
        timed = [row for row in self.engines[px] if row.ms is not None and (row.dtype == INT8) is int8]
        return min(timed, key=lambda row: row.ms or 0.0, default=None)

    def _engines_text(self, px: Size) -> str:
        rows = self.engines[px]
        names = list(dict.fromkeys(row.network for row in rows))
        cells: dict[tuple[str, str], dict[str, str]] = {(row.engine, row.dtype): {} for row in rows}
        for row in rows:
            cells[row.engine, row.dtype][row.network] = f"{row.ms:.1f}" if row.ms else "fails"
        body = [[" ".join(form), *(times.get(name, "") for name in names)] for form, times in cells.items()]
        lines = [columns([[f"{px[0]}×{px[1]}, ms", *names], *body])]
        lines += _reasons(rows)
        # a command that is wider than a terminal goes on in the next line, as a shell takes it
        wrapped = [textwrap.wrap(line, 76, subsequent_indent="    ") for line in self._what_to_take(px)]
        return "\n".join([*lines, *(" \\\n".join(parts) for parts in wrapped)])

    def _what_to_take(self, px: Size) -> list[str]:
        row = self.fastest(px)
        if row is None or row.ms is None:
            return []
        said = f"take {row.network}, {row.engine} {row.dtype}: {row.ms:.1f} ms"
        # of the same table, in whose turns both were timed
        before = next((one.ms for one in self.engines[px] if (one.network, one.engine) == (AS_IT_IS, "PyTorch")), None)
        lines = [said + (f", {before / row.ms:.2f} times as fast as it is in PyTorch" if before else "")]
        made = self.source
        if row.network != AS_IT_IS:
            made = "runs/converted"
            which = "" if self.blocks is None else f" --blocks {' '.join(map(str, self.blocks))}"
            lines.append(f"  subquad convert {self.source} --attention {row.network}{which} --images … --output {made}")
        if row.engine == "optimize":
            lines.append(
                "  subquad.keep_memory(); subquad.optimize(model"
                + (", torch.bfloat16)" if row.dtype == "bf16" else ")")
            )
        elif row.engine != "PyTorch":
            lines.append(_export(made, row.engine, f"--dtype {row.dtype}", px))
        small = self.fastest(px, int8=True)
        if small is not None and small.ms is not None and small.ms < row.ms:
            lines.append(f"in int8, {small.network} takes {small.ms:.1f} ms; what it costs says subquad eval --engine")
            if small.network == row.network:
                lines.append(_export(made, small.engine, "--int8 dynamic", px))
        return lines


def _export(made: str, engine: str, precision: str, px: Size) -> str:
    size = px[0] if px[0] == px[1] else f"{px[0]} {px[1]}"
    return f"  subquad export {made} --format {engine} {precision} --img-size {size} --output …"


@checks_arguments
def advise(
    source: Path | str | Callable[[Size], nn.Module],
    *,
    img_size: Positive | Sequence[Positive | tuple[Positive, Positive]] = (512, 1024),
    attention: Sequence[str] | None = None,
    blocks: Sequence[int] | None = None,
    engines: Sequence[str] | None = None,
    repeats: Positive = 5,
    dtype: torch.dtype = torch.float32,
    log: Callable[[str], None] = lambda line: None,
) -> Advised:
    """Measure where a network's time goes, what other mechanisms gain, and what a pass takes in every engine.

    Args:
        source: a network of ours by name, timm/NAME, a run, a network that takes images of these sizes, or a function
            of (height, width) that makes one for each. Weights do not matter.
        img_size: pixels of images, one size or several.
        attention: mechanisms; all that are not quadratic and fit the network if left out.
        blocks: which attention layers; all if left out.
        engines: formats of `subquad export` to time beside PyTorch; those that are installed if left out, and with
            none at all PyTorch in other forms is not timed either.
        repeats: passes of each, in turn.
        dtype: of the first table; engines are timed in fp32, in bf16 where the processor multiplies it, and in int8.
        log: gets a line for each thing that is timed.

    Raises:
        SubquadError: there is no such network, size, mechanism or engine, or nothing in it can be converted.
    """
    check_computes(dtype)
    for name in engines or ():
        # minutes before it is its turn
        exporter_named(name)
    if isinstance(source, Path):
        source = str(source)
    make = _maker(source)
    given = [img_size] if isinstance(img_size, int) else img_size
    if not given:
        raise SubquadError("there is no size of images to advise on: name one, img_size=512")
    sizes = [(one, one) if isinstance(one, int) else (one[0], one[1]) for one in given]
    mechanisms = advise_on_mechanisms(make, sizes, attention, blocks=blocks, repeats=repeats, dtype=dtype, log=log)
    timed = {}
    for px in sizes if engines is None or engines else ():
        model = make(px).eval()
        networks = {AS_IT_IS: model}
        at_size = [row for row in mechanisms.rows if row.px == px and row.attention not in ("", "nothing")]
        if at_size:
            name = min(at_size, key=lambda row: row.ms).attention
            networks[name] = convert(model, name, blocks=blocks, img_size=px)
        timed[px] = time_engines(networks, px, engines, repeats=repeats, log=log)
    return Advised(source if isinstance(source, str) else "MODEL", mechanisms, timed, blocks)


def _reasons(rows: Sequence[EngineTime]) -> list[str]:
    """Why there are passes without a time: a line for each reason."""
    alike: dict[str, list[str]] = {}
    for row in rows:
        if row.reason:
            alike.setdefault(row.reason, []).append(f"{row.engine} {row.dtype}, {row.network}")
    return [f"{'all' if len(of) == len(rows) > 1 else '; '.join(of)}: {reason}" for reason, of in alike.items()]


def _maker(source: str | Callable[[Size], nn.Module]) -> Callable[[Size], nn.Module]:
    if isinstance(source, str):
        return maker_of(source)
    return partial(_as_it_is, source) if isinstance(source, nn.Module) else source


def _as_it_is(network: nn.Module, px: Size) -> nn.Module:
    """A copy, of what is timed in other number formats as well."""
    again = copied(network).eval()
    check_sizes(again, [px], "give the part that takes images alone, or a function of (height, width) that makes one")
    return again
