"""Agent and softmax-free attention on CUDA devices: see `maps_kernels`."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.declaring import empty_tokens
from subquad.kernels.triton.launch import NARROW, few_of, groups_of, split_of, tile_of
from subquad.kernels.triton.maps_kernels import gather_kernel, gradient_kernel, spread_kernel
from subquad.kernels.triton.tiles import bias_of, tokens_of

NARROW_MAP = 32
"""Agents up to which gradients of bf16 heads wider than NARROW are of tf32 products, as landmarks' are.

On an H200 those of 12 agents and heads of 64 channels were wrong once, of bf16 products, and nobody knows why: what was
compiled for it has been read, and looks right. Landmarks' are the same products in tf32, and were right there.
"""


def agent_attention(q: Tensor, agents: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, query_bias: Tensor) -> Tensor:
    """See subquad.ops.agent_attention; a bias is (h, a, n)."""
    scale = q.shape[-1] ** -0.5
    return _spread(q, agents, _gather(agents, k, v, scale, key_bias, keep=False)[0], scale, query_bias)


def agent_attention_keeping(
    q: Tensor, agents: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, query_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, what agents collected (b, h, a, d), and the logarithms of their weights' sums (b, h, a), in fp32."""
    scale = q.shape[-1] ** -0.5
    values, normalizer = _gather(agents, k, v, scale, key_bias)
    assert normalizer is not None
    return _spread(q, agents, values, scale, query_bias), values.contiguous(), normalizer.contiguous()


def agent_attention_gradient(
    grad: Tensor, q: Tensor, agents: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, query_bias: Tensor
) -> tuple[Tensor, ...]:
    """To q, agents, k, v and the biases, which are (h, a, n), as (h, n, a)."""
    values, normalizer = _gather(agents, k, v, q.shape[-1] ** -0.5, key_bias)
    assert normalizer is not None
    return agent_attention_keeping_gradient(grad, q, agents, k, v, key_bias, query_bias, values, normalizer)


def agent_attention_keeping_gradient(
    grad: Tensor,
    q: Tensor,
    agents: Tensor,
    k: Tensor,
    v: Tensor,
    key_bias: Tensor,
    query_bias: Tensor,
    values: Tensor,
    normalizer: Tensor,
) -> tuple[Tensor, ...]:
    """The same, from what agents had collected: keys and values are read once."""
    scale = q.shape[-1] ** -0.5
    dq, _, dagents, dvalues, dquery_bias = _gradient(q, grad, agents, values, scale, query_bias)
    assert dvalues is not None
    losses = (dvalues * values).sum(dim=-1)
    sums = normalizer.contiguous(), losses
    dk, dv, dagents_too, _, dkey_bias = _gradient(k, v, agents, dvalues, scale, key_bias, sums)
    assert dv is not None and dkey_bias is not None and dquery_bias is not None
    dagents = (dagents + dagents_too).to(agents.dtype)
    of_biases = dkey_bias.to(key_bias.dtype), dquery_bias.to(query_bias.dtype)
    return dq, dagents, dk, dv, *(grad.contiguous() for grad in of_biases)


def soft_gather(x: Tensor, landmarks: Tensor, v: Tensor, scale: float) -> Tensor:
    """κ(scale·x, landmarks)ᵀ v: (b, h, m, d)."""
    return _gather(landmarks, x, v, scale)[0]


def soft_gather_gradient(grad: Tensor, x: Tensor, landmarks: Tensor, v: Tensor, scale: float) -> tuple[Tensor, ...]:
    """To x, landmarks and v."""
    dx, dv, dlandmarks, _, _ = _gradient(x, v, landmarks, grad, scale, gather=True)
    assert dv is not None
    return dx, dlandmarks.to(landmarks.dtype), dv


def soft_spread(x: Tensor, landmarks: Tensor, u: Tensor, scale: float) -> Tensor:
    """κ(scale·x, landmarks) u: (b, h, n, d)."""
    return _spread(x, landmarks, u, scale)


def soft_spread_gradient(grad: Tensor, x: Tensor, landmarks: Tensor, u: Tensor, scale: float) -> tuple[Tensor, ...]:
    """To x, landmarks and u."""
    dx, _, dlandmarks, du, _ = _gradient(x, grad, landmarks, u, scale)
    assert du is not None
    return dx, dlandmarks.to(landmarks.dtype), du.to(u.dtype)


def _tile(kernel: str, x: Tensor, few: Tensor, bias: Tensor | None, *, heavy: int = 0) -> dict[str, Any]:
    kernel = f"{'soft' if bias is None else 'agent'}.{kernel}"
    # four tiles of tokens are read ahead in heavy ones, and of fp16, as tf32, take twice the room that bf16 does
    ahead = 1 if heavy and x.dtype == torch.float16 else 2
    # a Gaussian sees small differences of large squares
    narrow = x.dtype == torch.bfloat16 and few.shape[2] <= NARROW_MAP and x.shape[-1] > NARROW
    exact = bias is None or (bool(heavy) and narrow)
    tile = tile_of(kernel, x, few=few.shape[2], heavy=heavy, exact=exact, ahead=ahead)
    return {"GAUSS": bias is None, "FEW": few_of(few.shape[2], tile), **tile}


def _gather(
    few: Tensor, x: Tensor, v: Tensor, scale: float, bias: Tensor | None = None, *, keep: bool = True
) -> tuple[Tensor, Tensor | None]:
    """(b, h, f, d) in fp32, and (b, h, f) the logarithms of a softmax's sums, where gradients are to `keep` them."""
    (b, h, n, d), f = x.shape, few.shape[2]
    tile = _tile("gather", x, few, bias)
    parts = -(-f // tile["FEW"])
    # the weights of splits are weighed once more where they are those of a softmax: half as many are faster
    split = split_of(x, tile["BLOCK"], times=parts if bias is None else 2 * parts)
    out = x.new_empty(b, h, split.pieces, f, d, dtype=torch.float32)
    normalizer = None if bias is None else out.new_empty(b, h, split.pieces, f)
    gather_kernel[b * h * split.pieces, parts](
        *map(tokens_of, (few, x, v)), bias_of(bias), out, normalizer, h, f, n, *split, scale, **tile
    )
    if normalizer is None:
        return out.sum(dim=2) if split.pieces > 1 else out[:, :, 0], None
    if split.pieces == 1:
        return out[:, :, 0], normalizer[:, :, 0]
    # PyTorch computes it in several short kernels
    total = normalizer.logsumexp(dim=2) if keep else None
    return (normalizer.softmax(dim=2)[..., None] * out).sum(dim=2), total


def _spread(x: Tensor, few: Tensor, u: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    (b, h, n, _), out = x.shape, empty_tokens(x)
    tile = _tile("spread", x, few, bias)
    blocks = -(-n // tile["BLOCK"])
    spread_kernel[b * h * blocks,](
        *map(tokens_of, (x, few, u)), bias_of(bias), tokens_of(out), h, few.shape[2], n, blocks, scale, **tile
    )
    return out


def _gradient(
    x: Tensor,
    values: Tensor,
    few: Tensor,
    few_values: Tensor,
    scale: float,
    bias: Tensor | None = None,
    sums: tuple[Tensor | None, Tensor] | None = None,
    *,
    gather: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """To x, values (where they were gathered), the few, their values (where they were spread) and the bias (h, n, f).

    `sums` are those of a softmax over tokens: the logarithms of its sums, and Σ w dw.
    """
    (b, h, n, d), f = x.shape, few.shape[2]
    gather = gather or sums is not None
    tile = _tile("gather_gradient" if gather else "spread_gradient", x, few, bias, heavy=1)
    parts = -(-f // tile["FEW"])
    if bias is None:
        groups, split = b, split_of(x, tile["BLOCK"], times=parts)
    else:
        groups, split = groups_of(x, tile["BLOCK"], times=parts)
    dx = _shares(x, parts)
    dvalues = _shares(values, parts) if gather else None
    dfew = x.new_empty(b, h, split.pieces, f, d, dtype=torch.float32)
    dfew_values = None if gather else torch.empty_like(dfew)
    dbias = None if bias is None else dfew.new_empty(groups, h, n, f)
    normalizer, losses = sums or (None, None)
    gradient_kernel[groups * h * split.pieces, parts](
        *map(tokens_of, (x, values, few, few_values)),
        *(bias_of(bias), normalizer, losses),
        *map(tokens_of, (dx, dvalues)),
        *(dfew, dfew_values, dbias, h, f, n, *split, b, -(-b // groups), scale),
        GATHER=gather,
        ALL=parts == 1,
        **tile,
    )
    return (
        _summed(dx, x, parts),
        None if dvalues is None else _summed(dvalues, values, parts),
        dfew.sum(dim=2),
        None if dfew_values is None else dfew_values.sum(dim=2),
        None if dbias is None else dbias.sum(dim=0),
    )


def _shares(x: Tensor, parts: int) -> Tensor:
    """Room for a gradient of tokens from each block of the few, one after the other as images are."""
    if parts == 1:
        return empty_tokens(x)
    b, h, n, d = x.shape
    return x.new_empty(parts * b, n, h, d, dtype=torch.float32).transpose(1, 2)


def _summed(shares: Tensor, like: Tensor, parts: int) -> Tensor:
    return shares if parts == 1 else shares.unflatten(0, (parts, -1)).sum(dim=0).to(like.dtype)
