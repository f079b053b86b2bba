"""The mechanisms' operators: what lies between the projections.

Letters: b batch, h heads, n tokens, d channels of a head, a agents, m landmarks. The formulas are those of subquad.ops.
The gradient of each stands in front of it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.declaring import Operator, Settings, Tensors, empty_tokens, keeps, operator

QKV = {"q": "b h n d", "k": "b h m d", "v": "b h m d"}
GRAD = {"grad": "b h n d"}


def _product(q: Any, k: Any, *rest: Any) -> int:
    """Two products of every token with a (d, d) state."""
    b, h, n, d = q
    return 2 * b * h * (n + k[2]) * d * d


def _like_qkv(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(map(empty_tokens, (q, k, v)))


linear_attention_gradient = operator(
    "the gradient of linear attention",
    "linear_attention_gradient(Tensor grad, Tensor q, Tensor k, Tensor v, str feature_map, float eps)",
    GRAD | QKV,
    lambda grad, q, k, *rest: 3 * _product(q, k),
    shape=_like_qkv,
    result="(Tensor, Tensor, Tensor)",
)

linear_attention = operator(
    "linear attention",
    "linear_attention(Tensor q, Tensor k, Tensor v, str feature_map, float eps)",
    QKV,
    _product,
    gradient=linear_attention_gradient,
    sums_in_fp32=True,
)


def _state(k: Tensor, rows: int, streams: int = 1) -> tuple[Tensor, ...]:
    """Room for the states (b·h, streams, rows, d) of keys (b, h, n, d), in fp32."""
    return (k.new_empty(k.shape[0] * k.shape[1], streams, rows, k.shape[3], dtype=torch.float32),)


keeps(linear_attention, {"state": "b*h 1 d+1 d"}, lambda q, k, *rest: _state(k, k.shape[3] + 1))

# of some keys and values [φ(k)ᵀ v, Σ φ(k)], (b, h, d, d + 1)
linear_sums = operator(
    "linear attention",
    "linear_sums(Tensor k, Tensor v, str feature_map)",
    {"k": "b h m d", "v": "b h m d"},
    lambda k, v, *rest: 2 * k[0] * k[1] * k[2] * k[3] ** 2,
    shape=lambda k, v, feature_map: k.new_empty(*k.shape[:2], k.shape[3], k.shape[3] + 1, dtype=torch.float32),
    sums_in_fp32=True,
    gives_fp32=True,
    needs_all_tokens=False,
)

# of some queries, from such sums over `count` keys
linear_answers = operator(
    "linear attention",
    "linear_answers(Tensor q, Tensor sums, int count, str feature_map, float eps)",
    {"q": "b h n d", "sums": "b h d d+1"},
    lambda q, *rest: 2 * q[0] * q[1] * q[2] * q[3] ** 2,
    sums_in_fp32=True,
    needs_all_tokens=False,
)

FOCUSED = {"x": "b h n d", "temperature": "h 1 d"}

focus_gradient = operator(
    "the gradient of focused features",
    "focus_gradient(Tensor grad, Tensor x, Tensor temperature, float power)",
    GRAD | FOCUSED,
    shape=lambda grad, x, temperature, power: (
        empty_tokens(x),
        temperature.new_empty(temperature.shape, dtype=torch.float32),
    ),
    result="(Tensor, Tensor)",
)

# features whose norm, over all heads, stays; for linear attention with the feature map "none"
focus = operator(
    "focused features",
    "focus(Tensor x, Tensor temperature, float power)",
    FOCUSED,
    shape=lambda x, temperature, power: empty_tokens(x).float(),
    gradient=focus_gradient,
    sums_in_fp32=True,
    gives_fp32=True,
    needs_all_tokens=False,
)

inline_attention_gradient = operator(
    "the gradient of InLine attention",
    "inline_attention_gradient(Tensor grad, Tensor q, Tensor k, Tensor v)",
    GRAD | QKV,
    lambda grad, q, k, *rest: 3 * _product(q, k),
    shape=_like_qkv,
    result="(Tensor, Tensor, Tensor)",
)

inline_attention = operator(
    "InLine attention",
    "inline_attention(Tensor q, Tensor k, Tensor v)",
    QKV,
    _product,
    gradient=inline_attention_gradient,
    sums_in_fp32=True,
)

keeps(inline_attention, {"state": "b*h 1 d+3 d"}, lambda q, k, *rest: _state(k, k.shape[3] + 3))

TURNED = QKV | {"cos": "n d|h n d", "sin": "n d|h n d"}
"""Features may be turned by tables of a rotation, `interleaved` or not; see subquad.rope."""


def _turned(name: str, title: str, products: int = 1, sums: int = 0) -> Operator:
    """Attention `name` of as many products with (d, d) states as linear attention has, and of sums over d channels."""

    def flops(q: Any, k: Any, *rest: Any) -> int:
        b, h, n, d = q
        return products * _product(q, k) + 2 * b * h * sums * n * d

    settings = "Tensor? cos, Tensor? sin, bool interleaved, float eps"
    gradient = operator(
        f"the gradient of {title}",
        f"{name}_gradient(Tensor grad, Tensor q, Tensor k, Tensor v, {settings})",
        GRAD | TURNED,
        lambda grad, *shapes: 3 * flops(*shapes),
        shape=_like_qkv,
        result="(Tensor, Tensor, Tensor)",
    )

    def backward(
        compute: Callable[..., Any], grad: Tensor, tensors: Tensors, settings: Settings
    ) -> tuple[Tensor | None, ...]:
        return *compute(grad, *tensors, *settings), None, None

    attention = operator(
        title,
        f"{name}(Tensor q, Tensor k, Tensor v, {settings})",
        TURNED,
        flops,
        gradient=gradient,
        backward=backward,
        sums_in_fp32=True,
    )
    keeps(attention, {"state": f"b*h {products} d+3 d"}, lambda q, k, *rest: _state(k, k.shape[3] + 3, products))
    return attention


mlla_attention = _turned("mlla_attention", "MLLA's linear attention", sums=1)
mala_attention = _turned("mala_attention", "MALA", sums=1)
rala_attention = _turned("rala_attention", "RALA", sums=3)
nala_attention = _turned("nala_attention", "NaLa", products=2, sums=2)

WIDE_TABLES = "n d|h n d|n 2*d|h n 2*d"
"""Of both halves of features, or of one where these turn alike."""

POLAPP = QKV | {"same": "h 1 2*d", "opposite": "h 1 2*d", "cos": WIDE_TABLES, "sin": WIDE_TABLES}


def _polapp_product(q: Any, k: Any, *rest: Any) -> int:
    return 2 * _product(q, k) + 8 * q[0] * q[1] * q[2] * q[3]


def _like_parameter(parameter: Tensor) -> Tensor:
    """Room for its gradient: a sum over many tokens, in fp32."""
    return torch.empty_like(parameter, dtype=torch.float32)


# to q, k, v, same and opposite
polapp_attention_gradient = operator(
    "the gradient of PolaFormer++'s attention",
    "polapp_attention_gradient(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor same, Tensor opposite, Tensor? cos, "
    "Tensor? sin, bool interleaved, float eps)",
    GRAD | POLAPP,
    lambda grad, *shapes: 3 * _polapp_product(*shapes),
    shape=lambda grad, q, k, v, same, opposite, *rest: (
        *_like_qkv(grad, q, k, v),
        *map(_like_parameter, (same, opposite)),
    ),
    result="(Tensor, Tensor, Tensor, Tensor, Tensor)",
)

polapp_attention = operator(
    "PolaFormer++'s attention",
    "polapp_attention(Tensor q, Tensor k, Tensor v, Tensor same, Tensor opposite, Tensor? cos, Tensor? sin, "
    "bool interleaved, float eps)",
    POLAPP,
    _polapp_product,
    gradient=polapp_attention_gradient,
    backward=lambda compute, grad, tensors, settings: (*compute(grad, *tensors, *settings), None, None),
    sums_in_fp32=True,
)

STATES_OF_BLOCKS = {"states": "b h m d d+1"}
SCALED = {"scale": "h 1 d"}

mhla_sums_gradient = operator(
    "the gradient of MHLA's states",
    "mhla_sums_gradient(Tensor grad, Tensor k, Tensor v, Tensor scale, int[] shape, int[] pieces)",
    {"grad": "b h m d d+1", "k": "b h n d", "v": "b h n d"} | SCALED,
    lambda grad, k, *rest: 4 * k[0] * k[1] * k[2] * k[3] * (k[3] + 1),
    shape=lambda grad, k, v, scale, *rest: (empty_tokens(k), empty_tokens(v), torch.empty_like(scale)),
    result="(Tensor, Tensor, Tensor)",
)

# of each block of a map in `pieces`, (rows, columns), [Σ kᵀ v, Σ k] of features; prefix tokens are a block in front
mhla_sums = operator(
    "MHLA",
    "mhla_sums(Tensor k, Tensor v, Tensor scale, int[] shape, int[] pieces)",
    {"k": "b h n d", "v": "b h n d"} | SCALED,
    lambda k, *rest: 2 * k[0] * k[1] * k[2] * k[3] * (k[3] + 1),
    shape=lambda k, v, scale, shape, pieces: empty_states_of_blocks(k, shape, pieces),
    gradient=mhla_sums_gradient,
    sums_in_fp32=True,
    gives_fp32=True,
    needs_all_tokens=False,
)

mhla_answers_gradient = operator(
    "the gradient of MHLA's answers",
    "mhla_answers_gradient(Tensor grad, Tensor q, Tensor states, Tensor scale, int[] shape, int[] pieces)",
    GRAD | {"q": "b h n d"} | STATES_OF_BLOCKS | SCALED,
    lambda grad, q, *rest: 4 * q[0] * q[1] * q[2] * q[3] * (q[3] + 1),
    shape=lambda grad, q, states, scale, *rest: (
        empty_tokens(q),
        states.new_empty(states.shape, dtype=torch.float32),
        torch.empty_like(scale),
    ),
    result="(Tensor, Tensor, Tensor)",
)

# of the states that were mixed for each block of queries
mhla_answers = operator(
    "MHLA",
    "mhla_answers(Tensor q, Tensor states, Tensor scale, int[] shape, int[] pieces)",
    {"q": "b h n d"} | STATES_OF_BLOCKS | SCALED,
    lambda q, *rest: 2 * q[0] * q[1] * q[2] * q[3] * (q[3] + 1),
    gradient=mhla_answers_gradient,
    sums_in_fp32=True,
    needs_all_tokens=False,
)


def empty_states_of_blocks(k: Any, shape: Sequence[int], pieces: Sequence[int]) -> Any:
    """Room for the states (b, h, m, d, d + 1) of the blocks that keys (b, h, n, d) are cut into."""
    b, h, n, d = k.shape
    blocks = pieces[0] * pieces[1] + (n > shape[0] * shape[1])
    return k.new_empty(b, h, blocks, d, d + 1, dtype=torch.float32)


def _transforms(q: Any, count: int) -> int:
    """Operations of so many real Fourier transforms of all channels over n tokens, 2.5 n log₂ n each."""
    b, h, n, d = q
    return int(2.5 * b * h * n * d * math.log2(max(n, 2))) * count


circulant_attention_gradient = operator(
    "the gradient of circulant attention",
    "circulant_attention_gradient(Tensor grad, Tensor q, Tensor k, Tensor v, int[] shape)",
    GRAD | {"q": "b h n d", "k": "b h n d", "v": "b h n d"},
    lambda grad, q, *rest: _transforms(q, 15),
    shape=_like_qkv,
    result="(Tensor, Tensor, Tensor)",
)

# on a map of `shape`, (rows, columns)
circulant_attention = operator(
    "circulant attention",
    "circulant_attention(Tensor q, Tensor k, Tensor v, int[] shape)",
    {"q": "b h n d", "k": "b h n d", "v": "b h n d"},
    lambda q, *rest: _transforms(q, 6),
    gradient=circulant_attention_gradient,
    sums_in_fp32=True,
)

UNIT = {"w1": "h d d", "w2": "h d d"}

TRAINED = QKV | UNIT | {"cos": "n d|h n d", "sin": "n d|h n d"}


def _unit_product(q: Any, k: Any, *rest: Any) -> int:
    return _product(q, k) + _product(k, q) + 4 * q[0] * q[1] * k[2] * q[3] ** 2


# to q, k, v, w1 and w2
ttt_unit_gradient = operator(
    "the gradient of a gated unit trained on keys",
    "ttt_unit_gradient(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor w1, Tensor w2, Tensor? cos, Tensor? sin, "
    "bool interleaved, float loss_scale)",
    GRAD | TRAINED,
    lambda grad, *shapes: 3 * _unit_product(*shapes),
    shape=lambda grad, q, k, v, w1, w2, *rest: (*_like_qkv(grad, q, k, v), *map(_like_parameter, (w1, w2))),
    result="(Tensor, Tensor, Tensor, Tensor, Tensor)",
)

ttt_unit = operator(
    "a gated unit trained on keys",
    "ttt_unit(Tensor q, Tensor k, Tensor v, Tensor w1, Tensor w2, Tensor? cos, Tensor? sin, bool interleaved, "
    "float loss_scale)",
    TRAINED,
    _unit_product,
    gradient=ttt_unit_gradient,
    backward=lambda compute, grad, tensors, settings: (*compute(grad, *tensors, *settings), None, None),
    sums_in_fp32=True,
)

POLAR = QKV | {"power": "h 1 d", "temperature": "h 1 d", "positions": "h m d"}


def _pola_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, power: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return *_like_qkv(grad, q, k, v), _like_parameter(power), _like_parameter(power)


# to q, k, v, power and temperature; positions have the sum of k's over the batch
pola_attention_gradient = operator(
    "the gradient of PolaFormer's attention",
    "pola_attention_gradient(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor power, Tensor? temperature, "
    "Tensor? positions, float eps)",
    GRAD | POLAR,
    lambda grad, *shapes: 6 * _product(*shapes),
    shape=_pola_gradients,
    result="(Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _pola_backward(
    gradient: Callable[..., Any], grad: Tensor, tensors: Tensors, settings: Settings
) -> tuple[Tensor | None, ...]:
    dq, dk, dv, dpower, dtemperature = gradient(grad, *tensors, *settings)
    *_, temperature, positions = tensors
    # positions are added to the keys of every image
    dpositions = None if positions is None else dk.sum(dim=0, dtype=torch.float32)
    return dq, dk, dv, dpower, None if temperature is None else dtemperature, dpositions


pola_attention = operator(
    "PolaFormer's attention",
    "pola_attention(Tensor q, Tensor k, Tensor v, Tensor power, Tensor? temperature, Tensor? positions, float eps)",
    POLAR,
    lambda *shapes: 2 * _product(*shapes),
    gradient=pola_attention_gradient,
    backward=_pola_backward,
    sums_in_fp32=True,
)


keeps(pola_attention, {"state": "b*h 2 d+1 d"}, lambda q, k, *rest: _state(k, k.shape[3] + 1, 2))


def _two_maps(q: Any, few: Any, k: Any, *rest: Any) -> int:
    """Two maps between tokens and a few others, each with two products."""
    b, h, n, d = q
    return 4 * b * h * (n + k[2]) * few[2] * d


AGENTS = {"q": "b h n d", "agents": "b h a d", "k": "b h m d", "v": "b h m d"}
BIASES = {"key_bias": "h a m", "query_bias": "h a n"}


def _agent_gradients(
    grad: Tensor, q: Tensor, agents: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, query_bias: Tensor
) -> tuple[Tensor, ...]:
    dq, dk, dv = map(empty_tokens, (q, k, v))
    of_biases = (bias.new_empty(bias.mT.shape) for bias in (key_bias, query_bias))
    return dq, agents.new_empty(agents.shape), dk, dv, *of_biases


# biases are (h, a, n), their gradients, which are sums over the batch, (h, n, a)
agent_attention_gradient = operator(
    "the gradient of agent attention",
    "agent_attention_gradient(Tensor grad, Tensor q, Tensor agents, Tensor k, Tensor v, Tensor key_bias, "
    "Tensor query_bias)",
    GRAD | AGENTS | BIASES,
    lambda grad, q, agents, k, *rest: 4 * q[0] * q[1] * q[3] * agents[2] * (2 * q[2] + 2 * k[2]),
    shape=_agent_gradients,
    result="(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _agent_backward(
    gradient: Callable[..., Any], grad: Tensor, tensors: Tensors, settings: Settings
) -> tuple[Tensor | None, ...]:
    *grads, dkey_bias, dquery_bias = gradient(grad, *tensors)
    return *grads, dkey_bias.mT, dquery_bias.mT


agent_attention = operator(
    "agent attention",
    "agent_attention(Tensor q, Tensor agents, Tensor k, Tensor v, Tensor key_bias, Tensor query_bias)",
    AGENTS | BIASES,
    _two_maps,
    gradient=agent_attention_gradient,
    backward=_agent_backward,
)

# what agents collect, and the logarithms of their softmaxes' sums
keeps(
    agent_attention,
    {"values": "b h a d", "normalizer": "b h a"},
    lambda q, agents, *rest: tuple(
        agents.new_empty(shape, dtype=torch.float32) for shape in (agents.shape, agents.shape[:3])
    ),
)

# biases are sums of a block, which is resampled to the map, rows and columns; tokens of the prefix have their own
agent_attention_of_tables = operator(
    "agent attention",
    "agent_attention_of_tables(Tensor q, Tensor agents, Tensor k, Tensor v, "
    "Tensor key_block, Tensor key_rows, Tensor key_columns, Tensor? key_prefix, "
    "Tensor query_block, Tensor query_rows, Tensor query_columns, Tensor? query_prefix)",
    AGENTS
    | {"key_block": "h a s s", "key_rows": "h a y", "key_columns": "h a x", "key_prefix": "h a p"}
    | {"query_block": "h a t t", "query_rows": "h a i", "query_columns": "h a j", "query_prefix": "h a u"},
    _two_maps,
)


def _one_map(q: Any, few: Any, *rest: Any) -> int:
    """A map between tokens and a few others, and a product with it."""
    return 4 * q[0] * q[1] * q[2] * few[2] * q[3]


LANDMARKS = {"q": "b h n d", "landmarks": "b h m d"}

# to q, landmarks and v
soft_gather_gradient = operator(
    "the gradient of softmax-free attention",
    "soft_gather_gradient(Tensor grad, Tensor q, Tensor landmarks, Tensor v, float scale)",
    {"grad": "b h m d"} | LANDMARKS | {"v": "b h n d"},
    lambda grad, *shapes: 2 * _one_map(*shapes),
    shape=lambda grad, q, landmarks, v, scale: (empty_tokens(q), landmarks.new_empty(landmarks.shape), empty_tokens(v)),
    result="(Tensor, Tensor, Tensor)",
)

# κ(scale·q, landmarks)ᵀ v: (b, h, m, d)
soft_gather = operator(
    "softmax-free attention",
    "soft_gather(Tensor q, Tensor landmarks, Tensor v, float scale)",
    LANDMARKS | {"v": "b h n d"},
    _one_map,
    shape=lambda q, landmarks, v, scale: landmarks.new_empty(landmarks.shape, dtype=torch.float32),
    gradient=soft_gather_gradient,
    sums_in_fp32=True,
    gives_fp32=True,
)

# to q, landmarks and u
soft_spread_gradient = operator(
    "the gradient of softmax-free attention",
    "soft_spread_gradient(Tensor grad, Tensor q, Tensor landmarks, Tensor u, float scale)",
    GRAD | LANDMARKS | {"u": "b h m d"},
    lambda grad, *shapes: 2 * _one_map(*shapes),
    shape=lambda grad, q, landmarks, u, scale: (empty_tokens(q), *(t.new_empty(t.shape) for t in (landmarks, u))),
    result="(Tensor, Tensor, Tensor)",
)

# κ(scale·q, landmarks) u: (b, h, n, d)
soft_spread = operator(
    "softmax-free attention",
    "soft_spread(Tensor q, Tensor landmarks, Tensor u, float scale)",
    LANDMARKS | {"u": "b h m d"},
    _one_map,
    gradient=soft_spread_gradient,
    sums_in_fp32=True,
)

MATRICES = {"gram": "... m m", "alpha": "... 1 1"}

newton_inverse_gradient = operator(
    "the gradient of Newton's steps",
    "newton_inverse_gradient(Tensor grad, Tensor gram, Tensor alpha, int steps)",
    {"grad": "... m m"} | MATRICES,
    lambda grad, gram, alpha, steps: 8 * steps * torch.Size(gram).numel() * gram[-1],
    shape=lambda grad, gram, alpha, steps: (gram.new_empty(gram.shape), alpha.new_empty(alpha.shape)),
    result="(Tensor, Tensor)",
)

# from alpha times gram, ridge included
newton_inverse = operator(
    "Newton's steps",
    "newton_inverse(Tensor gram, Tensor alpha, int steps)",
    MATRICES,
    lambda gram, alpha, steps: 4 * steps * torch.Size(gram).numel() * gram[-1],
    shape=lambda gram, alpha, steps: gram.new_empty(gram.shape),
    gradient=newton_inverse_gradient,
    needs_all_tokens=False,
)
