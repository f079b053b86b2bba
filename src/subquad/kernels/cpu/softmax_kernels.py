"""Softmax attention on CPUs. Letters: b batch, h heads, n queries, m keys, d channels of a head."""

from torch import Tensor

from subquad.kernels import softmax_operators as operators
from subquad.kernels.cpu.calls import mixed
from subquad.kernels.cpu.passing import pairs_of
from subquad.kernels.declaring import implements


@implements(operators.softmax_attention, "native")
def softmax_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, forbidden: Tensor | None) -> Tensor:
    """`bias` and `forbidden` are broadcast to (b, h, n, m)."""
    shape = *q.shape[:3], k.shape[2]
    bias = None if bias is None else bias.float()
    return mixed("softmax_attention", (q, k, v), pairs_of(bias, shape), pairs_of(forbidden, shape))
