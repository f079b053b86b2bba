"""Linear attention and PolaFormer's on CUDA devices: see `linear_kernels`."""

import torch
from torch import Tensor

from subquad.kernels.declaring import empty_tokens
from subquad.kernels.triton.launch import MIDDLE, split_of, tile_of, total
from subquad.kernels.triton.linear_kernels import (
    spread_gradient_kernel,
    spread_kernel,
    state_gradient_kernel,
    state_kernel,
)
from subquad.kernels.triton.tiles import tokens_of


def linear_attention(q: Tensor, k: Tensor, v: Tensor, feature_map: str, eps: float) -> Tensor:
    """See subquad.ops.linear_attention."""
    return linear_attention_keeping(q, k, v, feature_map, eps)[0]


def linear_attention_keeping(q: Tensor, k: Tensor, v: Tensor, feature_map: str, eps: float) -> tuple[Tensor, Tensor]:
    """The same, and the state of all keys (b·h, 1, d + 1, d), in fp32."""
    return _forward(q, k, v, eps, KIND=feature_map)


def linear_attention_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, feature_map: str, eps: float
) -> tuple[Tensor, ...]:
    """To q, k and v."""
    state = _state(k, v, None, None, None, feature_map)
    return linear_attention_keeping_gradient(grad, q, k, v, feature_map, eps, state)


def linear_attention_keeping_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, feature_map: str, eps: float, state: Tensor
) -> tuple[Tensor, ...]:
    """The same, from the state that was kept: keys and values are read once."""
    return _backward(grad, q, k, v, eps, state, KIND=feature_map)[:3]


def pola_attention(
    q: Tensor, k: Tensor, v: Tensor, power: Tensor, temperature: Tensor | None, positions: Tensor | None, eps: float
) -> Tensor:
    """See subquad.ops.pola_attention."""
    return pola_attention_keeping(q, k, v, power, temperature, positions, eps)[0]


def pola_attention_keeping(
    q: Tensor, k: Tensor, v: Tensor, power: Tensor, temperature: Tensor | None, positions: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The same, and the state of all keys (b·h, 2, d + 1, d), in fp32."""
    parameters = _in_fp32(power), _sharpness(power, temperature)
    return _forward(q, k, v, eps, *parameters, positions, KIND="pola")


def pola_attention_gradient(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: Tensor,
    temperature: Tensor | None,
    positions: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...]:
    """To q, k, v, power and temperature."""
    state = _state(k, v, _in_fp32(power), _sharpness(power, temperature), positions, "pola")
    return pola_attention_keeping_gradient(grad, q, k, v, power, temperature, positions, eps, state)


def pola_attention_keeping_gradient(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: Tensor,
    temperature: Tensor | None,
    positions: Tensor | None,
    eps: float,
    state: Tensor,
) -> tuple[Tensor, ...]:
    """The same, from the state that was kept: keys and values are read once."""
    sharpness = _sharpness(power, temperature)
    *grads, dpower, dsharpness = _backward(
        grad, q, k, v, eps, state, _in_fp32(power), sharpness, positions, KIND="pola"
    )
    # 1/t grows by −1/t² with t
    return *grads, dpower.reshape(power.shape).contiguous(), -dsharpness.reshape(power.shape) * sharpness


def _in_fp32(parameter: Tensor) -> Tensor:
    return parameter.float().contiguous()


def _sharpness(power: Tensor, temperature: Tensor | None) -> Tensor:
    """1 over the temperature, (h, 1, d)."""
    return torch.ones_like(_in_fp32(power)) if temperature is None else _in_fp32(temperature).reciprocal()


def _state(
    k: Tensor, v: Tensor, power: Tensor | None, sharpness: Tensor | None, positions: Tensor | None, kind: str
) -> Tensor:
    """(b·h, streams, d + 1, d) of all keys, in fp32."""
    b, h, n, d = k.shape
    streams = 2 if kind == "pola" else 1
    # tiles of fp16 take twice the room of bf16's in products
    tile = tile_of(f"{kind}.state", k, heavy=int(streams == 2 and k.dtype == torch.float16))
    split = split_of(k, tile["BLOCK"])
    state = k.new_empty(b * h, split.pieces, streams, d + 1, d, dtype=torch.float32)
    tokens = tokens_of(k), tokens_of(v), tokens_of(positions)
    state_kernel[b * h * split.pieces,](
        *tokens, power, sharpness, state, h, n, *split, KIND=kind, STREAMS=streams, **tile
    )
    return total(state)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eps: float,
    power: Tensor | None = None,
    sharpness: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    KIND: str,
) -> tuple[Tensor, Tensor]:
    """The outputs, and the state of all keys."""
    b, h, n, _ = q.shape
    state, out = _state(k, v, power, sharpness, positions, KIND), empty_tokens(q)
    tile = tile_of(f"{KIND}.spread", q, heavy=int(KIND == "pola" and q.shape[-1] > MIDDLE))
    split = split_of(q, tile["BLOCK"])
    settings = {"KIND": KIND, "STREAMS": state.shape[1], **tile}
    numbers = h, n, *split, 1 / k.shape[2], eps
    spread_kernel[b * h * split.pieces,](tokens_of(q), tokens_of(out), power, sharpness, state, *numbers, **settings)
    return out, state


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eps: float,
    state: Tensor,
    power: Tensor | None = None,
    sharpness: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    KIND: str,
) -> tuple[Tensor, ...]:
    """To q, k, v, and to power and sharpness (h, d)."""
    (b, h, n, d), scale, state = q.shape, 1 / k.shape[2], state.contiguous()
    dq, dk, dv = map(empty_tokens, (q, k, v))
    kind = {"KIND": KIND, "STREAMS": state.shape[1]}
    of_queries, of_keys = (tile_of(f"{KIND}.{name}", x, heavy=1) for name, x in (("dq", q), ("dk", k)))
    queries, keys = split_of(q, of_queries["BLOCK"]), split_of(k, of_keys["BLOCK"])
    dstate = state.new_empty(b * h, queries.pieces, *state.shape[1:])
    # of power and sharpness
    shares = [state.new_empty(b, h, split.pieces, 2, d) if KIND == "pola" else None for split in (queries, keys)]
    spread_gradient_kernel[b * h * queries.pieces,](
        *map(tokens_of, (grad, q, dq)),
        *(power, sharpness, state, dstate, shares[0]),
        *(h, n, *queries, scale, eps),
        **kind,
        **of_queries,
    )
    state_gradient_kernel[b * h * keys.pieces,](
        *map(tokens_of, (k, v, dk, dv, positions)),
        *(power, sharpness, total(dstate), shares[1]),
        *(h, k.shape[2], *keys, scale),
        **kind,
        **of_keys,
    )
    if KIND != "pola":
        return dq, dk, dv
    from_queries, from_keys = (share.sum(dim=(0, 2)) for share in shares if share is not None)
    return dq, dk, dv, *(from_queries + from_keys).unbind(1)
