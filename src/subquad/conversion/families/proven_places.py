"""Attention of places as networks of scenes and generators of images have it, of anybody's classes, proven by numbers.

Queries and keys have fewer channels than values, nothing is projected back, and a number that is learned weighs the
answer, which is added to the map: SAGAN (Zhang et al. 2018, arXiv 1805.08318), the position attention of DANet (Fu et
al. 2018, arXiv 1809.02983) and its many copies. All pairs of a map's places are formed in one head.

Letters: b batch, n tokens, c channels, r channels of queries and keys, y x rows and columns.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.conversion.converted_attention import ConvertedAttention
from subquad.conversion.families.map_readings import ASKED_MAPS, MAP, Form, Projection, projection_of
from subquad.conversion.families.proven_attention import refuse_number
from subquad.conversion.families.proven_maps import OfMaps
from subquad.conversion.families.readings import MOST_ASKED, Reading, is_without_tables
from subquad.conversion.families.twins import OF_LIBRARIES, Remembered, are_equal, twin_if_any, twin_of
from subquad.grid import TokenGrid


@dataclass(frozen=True)
class PlaceReading:
    """What the parts of such a layer are.

    Attributes:
        names: of what makes queries, keys and values.
        width: c.
        scale: what scores are multiplied by.
        weight: the name of the number that weighs the answer, or none.
        adds: whether the map is added.
    """

    names: tuple[str, ...]
    width: int
    scale: float
    weight: str | None
    adds: bool


def place_reading_of(layer: nn.Module) -> PlaceReading | None:
    """How a layer computes softmax attention of a map's places without projecting it back; None where it does not."""
    if type(layer).__module__.partition(".")[0] in OF_LIBRARIES or _parts_of(layer) is None:
        return None
    return _found(layer)


def _parts_of(layer: nn.Module) -> dict[str, Projection] | None:
    """Three layers of each pixel, of which two give as many channels, and one those that all read."""
    with_weights = {name: part for name, part in layer.named_children() if any(True for _ in part.parameters())}
    parts = {name: one for name, part in with_weights.items() if (one := projection_of(part)) is not None}
    own = [one for one in layer._parameters.values() if one is not None]
    if len(parts) != 3 or len(with_weights) != 3 or len(own) > 1 or any(one.numel() != 1 for one in own):
        return None
    widths = {one.in_features for one in parts.values()}
    return parts if len(widths) == 1 and is_without_tables(layer) and "forward" not in vars(layer) else None


def _ways(layer: nn.Module, parts: dict[str, Projection]) -> Iterator[PlaceReading]:
    """All that a layer might compute."""
    weight = next((name for name, one in layer._parameters.items() if one is not None), None)
    for names in permutations(parts):
        q, k, v = (parts[name] for name in names)
        if q.out_features == k.out_features <= v.out_features == v.in_features:
            for scale in (1.0, q.out_features**-0.5):
                for adds in (True, False):
                    yield PlaceReading(names, v.in_features, scale, weight, adds)


def _read(layer: nn.Module) -> PlaceReading | None:
    twin = twin_if_any(layer)
    parts = _parts_of(twin) if twin is not None else None
    if twin is None or parts is None:
        return None
    width = next(iter(parts.values())).in_features
    maps = [torch.randn(images, width, *sides, device="cpu", dtype=torch.float32) for images, *sides in ASKED_MAPS]
    return next((one for one in _ways(twin, parts) if all(_computes(one, twin, x) for x in maps)), None)


_found = Remembered(_read)


def _computes(reading: PlaceReading, twin: Any, x: Tensor) -> bool:
    """Whether that is what a twin answers to a map."""
    grid = TokenGrid(*x.shape[2:])
    try:
        forms = [_form_of(twin, name) for name in reading.names]
        named = zip(reading.names, forms, strict=True)
        q, k, v = (form.tokens(getattr(twin, name)(form.of(MAP.tokens(x), grid))) for name, form in named)
        y = (q @ k.mT * reading.scale).softmax(dim=-1) @ v
        y = y if reading.weight is None else y * getattr(twin, reading.weight)
        answered: Tensor = twin(x)
        return are_equal(y + MAP.tokens(x) if reading.adds else y, MAP.tokens(answered))
    except Exception:
        # that is somebody's code, which may be called otherwise
        return False


def _holds_on(reading: PlaceReading, layer: nn.Module, grid: TokenGrid) -> bool:
    """Whether that is what a layer computes of a map of this size; of more than `MOST_ASKED` nobody knows."""

    def find(layer: nn.Module) -> bool:
        return _computes(reading, twin_of(layer), torch.randn(1, reading.width, *grid.shape, device="cpu"))

    return grid.num_tokens > MOST_ASKED or bool(Remembered(find)(layer))


def _form_of(layer: nn.Module, name: str) -> Form:
    found = projection_of(layer.get_submodule(name))
    assert found is not None
    return found.form


class ProvenPlaceAttention(OfMaps):
    """Queries and keys (b, n, r) are filled up with zeros, which no score sees."""

    def __init__(self, original: nn.Module, *args: Any, **kwargs: Any) -> None:
        reading, grid = place_reading_of(original), kwargs["grid"].without_prefix
        if reading is None or not _holds_on(reading, original, grid):
            refuse_number(original, int(grid.num_tokens))
        self.weight, self.adds = reading.weight, reading.adds
        self.forms = [_form_of(original, name) for name in reading.names]
        self.read_as = Reading(reading.names, "", 1, reading.width, scale=reading.scale)
        super().__init__(original, *args, **kwargs)

    def kept(self, original: nn.Module) -> Iterable[tuple[str, nn.Module | nn.Parameter]]:
        yield from super().kept(original)
        if self.weight is not None:
            yield self.weight, getattr(original, self.weight)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x = self.map_of_call(args, kwargs)
        grid, tokens = self.map_under(x), MAP.tokens(x)
        named = zip(self.read_as.projections, self.forms, strict=True)
        projected = (form.tokens(self.through(name, form.of(tokens, grid))) for name, form in named)
        q, k, v = (F.pad(one, (0, self.width - one.shape[-1]))[:, None] for one in projected)
        y = grid.to_image(self.mix(q, k, v, tokens, grid=grid))
        if self.weight is not None:
            y = y * getattr(self, self.weight)
        return x + y if self.adds else y


def stands_for_places(layer: nn.Module) -> type[ConvertedAttention] | None:
    """The class that stands for a layer of attention of places, or None."""
    return None if place_reading_of(layer) is None else ProvenPlaceAttention
