"""How MLLA's and H-ViT³'s pyramids embed images and halve maps: convolutions with batch norm, which round up."""

import torch.nn.functional as F
from torch import Tensor, nn

from subquad.errors import SubquadError

STEM_STRIDES = {4: (2, 2), 2: (2, 1), 1: (1, 1)}
"""Of a stem's two convolutions that may halve the map, by the size of a patch: 4 as published."""


class ConvNorm(nn.Module):
    """A convolution without bias and a batch norm: (b, c_in, y, x) to (b, c, y / stride, x / stride), rounded up."""

    def __init__(self, in_chans: int, dim: int, kernel_size: int, *, stride: int = 1, bias: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_chans, dim, kernel_size, stride=stride, padding=kernel_size // 2, bias=bias)
        self.norm = nn.BatchNorm2d(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class Downsample(nn.Module):
    """Half as many rows and columns of another width, through four times that width: (b, c_in, y, x) to (b, c, …)."""

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.widen = nn.Conv2d(in_dim, 4 * dim, 1)
        self.halve = nn.Conv2d(4 * dim, 4 * dim, 3, stride=2, padding=1, groups=4 * dim)
        self.narrow = ConvNorm(4 * dim, dim, 1, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.relu(self.widen(x), inplace=True)
        return self.narrow(F.relu(self.halve(wide), inplace=True))


def stem_strides(patch_size: int) -> tuple[int, int]:
    """The strides of a stem's two convolutions that may halve the map."""
    if patch_size not in STEM_STRIDES:
        raise SubquadError(f"this network's stem makes patches of 4, 2 or 1 px, not of {patch_size}")
    return STEM_STRIDES[patch_size]
