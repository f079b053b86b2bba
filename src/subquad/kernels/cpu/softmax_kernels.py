"""Softmax attention on CPUs. Letters: b batch, h heads, n queries, m keys, d channels of a head."""

import torch
from torch import Tensor

from subquad.kernels import softmax_operators as operators
from subquad.kernels.cpu.calls import as_given, mixed
from subquad.kernels.cpu.library import kernel
from subquad.kernels.cpu.passing import numbers_of, of_one_dtype, pairs_of, shape_of, tokens_of
from subquad.kernels.declaring import empty_tokens, implements

Pairs = Tensor | None


@implements(operators.softmax_attention, "native")
def softmax_attention(q: Tensor, k: Tensor, v: Tensor, bias: Pairs, forbidden: Pairs) -> Tensor:
    """`bias` and `forbidden` are broadcast to (b, h, n, m)."""
    shape = *q.shape[:3], k.shape[2]
    bias = None if bias is None else bias.float()
    return mixed("softmax_attention", (q, k, v), pairs_of(bias, shape), pairs_of(forbidden, shape))


def _learns_of_each_image(q: Tensor, k: Tensor, v: Tensor, bias: Pairs, forbidden: Pairs) -> str | None:
    if bias is None or not bias.requires_grad or operators.is_shared(bias, q, k):
        return None
    return "a bias that learns has to be of all images and all pairs"


@implements(operators.softmax_attention_gradient, "native", cannot=_learns_of_each_image)
def softmax_attention_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Pairs, forbidden: Pairs
) -> tuple[Tensor, ...]:
    """To q, k, v and the bias; of no numbers where there is no bias that images share."""
    given, (grad, q, k, v) = (q, k, v), of_one_dtype(grad, q, k, v)
    grads = tuple(map(empty_tokens, (q, k, v)))
    shape = *q.shape[:3], k.shape[2]
    shared = bias is not None and operators.is_shared(bias, q, k)
    dbias = q.new_empty(shape[1:] if shared else 0, dtype=torch.float32)
    kernel("softmax_attention_gradient", q.dtype)(
        shape_of(q, k),
        *map(tokens_of, (q, k, v)),
        pairs_of(None if bias is None else bias.float(), shape),
        pairs_of(forbidden, shape),
        *map(tokens_of, (grad, *grads)),
        numbers_of(dbias if shared else None),
    )
    like = given[0] if bias is None else bias
    return *as_given(grads, given), (dbias[None] if shared else dbias).to(like.dtype)
