"""Fused kernels for the CPU, in C++: what eager PyTorch does in several passes over memory, in one or two.

Forward only, fp32. `subquad.backends` decides when they are used; the operators are those of `torch.ops.subquad`.
"""

from subquad.native.library import missing
from subquad.native.operators import (
    agent_attention,
    convolve_windows,
    gaussian_gather,
    gaussian_spread,
    inline_attention,
    linear_attention,
    local_branch,
    newton_inverse,
    polar_attention,
    pool,
)

__all__ = [
    "agent_attention",
    "convolve_windows",
    "gaussian_gather",
    "gaussian_spread",
    "inline_attention",
    "linear_attention",
    "local_branch",
    "missing",
    "newton_inverse",
    "polar_attention",
    "pool",
]
