"""Fused kernels for the CPU, in C++: what eager PyTorch does in several passes over memory, in one or two.

In fp32; some have gradients. `subquad.backends` decides when they are used.
"""

import sys

import torch

from subquad.native import cores, places
from subquad.native.calls import WHERE
from subquad.native.library import missing as not_built

DEVICES = ("cpu",)
DTYPES = (torch.float32,)


def most_channels() -> int:
    """Of a head: any number."""
    return sys.maxsize


def missing() -> str | None:
    """Why these kernels can't run here, in one line; None where they can."""
    return not_built() if WHERE else "TRITON_INTERPRET is set, and Triton's interpreter computes in their place"


__all__ = ["DEVICES", "DTYPES", "cores", "missing", "most_channels", "places"]
