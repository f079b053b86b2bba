"""The formulas: pure functions of tensors, without parameters. The eager form written here is the specification.

Every mechanism has a fast form, whose cost is what the mechanism is famous for, and its explicit weights, the
(n_q, n_k) matrix that the fast form never builds. Letters: b batch, h heads, n tokens (n_q queries, n_k keys),
d channels of a head, a agents, m landmarks. Masks are True where something is absent or forbidden.
"""

from subquad.operators import Shapes
from subquad.ops import agent, focused, gaussian, inline, linear, local, polar, softmax
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

OPERATIONS: dict[str, Shapes] = {
    "add_local": local.SHAPES,
    "agent_attention": agent.SHAPES,
    "agent_weights": agent.WEIGHTS_SHAPES,
    "convolve_windows": local.WINDOWS_SHAPES,
    "focused_attention": focused.SHAPES,
    "focused_weights": focused.WEIGHTS_SHAPES,
    "gaussian_attention": gaussian.SHAPES,
    "gaussian_kernel": gaussian.KERNEL_SHAPES,
    "gaussian_weights": gaussian.WEIGHTS_SHAPES,
    "inline_attention": inline.SHAPES,
    "inline_weights": inline.WEIGHTS_SHAPES,
    "linear_attention": linear.SHAPES,
    "linear_weights": linear.WEIGHTS_SHAPES,
    "newton_inverse": gaussian.INVERSE_SHAPES,
    "polar_attention": polar.SHAPES,
    "polar_weights": polar.WEIGHTS_SHAPES,
    "pool_tokens": local.POOL_SHAPES,
    "softmax_attention": softmax.SHAPES,
    "softmax_weights": softmax.WEIGHTS_SHAPES,
}
"""The shapes that every operation takes, by its name and the names of its arguments."""

__all__ = [
    "FEATURE_MAPS",
    "INVERSES",
    "OPERATIONS",
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
