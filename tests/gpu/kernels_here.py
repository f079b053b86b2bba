"""Whether the Triton kernels run here, on what, and how near their results must come; see test_triton."""

from importlib.metadata import version

import pytest
import torch

from subquad.kernels import unavailable
from subquad.kernels.triton import INTERPRETED


def release(package):
    """Major and minor version."""
    return tuple(map(int, version(package).split(".")[:2]))


def why_not():
    """Why nothing can be tested here, if so."""
    if not INTERPRETED:
        return unavailable("triton")
    # loops of Triton 3.6's interpreter take numbers from arrays as numpy does no more
    if release("triton") < (3, 7) and release("numpy") >= (2, 4):
        return "this interpreter needs an older numpy"
    return unavailable("triton")


needs_kernels = pytest.mark.skipif(why_not() is not None, reason=f"no kernels: {why_not()}")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# numpy, which interprets, has no bf16
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def relative_error(one, other):
    """How far a tensor is from another in float64, against the size of the other."""
    one, other = one.detach().double(), other.detach().double()
    return (one - other).norm() / other.norm().clamp(min=1e-3)
