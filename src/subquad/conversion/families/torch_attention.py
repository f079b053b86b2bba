"""PyTorch's own layer, nn.MultiheadAttention, as self-attention: torchvision's ViT, nn.TransformerEncoderLayer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.conversion.converted_attention import ConvertedAttention
from subquad.errors import SubquadError
from subquad.tracing import insist


def hidden_by(mask: Tensor | None) -> Tensor | None:
    """PyTorch's mask, True or minus infinity for what must not be seen, as True for it; its own layers make numbers.

    Raises:
        SubquadError: it is a bias, of numbers other than 0 and minus infinity.
    """
    if mask is None or mask.dtype == torch.bool:
        return mask
    hidden = mask == float("-inf")
    insist(
        (hidden | (mask == 0)).all(),
        "a converted layer takes masks of True and False, or of 0 and minus infinity, and no biases of pairs",
    )
    return hidden


class TorchAttention(ConvertedAttention):
    """Answers with a pair, as the original: tokens, and weights that are not formed."""

    replaces = ("torch.nn.modules.activation.MultiheadAttention",)
    is_anybodys = True

    # nn.TransformerEncoderLayer asks for these, and then takes no short cut past this layer
    _qkv_same_embed_dim = False
    in_proj_weight: Tensor

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        self.batch_first = bool(original.batch_first)

    def check(self, original: Any) -> None:
        if not original._qkv_same_embed_dim or original.bias_k is not None or original.add_zero_attn:
            raise SubquadError(
                "an nn.MultiheadAttention with other widths of keys, with bias_k or add_zero_attn can't be converted"
            )

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_heads, original.head_dim

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        if query is not key or key is not value:
            raise SubquadError("a converted layer has self-attention: query, key and value are one tensor")
        if is_causal:
            raise SubquadError("a converted layer has no causal attention")
        padding, mask = hidden_by(key_padding_mask), hidden_by(attn_mask)
        if mask is not None and mask.dim() == 3:
            # of each head, one image after the other
            mask = mask.unflatten(0, (-1, self.num_heads))
        x = query if self.batch_first else query.transpose(0, 1)
        weight, bias = self.in_proj_weight, self.own_weight("in_proj_bias")
        q, k, v = (self.split(part) for part in F.linear(x, weight, bias).chunk(3, dim=-1))
        y = self.through("out_proj", self.mix(q, k, v, x, padding=padding, mask=mask))
        return y if self.batch_first else y.transpose(0, 1), None
