"""Fused kernels for the CPU, in C++: what eager PyTorch does in several passes over memory, in one or two.

Tokens are fp32 or bf16, sums fp32; some have gradients.
"""

import os

import torch

from subquad.kernels.backends import Backend, register_backend
from subquad.kernels.cpu.library import missing as not_built

# in a process in which Triton's interpreter stands for a GPU, the CPU is its device
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def missing() -> str | None:
    """Why these kernels can't run here, in one line; None where they can."""
    return "TRITON_INTERPRET is set, and Triton's interpreter computes in their place" if INTERPRETED else not_built()


register_backend(
    Backend(
        "native",
        "C++ kernels for CPUs: fp32 and bf16",
        devices=("cpu",),
        dtypes=(torch.float32, torch.bfloat16),
        missing=missing,
        raises_half=True,
    )
)

# they need the backend
from subquad.kernels.cpu import (  # noqa: E402
    agents,  # noqa: F401
    grids,  # noqa: F401
    landmarks,  # noqa: F401
    layer_kernels,  # noqa: F401
    map_kernels,  # noqa: F401
    softmax_kernels,  # noqa: F401
    state_mixers,  # noqa: F401
    states,  # noqa: F401
)
