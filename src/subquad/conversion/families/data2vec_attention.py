"""transformers' Data2Vec of images, a BEiT whose layers make their biases themselves.

Baevski et al. 2022, arXiv 2202.03555. As of timm's BEiT, mechanisms that form the pairs get the biases, and for others
they are left out, and their tables with them.
"""

from typing import Any, ClassVar

from torch import Tensor

from subquad.conversion.families.timm_biased_attention import WithPairBiases
from subquad.conversion.families.transformers_attention import TransformersSelfAttention
from subquad.errors import SubquadError

_VISION = "transformers.models.data2vec.modeling_data2vec_vision.Data2VecVision"


class Data2VecAttention(WithPairBiases, TransformersSelfAttention):
    """Its output projection is a module behind it; a call says how large the image is."""

    replaces: ClassVar[tuple[str, ...]] = (f"{_VISION}SelfAttention", f"{_VISION}SdpaSelfAttention")
    of_pairs: ClassVar[tuple[str, ...]] = ("relative_position_bias",)

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        self.patch_size = original.config.patch_size

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        output_attentions: bool = False,
        relative_position_bias: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        resolution: tuple[int, int] | None = None,
    ) -> tuple[Tensor, None]:
        biases = relative_position_bias
        if self.has("relative_position_bias"):
            own = self._own_biases(hidden_states, interpolate_pos_encoding, resolution)
            biases = own if biases is None else own + biases
        q, k, v = (self.split(self.through(name, hidden_states)) for name in ("query", "key", "value"))
        return self.mix_biased(q, k, v, hidden_states, biases), None

    def _own_biases(self, x: Tensor, resampled: bool, image: tuple[int, int] | None) -> Tensor:
        """(h, n, n) of the tokens x (b, n, c) of an image of this height and width."""
        if image is None:
            raise SubquadError("a layer of Data2Vec has biases for images of a size: call it with resolution")
        height, width = (side // self.patch_size for side in image)
        biases: Tensor = self.get_submodule("relative_position_bias")((height, width), resampled, dim_size=x.shape[1])
        return biases
