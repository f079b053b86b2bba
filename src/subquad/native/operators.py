"""The kernels as PyTorch operators `subquad::…`: shapes without running them, operations counted, no graph breaks.

Letters: b batch, h heads, n tokens, d channels of a head, a agents, m landmarks. Results are tokens (b, h, n, d) that
lie in memory as (b, n, h, d), as the next projection wants them.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from subquad.native.library import library

NAMESPACE = torch.library.Library("subquad", "FRAGMENT")
FEATURES = {"relu": 0, "elu": 1}


class _Tokens(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("token", ctypes.c_int64),
    ]


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "heads", "queries", "keys", "width")]
    _fields_ += [("threads", ctypes.c_int32)]


class _Map(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("height", "width", "prefix")]


def like_tokens(first: Tensor, *rest: Any) -> Tensor:
    """The shape of most results: tokens like the first argument's."""
    return empty_tokens(first)


def operator(
    schema: str,
    flops: Callable[..., int] = lambda *shapes: 0,
    shape: Callable[..., Any] | None = like_tokens,
    result: str = "Tensor",
) -> Callable[[Callable[..., Any]], Any]:
    """Make `subquad::name` of a function: what it counts as from its arguments' shapes, and empty results."""
    name = schema.partition("(")[0]

    def register(function: Callable[..., Any]) -> Any:
        NAMESPACE.define(f"{schema} -> {result}")
        NAMESPACE.impl(name, function, "CPU")
        torch.library.register_fake(f"subquad::{name}", shape or (lambda *given: None), lib=NAMESPACE)
        packet = getattr(torch.ops.subquad, name)
        register_flop_formula(packet)(lambda *shapes, out_shape=None, **settings: flops(*shapes))
        return packet

    return register


def empty_tokens(like: Tensor) -> Tensor:
    """Room for tokens (b, h, n, d), each token's heads side by side."""
    b, h, n, d = like.shape
    return like.new_empty(b, n, h, d).transpose(1, 2)


def _tokens(x: Tensor | None) -> _Tokens:
    if x is None:
        return _Tokens()
    batch, head, token, _ = x.stride()
    return _Tokens(x.data_ptr(), batch, head, token)


def _shape(q: Tensor, k: Tensor) -> _Shape:
    b, h, n, d = q.shape
    return _Shape(b, h, n, k.shape[2], d, torch.get_num_threads())


class _Bias(ctypes.Structure):
    _fields_ = [("written", ctypes.c_void_p)] + [(name, ctypes.c_int64) for name in ("head", "token", "agent")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("block", "rows", "columns", "prefix")]
    _fields_ += [("side", ctypes.c_int64), ("map", _Map)]


def _pointer(x: Tensor | None) -> ctypes.c_void_p:
    """To the numbers of a contiguous tensor, which lives as long as the pointer."""
    assert x is None or x.is_contiguous()
    pointer = ctypes.c_void_p(None if x is None else x.data_ptr())
    pointer.owner = x  # type: ignore[attr-defined]
    return pointer


def _bias(tensors: list[Tensor]) -> _Bias:
    """Of (h, a, n) written out, or of a block, rows, columns and perhaps a prefix."""
    if len(tensors) == 1:
        head, agent, token = tensors[0].stride()
        return _Bias(tensors[0].data_ptr(), head, token, agent)
    tables = [table.contiguous() for table in tensors]
    prefix = tables[3].shape[2] if len(tables) == 4 else 0
    bias = _Bias(None, 0, 0, 0, *(table.data_ptr() for table in tables))
    bias.side, bias.map = tables[0].shape[2], _Map(tables[1].shape[2], tables[2].shape[2], prefix)
    bias.owner = tables
    return bias


def _long(*numbers: int) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(number) for number in numbers]


def _product(q: Any, k: Any, *rest: Any) -> int:
    """Two products of every token with a (d, d) state."""
    b, h, n, d = q
    return 2 * b * h * (n + k[2]) * d * d


@operator("linear_attention(Tensor q, Tensor k, Tensor v, str feature_map, float eps)", _product)
def linear_attention(q: Tensor, k: Tensor, v: Tensor, feature_map: str, eps: float) -> Tensor:
    """See subquad.ops.linear_attention."""
    out = empty_tokens(q)
    tokens = map(_tokens, (q, k, v, out))
    library().linear_attention(_shape(q, k), *tokens, ctypes.c_int32(FEATURES[feature_map]), ctypes.c_float(eps))
    return out


@operator("inline_attention(Tensor q, Tensor k, Tensor v)", _product)
def inline_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See subquad.ops.inline_attention."""
    out = empty_tokens(q)
    library().inline_attention(_shape(q, k), *map(_tokens, (q, k, v, out)))
    return out


@operator(
    "linear_attention_gradient(Tensor grad, Tensor q, Tensor k, Tensor v, str feature_map, float eps)",
    lambda grad, q, k, *rest: 3 * _product(q, k),
    shape=lambda grad, q, k, v, *rest: tuple(map(empty_tokens, (q, k, v))),
    result="(Tensor, Tensor, Tensor)",
)
def linear_attention_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, feature_map: str, eps: float
) -> tuple[Tensor, ...]:
    """Of `linear_attention`, to q, k and v."""
    grads = tuple(map(empty_tokens, (q, k, v)))
    tokens = map(_tokens, (q, k, v, grad, *grads))
    library().linear_attention_gradient(
        _shape(q, k), *tokens, ctypes.c_int32(FEATURES[feature_map]), ctypes.c_float(eps)
    )
    return grads


@operator(
    "inline_attention_gradient(Tensor grad, Tensor q, Tensor k, Tensor v)",
    lambda grad, q, k, *rest: 3 * _product(q, k),
    shape=lambda grad, q, k, v: tuple(map(empty_tokens, (q, k, v))),
    result="(Tensor, Tensor, Tensor)",
)
def inline_attention_gradient(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Of `inline_attention`, to q, k and v."""
    grads = tuple(map(empty_tokens, (q, k, v)))
    library().inline_attention_gradient(_shape(q, k), *map(_tokens, (q, k, v, grad, *grads)))
    return grads


def _filter(v: Any, weight: Any, height: int, width: int) -> int:
    """A depthwise convolution of the map."""
    return 2 * v[0] * v[1] * v[3] * height * width * weight[-1] * weight[-2]


def _run_branch(
    out: Tensor, y: Tensor | None, v: Tensor, g: Tensor | None, weight: Tensor, bias: Tensor | None, shape: list[int]
) -> None:
    taps = weight.flatten(-2).mT.contiguous()
    height, width = shape
    library().local_branch(
        _shape(out, v),
        *map(_tokens, (v, y, g, out)),
        _Map(height, width, out.shape[2] - height * width),
        _pointer(taps),
        *_long(taps.stride(0) if taps.dim() == 3 else 0),
        _pointer(None if bias is None else bias.contiguous()),
        ctypes.c_int32(weight.shape[-1]),
    )


@operator(
    "local_branch(Tensor(a!) y, Tensor v, Tensor? g, Tensor weight, Tensor? bias, int[] shape)",
    lambda y, v, g, weight, bias, shape: _filter(v, weight, *shape),
    shape=None,
    result="()",
)
def local_branch(y: Tensor, v: Tensor, g: Tensor | None, weight: Tensor, bias: Tensor | None, shape: list[int]) -> None:
    """Y ← (y + depthwise of v on its map) · g, from weight (h·d, k, k), or (b, h·d, k, k) of each image's own."""
    _run_branch(y, y, v, g, weight, bias, shape)


@operator(
    "depthwise(Tensor v, Tensor weight, Tensor? bias, int[] shape)",
    lambda v, weight, bias, shape: _filter(v, weight, *shape),
)
def depthwise(v: Tensor, weight: Tensor, bias: Tensor | None, shape: list[int]) -> Tensor:
    """Depthwise convolution of the values on their map; 0 for tokens of the prefix."""
    out = empty_tokens(v)
    _run_branch(out, None, v, None, weight, bias, shape)
    return out


def _like_filter(weight: Tensor) -> tuple[Tensor, Tensor]:
    return weight.new_empty(weight.shape), weight.new_empty(weight.shape[-3])


@operator(
    "depthwise_gradient(Tensor grad, Tensor v, Tensor weight, int[] shape)",
    lambda grad, v, weight, shape: 2 * _filter(v, weight, *shape),
    shape=lambda grad, v, weight, shape: (
        empty_tokens(v),
        torch.empty_like(weight),
        weight.new_empty(weight.shape[-3]),
    ),
    result="(Tensor, Tensor, Tensor)",
)
def depthwise_gradient(grad: Tensor, v: Tensor, weight: Tensor, shape: list[int]) -> tuple[Tensor, ...]:
    """Of `depthwise`, to v, the weight and a bias."""
    dv, bias = depthwise(grad, weight.flip(-1, -2), None, shape), weight.new_zeros(weight.shape[-3])
    taps = weight.new_zeros(*weight.shape[:-3], weight.shape[-1] ** 2, weight.shape[-3])
    height, width = shape
    library().local_branch_gradient(
        _shape(v, v),
        *map(_tokens, (v, grad)),
        _Map(height, width, v.shape[2] - height * width),
        _pointer(taps),
        *_long(taps.stride(0) if taps.dim() == 3 else 0),
        _pointer(bias),
        ctypes.c_int32(weight.shape[-1]),
    )
    return dv, taps.mT.unflatten(-1, weight.shape[-2:]).contiguous(), bias


@operator(
    "polar_attention(Tensor q, Tensor k, Tensor v, Tensor power, Tensor? temperature, Tensor? positions, float eps)",
    lambda *shapes: 2 * _product(*shapes),
)
def polar_attention(
    q: Tensor, k: Tensor, v: Tensor, power: Tensor, temperature: Tensor | None, positions: Tensor | None, eps: float
) -> Tensor:
    """`power` and `temperature` (h, 1, d), `positions` (h, n_k, d)."""
    out = empty_tokens(q)
    sharpness = torch.ones_like(power) if temperature is None else temperature.reciprocal()
    places = None if positions is None else positions.expand(len(q), -1, -1, -1)
    library().polar_attention(
        _shape(q, k),
        *map(_tokens, (q, k, v, places, out)),
        _pointer(sharpness.contiguous()),
        _pointer(power.contiguous()),
        ctypes.c_float(eps),
    )
    return out


def _two_maps(q: Any, few: Any, k: Any, *rest: Any) -> int:
    """Two maps between tokens and a few others, each with two products."""
    b, h, n, d = q
    return 4 * b * h * (n + k[2]) * few[2] * d


@operator(
    "agent_attention(Tensor q, Tensor agents, Tensor k, Tensor v, Tensor[] key_bias, Tensor[] query_bias)", _two_maps
)
def agent_attention(
    q: Tensor, agents: Tensor, k: Tensor, v: Tensor, key_bias: list[Tensor], query_bias: list[Tensor]
) -> Tensor:
    """`agents` (b, h, a, d); a bias is (h, a, n), or block (h, a, s, s), rows (h, a, y), columns (h, a, x), prefix."""
    out = empty_tokens(q)
    library().agent_attention(
        _shape(q, k),
        _tokens(q),
        _pointer(agents.contiguous()),
        *_long(agents.shape[2]),
        *map(_tokens, (k, v)),
        *map(_bias, (key_bias, query_bias)),
        _tokens(out),
    )
    return out


def _agent_gradients(
    grad: Tensor, q: Tensor, agents: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, query_bias: Tensor
) -> tuple[Tensor, ...]:
    dq, dk, dv = map(empty_tokens, (q, k, v))
    dkey_bias, dquery_bias = (x.new_empty(*x.shape[:3], agents.shape[2]) for x in (k, q))
    return dq, agents.new_empty(agents.shape), dk, dv, dkey_bias, dquery_bias


@operator(
    "agent_attention_gradient(Tensor grad, Tensor q, Tensor agents, Tensor k, Tensor v, Tensor key_bias, "
    "Tensor query_bias)",
    lambda grad, q, agents, k, *rest: 4 * q[0] * q[1] * q[3] * agents[2] * (2 * q[2] + 2 * k[2]),
    shape=_agent_gradients,
    result="(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def agent_attention_gradient(
    grad: Tensor, q: Tensor, agents: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, query_bias: Tensor
) -> tuple[Tensor, ...]:
    """Of `agent_attention` to all but the biases (h, a, n), and to these as (b, h, n, a)."""
    grads = _agent_gradients(grad, q, agents, k, v, key_bias, query_bias)
    dq, dagents, dk, dv, dkey_bias, dquery_bias = grads
    library().agent_attention_gradient(
        _shape(q, k),
        _tokens(q),
        _pointer(agents.contiguous()),
        *_long(agents.shape[2]),
        *map(_tokens, (k, v)),
        *(_bias([bias]) for bias in (key_bias, query_bias)),
        *map(_tokens, (grad, dq)),
        _pointer(dagents),
        *map(_tokens, (dk, dv)),
        *map(_pointer, (dkey_bias, dquery_bias)),
    )
    return grads


@operator(
    "pool(Tensor x, int[] shape, int[] bins)",
    shape=lambda x, shape, bins: x.new_empty(*x.shape[:2], bins[0] * bins[1], x.shape[3]),
)
def pool(x: Tensor, shape: list[int], bins: list[int]) -> Tensor:
    """Means (b, h, a, d) of the tokens on a map over its adaptive bins."""
    height, width = shape
    out = x.new_empty(*x.shape[:2], bins[0] * bins[1], x.shape[3])
    grid = _Map(height, width, x.shape[2] - height * width)
    library().pool(_shape(x, x), _tokens(x), grid, *_long(*bins), _pointer(out))
    return out


@operator("pool_gradient(Tensor grad, Tensor x, int[] shape, int[] bins)", shape=lambda grad, x, *rest: empty_tokens(x))
def pool_gradient(grad: Tensor, x: Tensor, shape: list[int], bins: list[int]) -> Tensor:
    """Of `pool`, to x."""
    height, width = shape
    dx = empty_tokens(x).zero_()
    grid = _Map(height, width, x.shape[2] - height * width)
    library().pool_gradient(_shape(x, x), _pointer(grad.contiguous()), grid, *_long(*bins), _tokens(dx))
    return dx


def _empty_windows(x: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    count = height // weight.shape[2] * (width // weight.shape[3])
    return x.new_empty(*x.shape[:2], count, weight.shape[0])


@operator(
    "convolve_windows(Tensor x, Tensor weight, int height, int width)",
    lambda x, weight, height, width: 2 * x[0] * x[1] * height * width * weight[0] * weight[1],
    shape=_empty_windows,
)
def convolve_windows(x: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    """A convolution (d, d, i, j) of each head's map whose windows lie side by side: (b, h, m, d)."""
    out = _empty_windows(x, weight, height, width)
    grid = _Map(height, width, x.shape[2] - height * width)
    windows = *_long(*weight.shape[2:]), _pointer(weight.permute(2, 3, 1, 0).contiguous())
    library().convolve_windows(_shape(x, x), _tokens(x), grid, *windows, _pointer(out))
    return out


def _one_map(q: Any, few: Any, *rest: Any) -> int:
    """A map between tokens and a few others, and a product with it."""
    return 4 * q[0] * q[1] * q[2] * few[2] * q[3]


@operator(
    "gaussian_gather(Tensor x, Tensor landmarks, Tensor v, float scale)",
    _one_map,
    shape=lambda x, landmarks, v, scale: landmarks.new_empty(landmarks.shape),
)
def gaussian_gather(x: Tensor, landmarks: Tensor, v: Tensor, scale: float) -> Tensor:
    """κ(scale·x, landmarks)ᵀ v: (b, h, m, d)."""
    out = landmarks.new_empty(landmarks.shape)
    few = _pointer(landmarks.contiguous()), *_long(landmarks.shape[2])
    library().gaussian_gather(_shape(x, v), _tokens(x), *few, _tokens(v), ctypes.c_float(scale), _pointer(out))
    return out


@operator("gaussian_spread(Tensor x, Tensor landmarks, Tensor u, float scale)", _one_map)
def gaussian_spread(x: Tensor, landmarks: Tensor, u: Tensor, scale: float) -> Tensor:
    """κ(scale·x, landmarks) u: (b, h, n, d)."""
    out = empty_tokens(x)
    few = _pointer(landmarks.contiguous()), *_long(landmarks.shape[2]), _pointer(u.contiguous())
    library().gaussian_spread(_shape(x, x), _tokens(x), *few, ctypes.c_float(scale), _tokens(out))
    return out


@operator(
    "newton_inverse(Tensor gram, Tensor alpha, int steps)",
    lambda gram, alpha, steps: 4 * steps * torch.Size(gram).numel() * gram[-1],
    shape=lambda gram, alpha, steps: gram.new_empty(gram.shape),
)
def newton_inverse(gram: Tensor, alpha: Tensor, steps: int) -> Tensor:
    """From `alpha` (..., 1, 1) times `gram` (..., m, m), ridge included."""
    out, m = gram.new_empty(gram.shape), gram.shape[-1]
    library().newton_inverse(
        _pointer(gram.contiguous()),
        _pointer(alpha.contiguous()),
        *_long(gram.numel() // m**2, m),
        ctypes.c_int32(steps),
        _pointer(out),
        ctypes.c_int32(torch.get_num_threads()),
    )
    return out


@operator(
    "newton_inverse_gradient(Tensor grad, Tensor gram, Tensor alpha, int steps)",
    lambda grad, gram, alpha, steps: 8 * steps * torch.Size(gram).numel() * gram[-1],
    shape=lambda grad, gram, alpha, steps: (gram.new_empty(gram.shape), alpha.new_empty(alpha.shape)),
    result="(Tensor, Tensor)",
)
def newton_inverse_gradient(grad: Tensor, gram: Tensor, alpha: Tensor, steps: int) -> tuple[Tensor, ...]:
    """Of `newton_inverse`, to gram and alpha; both matrices are symmetric."""
    grads, m = (gram.new_empty(gram.shape), alpha.new_empty(alpha.shape)), gram.shape[-1]
    library().newton_inverse_gradient(
        *(_pointer(x.contiguous()) for x in (grad, gram, alpha)),
        *_long(gram.numel() // m**2, m),
        ctypes.c_int32(steps),
        *map(_pointer, grads),
        ctypes.c_int32(torch.get_num_threads()),
    )
    return grads
