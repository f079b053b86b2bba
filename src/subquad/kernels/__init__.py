"""Who computes an operation: operators `torch.ops.subquad.…`, declared once, and backends that have kernels for them.

The formulas of `subquad.ops` say which operator they may be computed by and hand themselves to `compute`, which takes
a kernel where one can and the formula otherwise.
"""

from subquad.kernels.backends import (
    BACKENDS,
    KERNELS,
    PLUGGED_IN,
    Backend,
    register_backend,
    unavailable,
    use_backend,
)
from subquad.kernels.choosing import choose, compute, compute_if_possible, run
from subquad.kernels.declaring import OPERATORS, Operator, implements, kernels_by_title
from subquad.kernels.gradients import learns
from subquad.kernels.grid_operators import circulant_attention, mhla_answers, mhla_sums
from subquad.kernels.landmark_operators import (
    agent_attention,
    agent_attention_of_tables,
    newton_inverse,
    soft_gather,
    soft_spread,
)
from subquad.kernels.layer_operators import (
    linear_branch_answers,
    linear_branch_sums,
    mlp,
    norm_projection,
    patch_tokens,
    projection_residual,
    turned,
)
from subquad.kernels.map_operators import convolve_windows, depthwise, local_branch, map_filter, map_products, pool
from subquad.kernels.mixer_operators import (
    agent_mixer,
    circulant_mixer,
    focused_mixer,
    inline_mixer,
    mhla_mixer,
    pola_mixer,
    polapp_mixer,
    soft_mixer,
    ttt_mixer,
)
from subquad.kernels.shapes import Shapes
from subquad.kernels.softmax_operators import softmax_attention
from subquad.kernels.state_operators import (
    focused_attention,
    inline_attention,
    linear_answers,
    linear_attention,
    linear_sums,
    mala_attention,
    mlla_attention,
    nala_attention,
    pola_attention,
    polapp_attention,
    rala_attention,
    ttt_unit,
)

from subquad.kernels import cpu, triton  # isort: skip  # noqa: F401  the backends of this package register themselves
from subquad.kernels.replaying import may_be_replayed, replayed, replayed_in_a_row  # isort: skip  it stands on one of them

__all__ = [
    "BACKENDS",
    "KERNELS",
    "OPERATORS",
    "PLUGGED_IN",
    "Backend",
    "Operator",
    "Shapes",
    "agent_attention",
    "agent_attention_of_tables",
    "agent_mixer",
    "choose",
    "circulant_attention",
    "circulant_mixer",
    "compute",
    "compute_if_possible",
    "convolve_windows",
    "depthwise",
    "focused_attention",
    "focused_mixer",
    "implements",
    "inline_attention",
    "inline_mixer",
    "kernels_by_title",
    "learns",
    "linear_answers",
    "linear_attention",
    "linear_branch_answers",
    "linear_branch_sums",
    "linear_sums",
    "local_branch",
    "mala_attention",
    "map_filter",
    "map_products",
    "may_be_replayed",
    "mhla_answers",
    "mhla_mixer",
    "mhla_sums",
    "mlla_attention",
    "mlp",
    "nala_attention",
    "newton_inverse",
    "norm_projection",
    "patch_tokens",
    "pola_attention",
    "pola_mixer",
    "polapp_attention",
    "polapp_mixer",
    "pool",
    "projection_residual",
    "rala_attention",
    "register_backend",
    "replayed",
    "replayed_in_a_row",
    "run",
    "soft_gather",
    "soft_mixer",
    "soft_spread",
    "softmax_attention",
    "ttt_mixer",
    "ttt_unit",
    "turned",
    "unavailable",
    "use_backend",
]
