"""Fused kernels for the CPU, in C++: what eager PyTorch does in several passes over memory, in one or two.

In fp32; some have gradients. `subquad.backends` decides when they are used; the operators are those of
`torch.ops.subquad`.
"""

from subquad.native.cores import (
    agent_attention,
    agent_attention_gradient,
    gaussian_gather,
    gaussian_spread,
    inline_attention,
    inline_attention_gradient,
    linear_attention,
    linear_attention_gradient,
    newton_inverse,
    newton_inverse_gradient,
    polar_attention,
)
from subquad.native.gradients import learns, with_gradient
from subquad.native.library import missing
from subquad.native.places import (
    convolve_windows,
    depthwise,
    depthwise_gradient,
    local_branch,
    pool,
    pool_gradient,
)

__all__ = [
    "agent_attention",
    "agent_attention_gradient",
    "convolve_windows",
    "depthwise",
    "depthwise_gradient",
    "gaussian_gather",
    "gaussian_spread",
    "inline_attention",
    "inline_attention_gradient",
    "learns",
    "linear_attention",
    "linear_attention_gradient",
    "local_branch",
    "missing",
    "newton_inverse",
    "newton_inverse_gradient",
    "polar_attention",
    "pool",
    "pool_gradient",
    "with_gradient",
]
