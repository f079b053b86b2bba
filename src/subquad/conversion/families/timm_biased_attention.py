"""timm's plain networks whose logits have a bias of each pair of tokens: BEiT, and ViTs with relative positions.

Bao et al. 2021, arXiv 2106.08254 (BEiT). Mechanisms that form the pairs get the biases by longer queries and keys,
exactly; for others they are left out, and their tables with them.

Letters: b batch, h heads, n tokens, d channels of a head.
"""

from collections.abc import Iterable
from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.attention import traits_of
from subquad.conversion.converted_attention import ConvertedAttention, channels_into
from subquad.conversion.families.pair_biases import with_bias
from subquad.conversion.families.timm_attention import TimmAttention
from subquad.grid import TokenGrid


class DroppedBiases:
    """Stands where a layer without pairs has no biases, and keeps the map that they would be for."""

    def __init__(self, window_size: tuple[int, int]) -> None:
        self.window_size = window_size

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """What timm's `set_input_size` calls."""
        self.window_size = window_size


class WithPairBiases(ConvertedAttention):
    """What layers share whose biases are those of a module of theirs, which timm makes for the maps of one size.

    Attributes:
        of_pairs: names of what goes where no pairs are formed.
    """

    of_pairs: ClassVar[tuple[str, ...]] = ("rel_pos",)

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        if not self.has("rel_pos"):
            # timm's `set_input_size` asks for it
            dropped = getattr(original, "rel_pos", None)
            self.rel_pos = None if dropped is None else DroppedBiases(dropped.window_size)

    @property
    def original(self) -> nn.Module:
        """The layer that this one stands for, its biases for the map that timm's `set_input_size` made these for."""
        held: Any = super().original
        here: Any = getattr(self, "rel_pos", None)
        if here is not None and tuple(here.window_size) != tuple(held.rel_pos.window_size):
            held.rel_pos.set_window_size(here.window_size)
        return held

    def kept(self, original: nn.Module) -> Iterable[tuple[str, nn.Module | nn.Parameter]]:
        unused = () if traits_of(self.inner).quadratic else self.of_pairs
        return ((name, part) for name, part in super().kept(original) if name not in unused)

    def own_bias(self) -> Tensor | None:
        """(1, h, n, n), None where the layer has none of its own."""
        # which adds them to what it is called with: who lends parameters, as accelerate does, hears of calls alone
        return self.through("rel_pos", torch.zeros(())) if self.has("rel_pos") else None

    def mix_biased(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, shared: Tensor | None, grid: TokenGrid | None = None
    ) -> Tensor:
        """As `mix`, with the layer's biases and those that all layers share, where pairs are formed."""
        biases = [one for one in (self.own_bias(), shared) if one is not None]
        if biases and traits_of(self.inner).quadratic:
            q, k, v = with_bias(q, k, v, sum(biases[1:], biases[0]))
        y = self.mix(q, k, v, x, grid=grid)
        return y.unflatten(-1, (self.num_heads, -1))[..., : self.width].flatten(2)


class TimmRelPosAttention(WithPairBiases, TimmAttention):
    """Biases of a module of the layer's, or of one that all layers share and a call hands over."""

    replaces: ClassVar[tuple[str, ...]] = ("timm.models.vision_transformer_relpos.RelPosAttention",)

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:  # type: ignore[override]
        q, k, v = (self.split(part) for part in self.projections(x))
        q, k = self.through("q_norm", q), self.through("k_norm", k)
        y = self.mix_biased(q, k, v, x, shared_rel_pos)
        return self.through("proj_drop", self.through("proj", y))


class TimmBeitAttention(TimmRelPosAttention):
    """Biases of a table, by the distance of two tokens in rows and columns; those of the class token are its own."""

    replaces: ClassVar[tuple[str, ...]] = ("timm.models.beit.Attention",)
    of_pairs: ClassVar[tuple[str, ...]] = ("relative_position_bias_table",)
    relative_position_bias_table: nn.Parameter
    relative_position_index: Tensor | None

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        table = self._parameters.get("relative_position_bias_table")
        index = None if table is None else original.relative_position_index.clone()
        self.register_buffer("relative_position_index", index, persistent=False)
        self.window_size = original.window_size

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_heads, channels_into(original.proj) // original.num_heads

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x, shared_rel_pos_bias)

    def own_bias(self) -> Tensor | None:
        table, index = self.own_weight("relative_position_bias_table"), self.relative_position_index
        return None if table is None else table[index].permute(2, 0, 1)[None]

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Where timm's `set_input_size` makes the network for another map: tables move, the old layer's too."""
        if self._parameters.get("relative_position_bias_table") is not None:
            # by the rule of the timm that is installed
            twin: Any = deepcopy(self.original)
            twin.relative_position_bias_table = self.relative_position_bias_table
            twin.relative_position_index, twin.window_size = self.relative_position_index, self.window_size
            twin.set_window_size(window_size)
            self.relative_position_bias_table = twin.relative_position_bias_table
            self.relative_position_index = twin.relative_position_index
        original: Any = self.original
        original.set_window_size(window_size)
        self.window_size = original.window_size
