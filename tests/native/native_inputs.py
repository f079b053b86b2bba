"""Grids and tokens that the kernels are tried on, and the mechanisms that have none."""

import torch

from subquad import ATTENTION, TokenGrid
from subquad.kernels import OPERATORS

GRIDS = [TokenGrid(5, 5), TokenGrid(14, 9, 1), TokenGrid(3, 22, 5), TokenGrid(1, 23), TokenGrid(17, 19)]
# a mechanism whose core is an operator has kernels for all its parts
WITHOUT = {name for name in ATTENTION if f"{name}_attention" not in OPERATORS}


def projected(*shape, count=1):
    """Tokens (b, h, n, d) as views of one fused projection."""
    b, h, n, d = shape
    return torch.randn(b, n, count, h, d).permute(2, 0, 3, 1, 4).unbind(0)
