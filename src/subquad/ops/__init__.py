"""The formulas: pure functions of tensors, without parameters. The eager form written here is the specification.

Every mechanism has a fast form, whose cost is what the mechanism is famous for, and its explicit weights, the
(n_q, n_k) matrix that the fast form never builds. Letters: b batch, h heads, n tokens (n_q queries, n_k keys),
d channels of a head, a agents, m landmarks. Masks are True where something is absent or forbidden.
"""

from subquad.kernels import Shapes
from subquad.ops import (
    agent_formula,
    circulant_formula,
    focused_formula,
    inline_formula,
    linear_formula,
    mala_formula,
    map_formulas,
    mhla_formula,
    mlla_formula,
    mlp_formula,
    nala_formula,
    pola_formula,
    polapp_formula,
    rala_formula,
    soft_formula,
    softmax_formula,
    ttt_formula,
)
from subquad.ops.agent_formula import agent_attention, agent_weights
from subquad.ops.circulant_formula import circulant_attention, circulant_weights
from subquad.ops.focused_formula import focused_attention, focused_weights
from subquad.ops.inline_formula import inline_attention, inline_weights
from subquad.ops.linear_formula import FEATURE_MAPS, linear_attention, linear_weights
from subquad.ops.mala_formula import mala_attention, mala_weights
from subquad.ops.map_formulas import add_local, convolve_windows, pool_tokens
from subquad.ops.mhla_formula import NORMALISERS, mhla_attention, mhla_weights
from subquad.ops.mlla_formula import mlla_attention, mlla_weights
from subquad.ops.mlp_formula import mlp_branch
from subquad.ops.nala_formula import nala_attention, nala_weights
from subquad.ops.pola_formula import pola_attention, pola_weights
from subquad.ops.polapp_formula import polapp_attention, polapp_weights
from subquad.ops.rala_formula import rala_attention, rala_weights
from subquad.ops.soft_formula import (
    INVERSES,
    gaussian_kernel,
    newton_inverse,
    soft_attention,
    soft_weights,
)
from subquad.ops.softmax_formula import softmax_attention, softmax_weights
from subquad.ops.ttt_formula import ttt_filter, ttt_unit

OPERATIONS: dict[str, Shapes] = {
    "add_local": map_formulas.SHAPES,
    "agent_attention": agent_formula.SHAPES,
    "agent_weights": agent_formula.WEIGHTS_SHAPES,
    "circulant_attention": circulant_formula.SHAPES,
    "circulant_weights": circulant_formula.WEIGHTS_SHAPES,
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
    "mlla_attention": mlla_formula.SHAPES,
    "mlla_weights": mlla_formula.WEIGHTS_SHAPES,
    "mala_attention": mala_formula.SHAPES,
    "mala_weights": mala_formula.WEIGHTS_SHAPES,
    "nala_attention": nala_formula.SHAPES,
    "nala_weights": nala_formula.WEIGHTS_SHAPES,
    "mhla_attention": mhla_formula.SHAPES,
    "mhla_weights": mhla_formula.WEIGHTS_SHAPES,
    "mlp_branch": mlp_formula.SHAPES,
    "newton_inverse": soft_formula.INVERSE_SHAPES,
    "pola_attention": pola_formula.SHAPES,
    "pola_weights": pola_formula.WEIGHTS_SHAPES,
    "polapp_attention": polapp_formula.SHAPES,
    "polapp_weights": polapp_formula.WEIGHTS_SHAPES,
    "pool_tokens": map_formulas.POOL_SHAPES,
    "rala_attention": rala_formula.SHAPES,
    "rala_weights": rala_formula.WEIGHTS_SHAPES,
    "softmax_attention": softmax_formula.SHAPES,
    "softmax_weights": softmax_formula.WEIGHTS_SHAPES,
    "ttt_filter": ttt_formula.FILTER_SHAPES,
    "ttt_unit": ttt_formula.UNIT_SHAPES,
}
"""The shapes that every operation takes, by its name and the names of its arguments."""

__all__ = [
    "FEATURE_MAPS",
    "INVERSES",
    "NORMALISERS",
    "OPERATIONS",
    "Shapes",
    "add_local",
    "agent_attention",
    "agent_weights",
    "circulant_attention",
    "circulant_weights",
    "convolve_windows",
    "focused_attention",
    "focused_weights",
    "gaussian_kernel",
    "inline_attention",
    "inline_weights",
    "linear_attention",
    "linear_weights",
    "mala_attention",
    "mala_weights",
    "mhla_attention",
    "mhla_weights",
    "mlla_attention",
    "mlla_weights",
    "mlp_branch",
    "nala_attention",
    "nala_weights",
    "newton_inverse",
    "pola_attention",
    "pola_weights",
    "polapp_attention",
    "polapp_weights",
    "pool_tokens",
    "rala_attention",
    "rala_weights",
    "soft_attention",
    "soft_weights",
    "softmax_attention",
    "softmax_weights",
    "ttt_filter",
    "ttt_unit",
]
