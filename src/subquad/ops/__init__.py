"""The formulas: pure functions of tensors, without parameters. The eager form written here is the specification.

Every mechanism has a fast form, whose cost is what the mechanism is famous for, and its explicit weights, the
(n_q, n_k) matrix that the fast form never builds. Letters: b batch, h heads, n tokens (n_q queries, n_k keys),
d channels of a head, a agents, m landmarks. Masks are True where something is absent or forbidden.
"""

from subquad.kernels import Shapes
from subquad.ops import (
    agent_formula,
    focused_formula,
    inline_formula,
    linear_formula,
    map_formulas,
    mlp_formula,
    pola_formula,
    soft_formula,
    softmax_formula,
)
from subquad.ops.agent_formula import agent_attention, agent_weights
from subquad.ops.focused_formula import focused_attention, focused_weights
from subquad.ops.inline_formula import inline_attention, inline_weights
from subquad.ops.linear_formula import FEATURE_MAPS, linear_attention, linear_weights
from subquad.ops.map_formulas import add_local, convolve_windows, pool_tokens
from subquad.ops.mlp_formula import mlp_branch
from subquad.ops.pola_formula import pola_attention, pola_weights
from subquad.ops.soft_formula import (
    INVERSES,
    gaussian_kernel,
    newton_inverse,
    soft_attention,
    soft_weights,
)
from subquad.ops.softmax_formula import softmax_attention, softmax_weights

OPERATIONS: dict[str, Shapes] = {
    "add_local": map_formulas.SHAPES,
    "agent_attention": agent_formula.SHAPES,
    "agent_weights": agent_formula.WEIGHTS_SHAPES,
    "convolve_windows": map_formulas.WINDOWS_SHAPES,
    "focused_attention": focused_formula.SHAPES,
    "focused_weights": focused_formula.WEIGHTS_SHAPES,
    "soft_attention": soft_formula.SHAPES,
    "gaussian_kernel": soft_formula.KERNEL_SHAPES,
    "soft_weights": soft_formula.WEIGHTS_SHAPES,
    "inline_attention": inline_formula.SHAPES,
    "inline_weights": inline_formula.WEIGHTS_SHAPES,
    "linear_attention": linear_formula.SHAPES,
    "linear_weights": linear_formula.WEIGHTS_SHAPES,
    "mlp_branch": mlp_formula.SHAPES,
    "newton_inverse": soft_formula.INVERSE_SHAPES,
    "pola_attention": pola_formula.SHAPES,
    "pola_weights": pola_formula.WEIGHTS_SHAPES,
    "pool_tokens": map_formulas.POOL_SHAPES,
    "softmax_attention": softmax_formula.SHAPES,
    "softmax_weights": softmax_formula.WEIGHTS_SHAPES,
}
"""The shapes that every operation takes, by its name and the names of its arguments."""

__all__ = [
    "FEATURE_MAPS",
    "INVERSES",
    "OPERATIONS",
    "Shapes",
    "add_local",
    "agent_attention",
    "agent_weights",
    "convolve_windows",
    "focused_attention",
    "focused_weights",
    "gaussian_kernel",
    "inline_attention",
    "inline_weights",
    "linear_attention",
    "linear_weights",
    "mlp_branch",
    "newton_inverse",
    "pola_attention",
    "pola_weights",
    "pool_tokens",
    "soft_attention",
    "soft_weights",
    "softmax_attention",
    "softmax_weights",
]
