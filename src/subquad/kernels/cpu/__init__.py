"""Fused kernels for the CPU, in C++: what eager PyTorch does in several passes over memory, in one or two.

In fp32; some have gradients. `subquad.kernels.choosing` decides when they are used.
"""

import sys

import torch

from subquad.kernels.cpu import map_kernels, mixing_kernels
from subquad.kernels.cpu.library import missing as not_built
from subquad.kernels.cpu.passing import WHERE

DEVICES = ("cpu",)
DTYPES = (torch.float32,)


def most_channels() -> int:
    """Of a head: any number."""
    return sys.maxsize


def missing() -> str | None:
    """Why these kernels can't run here, in one line; None where they can."""
    return not_built() if WHERE else "TRITON_INTERPRET is set, and Triton's interpreter computes in their place"


__all__ = ["DEVICES", "DTYPES", "map_kernels", "missing", "mixing_kernels", "most_channels"]
