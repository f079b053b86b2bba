"""How an attention layer of anybody's class computes that is handed a map, as U-Nets and decoders have it.

What is projected are a map's pixels, by convolutions or by linear layers, and the map that is answered has often the
one that was handed added. Else such layers are read as those of tokens are (`readings.py`).

Letters: b batch, n tokens, c channels, y x rows and columns.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from subquad.attention.bricks import is_conv
from subquad.conversion.families.readings import (
    MOST_ASKED,
    Answered,
    Parts,
    Reading,
    all_readings,
    is_norm,
    is_without_tables,
    mixed_as,
    ways_of,
)
from subquad.conversion.families.twins import OF_LIBRARIES, Remembered, are_equal, twin_if_any, twin_of
from subquad.grid import TokenGrid

ASKED_MAPS = (2, 3, 4), (3, 2, 3), (1, 14, 14)
"""Images, rows and columns of the maps that a twin is asked about."""

ADDED = (1.0, 0.0), (1.0, 1.0), (sqrt(0.5), sqrt(0.5))
"""What an answer may be multiplied by, and the map that is added to it; the last keeps variances."""


class Form(NamedTuple):
    """How something is called with the tokens of a map: as a map (b, c, y, x), as rows (b, c, n), or as tokens."""

    name: str

    def of(self, tokens: Tensor, grid: TokenGrid) -> Tensor:
        """Tokens (b, n, c) in this form."""
        if self.name == "map":
            return grid.to_image(tokens)
        return tokens.mT if self.name == "rows" else tokens

    def tokens(self, given: Tensor) -> Tensor:
        """Tokens (b, n, c) of what something gives in this form."""
        return given if self.name == "tokens" else given.flatten(2).mT


MAP, ROWS, TOKENS = Form("map"), Form("rows"), Form("tokens")


class Projection(NamedTuple):
    """What gives a vector for each pixel: how it is called, and its channels."""

    form: Form
    in_features: int
    out_features: int


@dataclass(frozen=True)
class MapReading:
    """What the parts of a layer are that is handed a map.

    Attributes:
        reading: of its tokens.
        forms: how each part is called.
        times, kept: what its answer is multiplied by, and the map that is added to it.
        memory: the name of a parameter (2, h, ., d), keys and values that every pixel sees as well, or none.
    """

    reading: Reading
    forms: dict[str, Form]
    times: float
    kept: float
    memory: str | None = None


def projection_of(part: nn.Module | None) -> Projection | None:
    """How a part computes that is a linear layer, or a convolution that leaves a map its size, or begins with one."""
    if type(part) is nn.Sequential and len(part) and not any(True for one in part[1:] for _ in one.parameters()):
        return projection_of(part[0])
    if type(part) is nn.Linear:
        return Projection(TOKENS, part.in_features, part.out_features)
    convolution: Any = part
    if (type(part) is nn.Conv1d or (part is not None and is_conv(part))) and _keeps_sizes(convolution):
        form = ROWS if type(part) is nn.Conv1d else MAP
        return Projection(form, convolution.in_channels, convolution.out_channels)
    return None


def _keeps_sizes(convolution: Any) -> bool:
    if set(convolution.stride) != {1} or isinstance(convolution.padding, str):
        return bool(convolution.padding == "same")
    sides = zip(convolution.kernel_size, convolution.dilation, convolution.padding, strict=True)
    return all(2 * before == (size - 1) * apart for size, apart, before in sides)


def map_reading_of(layer: nn.Module) -> MapReading | None:
    """How a layer computes softmax attention of a map's pixels with each other; None where it does not, or not so."""
    if type(layer).__module__.partition(".")[0] in OF_LIBRARIES or _parts_of(layer) is None:
        return None
    return _readings_found(layer)


def holds_on(layer: nn.Module, grid: TokenGrid) -> bool:
    """Whether a layer that is known computes the same of a map of this size; of more than `MOST_ASKED` nobody knows."""
    return grid.num_tokens > MOST_ASKED or bool(_holding(int(grid.height), int(grid.width))(layer))


@functools.cache
def _holding(height: int, width: int) -> Remembered[bool]:
    def find(layer: nn.Module) -> bool:
        reading, twin = map_reading_of(layer), twin_of(layer)
        asked = None if reading is None else _ask(twin, reading.reading, (1, height, width))
        return reading is not None and asked is not None and _computes(reading, asked)

    return Remembered(find)


def _parts_of(layer: nn.Module) -> Parts | None:
    """The parts of a layer that may be attention; None where it can't be, or is more than its parts."""
    with_weights = {name: part for name, part in layer.named_children() if any(True for _ in part.parameters())}
    pointwise = {name: one for name, part in with_weights.items() if (one := projection_of(part)) is not None}
    norms = tuple(name for name, part in with_weights.items() if name not in pointwise and is_norm(part))
    own = [one for one in layer._parameters.values() if one is not None]
    is_plain = len(pointwise) + len(norms) == len(with_weights) and is_without_tables(layer)
    if len(own) > 1 or any(one.dim() != 4 or len(one) != 2 for one in own):
        return None
    if not is_plain or len(pointwise) not in (2, 3, 4) or len(norms) > 2 or "forward" in vars(layer):
        return None
    ways = tuple(ways_of(pointwise))
    return Parts(pointwise, norms, ways) if ways else None


class _Asked(NamedTuple):
    """A twin, the map (b, c, y, x) that it was asked about, and the one that it answered."""

    twin: Any
    x: Tensor
    y: Tensor


def _ask(twin: Any, parts: Parts | Reading, shape: tuple[int, int, int]) -> _Asked | None:
    """What a twin answers to a random map; None where it wants more, or answers with something else."""
    channels = parts.tokens_width if isinstance(parts, Parts) else _channels(twin, parts)
    x = torch.randn(shape[0], channels, *shape[1:], device="cpu", dtype=torch.float32)
    try:
        y = twin(x)
    except Exception:
        # that is somebody's code, which may say so in any way
        return None
    return _Asked(twin, x, y) if isinstance(y, Tensor) and y.dim() == 4 and y.shape[2:] == x.shape[2:] else None


def _channels(layer: Any, reading: Reading) -> int:
    first = projection_of(getattr(layer, reading.projections[0]))
    assert first is not None
    return first.in_features


def _read(layer: nn.Module) -> MapReading | None:
    """The reading by which a layer's twin computes, if there is one."""
    twin = twin_if_any(layer)
    parts = _parts_of(twin) if twin is not None else None
    if twin is None or parts is None:
        return None
    found = [_ask(twin, parts, shape) for shape in ASKED_MAPS]
    asked = [one for one in found if one is not None]
    if len(asked) < len(found):
        return None
    in_tokens = Answered(twin, MAP.tokens(asked[0].x), MAP.tokens(asked[0].y), 1, None)
    for reading in (each for one in all_readings(parts, in_tokens) for each in _on_maps(one, parts, twin)):
        # whatever is added, the same is mixed
        y = _mixed(reading, asked[0])
        for times, kept in ADDED if y is not None else ():
            added = replace(reading, times=times, kept=kept)
            if _is(added, asked[0], y) and all(_computes(added, one) for one in asked[1:]):
                return added
    return None


_readings_found = Remembered(_read)


def _on_maps(reading: Reading, parts: Parts, layer: nn.Module) -> Iterator[MapReading]:
    """The same of maps, with its norms called in each way in which they may be."""
    memory = next((name for name, one in layer._parameters.items() if one is not None), None)
    pointwise: Any = parts.linear
    forms = {name: pointwise[name].form for name in (*reading.projections, reading.proj)}
    first = forms[reading.projections[0]]
    alike = all(forms[name] == first for name in reading.projections)
    norms = [name for name in (reading.norm, reading.norm_behind) if name is not None]
    for of_norms in dict.fromkeys([first, MAP]) if norms else [first]:
        if alike:
            yield MapReading(reading, forms | dict.fromkeys(norms, of_norms), *ADDED[0], memory)


def _computes(reading: MapReading, asked: _Asked) -> bool:
    """Whether that is what a twin answered."""
    return _is(reading, asked, _mixed(reading, asked))


def _is(reading: MapReading, asked: _Asked, mixed: Tensor | None) -> bool:
    """The same of what it makes of the map, as far as nothing is added."""
    if mixed is None:
        return False
    answered = reading.times * mixed
    return are_equal(answered + reading.kept * MAP.tokens(asked.x) if reading.kept else answered, MAP.tokens(asked.y))


def _mixed(reading: MapReading, asked: _Asked) -> Tensor | None:
    """What a reading makes of the map that a twin was asked about, (b, n, c); None where its parts say no to it."""
    grid, parts = TokenGrid(*asked.x.shape[2:]), reading.reading

    def through(name: str, tokens: Tensor) -> Tensor:
        form = reading.forms[name]
        given: Tensor = getattr(asked.twin, name)(form.of(tokens, grid))
        return form.tokens(given)

    try:
        tokens = MAP.tokens(asked.x)
        normed = tokens if parts.norm is None else through(parts.norm, tokens)
        projected = [through(name, normed) for name in parts.projections]
        memory = None if reading.memory is None else getattr(asked.twin, reading.memory)
        return mixed_as(parts, asked.twin, projected, through, memory=memory)
    except Exception:
        # its parts are somebody's, and may be called otherwise
        return None
