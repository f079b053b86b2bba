"""PolaFormer++'s attention on CUDA devices: see `polapp_kernels`."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.declaring import empty_tokens
from subquad.kernels.triton.launch import split_of, tile_of, total
from subquad.kernels.triton.polapp_kernels import (
    polapp_answers_kernel,
    polapp_key_gradient_kernel,
    polapp_query_gradient_kernel,
    polapp_state_kernel,
)
from subquad.kernels.triton.state_calls import Tables, tables_of, turn_of
from subquad.kernels.triton.tiles import Tokens, tokens_of


def polapp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    same: Tensor,
    opposite: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    eps: float,
) -> Tensor:
    """`same` and `opposite` (h, 1, 2d); tables of a rotation are of d channels for both halves, or of 2d."""
    (b, h, n, _), out, tables = q.shape, empty_tokens(q), (cos, sin, interleaved)
    tile = _tile("spread", q, heavy=1)
    split = split_of(q, tile["BLOCK"])
    polapp_answers_kernel[b * h * split.pieces,](
        *map(tokens_of, (q, out)),
        *_of_both_halves(tables, q),
        *map(_flat, (same, opposite)),
        *(_state(k, v, tables), h, n, *split, 1 / k.shape[2], eps),
        TURN=turn_of(tables),
        **tile,
    )
    return out


def polapp_attention_gradient(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    same: Tensor,
    opposite: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    eps: float,
) -> tuple[Tensor, ...]:
    """Give the gradients of `polapp_attention` to q, k, v, same and opposite."""
    (b, h, n, d), tables = q.shape, (cos, sin, interleaved)
    state, turning, mean = _state(k, v, tables).contiguous(), _of_both_halves(tables, q), 1 / k.shape[2]
    # what one stream gives and the other adds to stands in fp32 between them
    dq, dk, dv = torch.empty_like(q, dtype=torch.float32), empty_tokens(k), empty_tokens(v)
    of_queries, of_keys = (_tile(name, x, heavy=2) for name, x in (("dq", q), ("dk", k)))
    queries, keys = split_of(q, of_queries["BLOCK"]), split_of(k, of_keys["BLOCK"])
    shares = state.new_zeros(2, b * h, queries.pieces, 2, d + 2, d)
    for stream, spikes in enumerate((same, opposite)):
        polapp_query_gradient_kernel[b * h * queries.pieces,](
            *map(tokens_of, (grad, q, dq)),
            *turning,
            *(_flat(spikes), state, shares[stream], h, n, *queries, mean, eps),
            STREAM=stream,
            TURN=turn_of(tables),
            **of_queries,
        )
    by_stream = shares.sum(dim=2)
    polapp_key_gradient_kernel[b * h * keys.pieces,](
        *map(tokens_of, (k, v, dk, dv)),
        *turning,
        *(state, by_stream.sum(dim=0), h, k.shape[2], *keys, mean),
        TURN=turn_of(tables),
        **of_keys,
    )
    # of each stream a sum of its own: (b·h, 2, d) over the images
    spikiness = (one[:, :, d + 1].unflatten(0, (b, h)).sum(dim=0).reshape(h, 1, 2 * d) for one in by_stream)
    return empty_tokens(q).copy_(dq), dk, dv, *spikiness


def _state(k: Tensor, v: Tensor, tables: Tables) -> Tensor:
    """(b·h, 2, d + 2, d) of all keys, in fp32; see `polapp_kernels`."""
    (b, h, n, d), tile = k.shape, _tile("state", k, heavy=1)
    split = split_of(k, tile["BLOCK"])
    state = k.new_zeros(b * h, split.pieces, 2, d + 2, d, dtype=torch.float32)
    polapp_state_kernel[b * h * split.pieces,](
        *map(tokens_of, (k, v)),
        *_of_both_halves(tables, k),
        *(state, h, n, *split),
        TURN=turn_of(tables),
        **tile,
    )
    if split.pieces == 1:
        return state[:, 0]
    most = state[..., d + 1, :]
    highest = most.amax(dim=1, keepdim=True)
    lower = torch.exp(most - highest)
    # rows of K̃ᵀ v are features, as channels of Σ K are
    products, sums = state[..., :d, :] * lower[..., None], state[..., d, :] * lower
    return torch.cat([total(products), total(sums)[..., None, :], highest[:, 0, :, None]], dim=2)


def _of_both_halves(tables: Tables, x: Tensor) -> tuple[Tokens | None, ...]:
    """(cos, sin) of positive halves and of negative ones, which are the same where both halves turn alike."""
    cos, sin, interleaved = tables
    d = x.shape[3]
    if cos is None or sin is None or cos.shape[-1] == d:
        return *tables_of(tables), *tables_of(tables)
    halves = [(cos[..., part], sin[..., part], interleaved) for part in (slice(d), slice(d, 2 * d))]
    return *tables_of(halves[0]), *tables_of(halves[1])


def _flat(spikes: Tensor) -> Tensor:
    return spikes.float().contiguous()


def _tile(kernel: str, x: Tensor, *, heavy: int) -> dict[str, Any]:
    return tile_of(f"polapp.{kernel}", x, heavy=heavy, ahead=1)
