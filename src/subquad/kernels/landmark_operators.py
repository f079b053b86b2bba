"""Operators of attention by way of a few others: agents, and SOFT's landmarks with Newton's steps.

Letters: b batch, h heads, n tokens, d channels of a head, a agents, m landmarks. The formulas are those of subquad.ops.
The gradient of each stands in front of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.declaring import Settings, Tensors, empty_tokens, keeps, operator
from subquad.kernels.state_operators import GRAD


def _two_maps(q: Any, few: Any, k: Any, *rest: Any) -> int:
    """Two maps between tokens and a few others, each with two products."""
    b, h, n, d = q
    return 4 * b * h * (n + k[2]) * few[2] * d


AGENTS = {"q": "b h n d", "agents": "b h a d", "k": "b h m d", "v": "b h m d"}

BIASES = {"key_bias": "h a m", "query_bias": "h a n"}

# a bias is the sum of a block, which is resampled to the map, rows and columns; tokens of the prefix have their own
TABLES = {"key_block": "h a s s", "key_rows": "h a y", "key_columns": "h a x", "key_prefix": "h a p"}
TABLES |= {"query_block": "h a t t", "query_rows": "h a i", "query_columns": "h a j", "query_prefix": "h a u"}


def collected(agents: Tensor, numbers: int) -> tuple[Tensor, ...]:
    """Room for what agents collect, and so many numbers of each beside it."""
    shapes = agents.shape, *(agents.shape[:3],) * numbers
    return tuple(agents.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _agent_gradients(
    grad: Tensor, q: Tensor, agents: Tensor, k: Tensor, v: Tensor, *biases: Tensor | None
) -> tuple[Tensor, ...]:
    dq, dk, dv = map(empty_tokens, (q, k, v))
    of_biases = (agents.new_empty(0) if bias is None else bias.new_empty(bias.shape) for bias in biases)
    return dq, agents.new_empty(agents.shape), dk, dv, *of_biases


def _agent_products(grad: Any, q: Any, agents: Any, k: Any, *rest: Any) -> int:
    return 4 * q[0] * q[1] * q[3] * agents[2] * (2 * q[2] + 2 * k[2])


# biases are (h, a, n), their gradients, which are sums over the batch, (h, n, a)
agent_attention_gradient = operator(
    "the gradient of agent attention",
    "agent_attention_gradient(Tensor grad, Tensor q, Tensor agents, Tensor k, Tensor v, Tensor key_bias, "
    "Tensor query_bias)",
    GRAD | AGENTS | BIASES,
    _agent_products,
    shape=lambda *tensors: _agent_gradients(*tensors[:5], *(bias.mT for bias in tensors[5:])),
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
    lambda q, agents, *rest: collected(agents, 1),
)

_OF_TABLES = (
    "Tensor q, Tensor agents, Tensor k, Tensor v, "
    "Tensor key_block, Tensor key_rows, Tensor key_columns, Tensor? key_prefix, "
    "Tensor query_block, Tensor query_rows, Tensor query_columns, Tensor? query_prefix"
)

# to q, agents, k, v and the tables; to a prefix that is not there, no numbers
agent_attention_of_tables_gradient = operator(
    "the gradient of agent attention",
    f"agent_attention_of_tables_gradient(Tensor grad, {_OF_TABLES})",
    GRAD | AGENTS | TABLES,
    _agent_products,
    shape=_agent_gradients,
    result=f"({', '.join(['Tensor'] * 12)})",
)


def _tables_backward(
    gradient: Callable[..., Any], grad: Tensor, tensors: Tensors, settings: Settings
) -> tuple[Tensor | None, ...]:
    grads = gradient(grad, *tensors)
    return tuple(None if tensor is None else grad for tensor, grad in zip(tensors, grads, strict=True))


agent_attention_of_tables = operator(
    "agent attention",
    f"agent_attention_of_tables({_OF_TABLES})",
    AGENTS | TABLES,
    _two_maps,
    gradient=agent_attention_of_tables_gradient,
    backward=_tables_backward,
)

# what agents collect, their largest logits, and their softmaxes' sums
keeps(
    agent_attention_of_tables,
    {"values": "b h a d", "most": "b h a", "total": "b h a"},
    lambda q, agents, *rest: collected(agents, 2),
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
