"""The fused operators `torch.ops.subquad.…`: what each is, apart from who computes it (`native`, `triton`).

`subquad.kernels.choosing` decides when they are used.
"""

from subquad.kernels.declaring import (
    TITLES,
    Operator,
    has_gradient,
    has_kernel,
    implements,
    kernels_by_title,
    name_of,
    shapes_of,
)
from subquad.kernels.gradients import learns, with_gradient
from subquad.kernels.map_operators import (
    convolve_windows,
    depthwise,
    depthwise_gradient,
    local_branch,
    pool,
    pool_gradient,
)
from subquad.kernels.mixing_operators import (
    agent_attention,
    agent_attention_gradient,
    gaussian_gather,
    gaussian_gather_gradient,
    gaussian_spread,
    gaussian_spread_gradient,
    inline_attention,
    inline_attention_gradient,
    linear_attention,
    linear_attention_gradient,
    newton_inverse,
    newton_inverse_gradient,
    polar_attention,
    polar_attention_gradient,
)
from subquad.kernels.shapes import Shapes

__all__ = [
    "TITLES",
    "Operator",
    "Shapes",
    "agent_attention",
    "agent_attention_gradient",
    "convolve_windows",
    "depthwise",
    "depthwise_gradient",
    "gaussian_gather",
    "gaussian_gather_gradient",
    "gaussian_spread",
    "gaussian_spread_gradient",
    "has_gradient",
    "has_kernel",
    "implements",
    "inline_attention",
    "inline_attention_gradient",
    "kernels_by_title",
    "learns",
    "linear_attention",
    "linear_attention_gradient",
    "local_branch",
    "name_of",
    "newton_inverse",
    "newton_inverse_gradient",
    "polar_attention",
    "polar_attention_gradient",
    "pool",
    "pool_gradient",
    "shapes_of",
    "with_gradient",
]
