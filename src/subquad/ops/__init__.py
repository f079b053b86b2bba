"""The formulas: pure functions of tensors, without parameters. The eager form written here is the specification.

Every mechanism has a fast form, whose cost is what the mechanism is famous for, and its explicit weights, the
(n_q, n_k) matrix that the fast form never builds. Letters: b batch, h heads, n tokens (n_q queries, n_k keys),
d channels of a head, a agents, m landmarks. Masks are True where something is absent or forbidden.
"""

from subquad.ops.agent import agent_attention, agent_weights
from subquad.ops.focused import focused_attention, focused_weights
from subquad.ops.gaussian import (
    INVERSES,
    gaussian_attention,
    gaussian_kernel,
    gaussian_weights,
    newton_inverse,
)
from subquad.ops.inline import inline_attention, inline_weights
from subquad.ops.linear import FEATURE_MAPS, linear_attention, linear_weights
from subquad.ops.local import add_local, convolve_windows, pool_tokens
from subquad.ops.polar import polar_attention, polar_weights
from subquad.ops.softmax import softmax_attention, softmax_weights

__all__ = [
    "FEATURE_MAPS",
    "INVERSES",
    "add_local",
    "agent_attention",
    "agent_weights",
    "convolve_windows",
    "focused_attention",
    "focused_weights",
    "gaussian_attention",
    "gaussian_kernel",
    "gaussian_weights",
    "inline_attention",
    "inline_weights",
    "linear_attention",
    "linear_weights",
    "newton_inverse",
    "polar_attention",
    "polar_weights",
    "pool_tokens",
    "softmax_attention",
    "softmax_weights",
]
