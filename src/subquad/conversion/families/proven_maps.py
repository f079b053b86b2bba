"""Attention layers of anybody's classes that are handed maps, of which numbers prove what they compute.

U-Nets that draw images have them (the diffusion models of Ho et al. 2020, arXiv 2006.11239, and Dhariwal and Nichol
2021, arXiv 2105.05233), autoencoders of latents (Esser et al. 2021, arXiv 2012.09841), and decoders: `map_readings.py`.

Letters: b batch, h heads, n tokens, c channels, y x rows and columns.
"""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.conversion.converted_attention import ConvertedAttention, Mechanism
from subquad.conversion.families.map_attention import MapRecorder
from subquad.conversion.families.map_readings import MAP, holds_on, map_reading_of, projection_of
from subquad.conversion.families.proven_attention import ProvenLayer, refuse_number
from subquad.conversion.grid_recorder import GridRecorder
from subquad.errors import SubquadError
from subquad.grid import TokenGrid


class OfMaps(ProvenLayer):
    """A map (b, c, y, x) to another one; no masks, no positions."""

    listener: ClassVar[type[GridRecorder]] = MapRecorder
    is_handed_maps: ClassVar[bool] = True
    stands_anywhere: ClassVar[bool] = True

    @classmethod
    def map_under(cls, x: Tensor) -> TokenGrid:
        return TokenGrid(*x.shape[2:])

    def map_of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The map that a call is about; raises a SubquadError where it is about more, or no map."""
        x = self.tokens_of_call(args, kwargs)
        if x.dim() != 4:
            raise SubquadError(
                f"a converted {type(self.original).__name__} takes maps (b, c, height, width), got {tuple(x.shape)}"
            )
        return x


class ProvenMapAttention(OfMaps):
    """Projected, mixed, projected back, and added to what was handed, as it was read."""

    def __init__(self, original: nn.Module, *args: Any, **kwargs: Any) -> None:
        grid = kwargs["grid"].without_prefix
        reading = map_reading_of(original)
        if reading is None or not holds_on(original, grid):
            refuse_number(original, int(grid.num_tokens))
        self.forms, self.times, self.adds = reading.forms, reading.times, reading.kept
        self.read_as, self.memory = reading.reading, reading.memory
        super().__init__(original, *args, **kwargs)

    def tokens_width(self, original: nn.Module) -> int:
        first = projection_of(original.get_submodule(self.read_as.projections[0]))
        assert first is not None
        return first.in_features

    def kept(self, original: nn.Module) -> Iterable[tuple[str, nn.Module | nn.Parameter]]:
        yield from super().kept(original)
        if self.memory is not None:
            yield self.memory, getattr(original, self.memory)

    def make_inner(self, original: Any, mechanism: Mechanism, grid: TokenGrid) -> Any:
        in_front = 0 if self.memory is None else getattr(original, self.memory).shape[2]
        return super().make_inner(original, mechanism, TokenGrid(*grid.shape, in_front))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x, reading = self.map_of_call(args, kwargs), self.read_as
        grid, tokens = self.map_under(x), MAP.tokens(x)
        normed = tokens if reading.norm is None else self.called(reading.norm, tokens, grid)
        projected = [self.called(name, normed, grid) for name in reading.projections]
        y = self.mixed(reading.heads_of(projected, self), normed, grid)
        y = y if reading.norm_behind is None else self.called(reading.norm_behind, y, grid)
        y = grid.to_image(self.called(reading.proj, y, grid))
        if self.times != 1:
            y = y * self.times
        return y if not self.adds else y + (x if self.adds == 1 else self.adds * x)

    def mixed(self, heads: Sequence[Tensor], tokens: Tensor, grid: TokenGrid) -> Tensor:
        """What the mechanism makes of queries, keys and values (b, h, n, d) of tokens (b, n, c) on a grid."""
        q, k, v = heads
        if self.memory is None:
            return self.mix(q, k, v, tokens, grid=grid)
        # keys that all see are those of tokens in front of the map, whose own answers nobody reads
        keys, values = (one.expand(len(q), *one.shape) for one in getattr(self, self.memory))
        q, k, v = (torch.cat(both, dim=2) for both in ((keys, q), (keys, k), (values, v)))
        count = keys.shape[2]
        tokens = torch.cat([tokens.new_zeros(len(tokens), count, tokens.shape[2]), tokens], dim=1)
        return self.mix(q, k, v, tokens, grid=TokenGrid(*grid.shape, count))[:, count:]

    def called(self, name: str, tokens: Tensor, grid: TokenGrid) -> Tensor:
        """Tokens (b, n, c) of a map behind the module of this name, which is called in its own form."""
        form = self.forms[name]
        return form.tokens(self.through(name, form.of(tokens, grid)))


def stands_for_maps(layer: nn.Module) -> type[ConvertedAttention] | None:
    """The class that stands for a layer that computes softmax attention of the map that it is handed, or None."""
    return None if map_reading_of(layer) is None else ProvenMapAttention
