"""transformers' Data2Vec of images, a BEiT whose layers make their biases themselves.

Baevski et al. 2022, arXiv 2202.03555. Mechanisms that form the pairs get the biases by longer queries and keys,
exactly; for others they are left out, and their tables with them.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn

from subquad.attention import traits_of
from subquad.conversion.families.pair_biases import with_bias
from subquad.conversion.families.transformers_attention import TransformersSelfAttention

_VISION = "transformers.models.data2vec.modeling_data2vec_vision.Data2VecVision"


class Data2VecAttention(TransformersSelfAttention):
    """Its output projection is a module behind it; a call says how large the image is."""

    replaces: ClassVar[tuple[str, ...]] = (f"{_VISION}SelfAttention", f"{_VISION}SdpaSelfAttention")

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        self.patch_size = original.config.patch_size

    def kept(self, original: nn.Module) -> Iterable[tuple[str, nn.Module | nn.Parameter]]:
        unused = "" if traits_of(self.inner).quadratic else "relative_position_bias"
        return ((name, part) for name, part in super().kept(original) if name != unused)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        output_attentions: bool = False,
        relative_position_bias: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        resolution: tuple[int, int] | None = None,
    ) -> tuple[Tensor, None]:
        x = hidden_states
        q, k, v = (self.split(self.through(name, x)) for name in ("query", "key", "value"))
        own = self._modules.get("relative_position_bias")
        if traits_of(self.inner).quadratic:
            shared = [] if relative_position_bias is None else [relative_position_bias]
            if own is not None and resolution is not None:
                places = tuple(side // self.patch_size for side in resolution)
                shared.append(own(places, interpolate_pos_encoding, dim_size=x.shape[1]))
            if shared:
                q, k, v = with_bias(q, k, v, sum(shared[1:], shared[0]))
        y = self.mix(q, k, v, x)
        return y.unflatten(-1, (self.num_heads, -1))[..., : self.width].flatten(2), None
