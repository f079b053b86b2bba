"""InLine attention: linear, injective, normalised by subtraction; and a local branch whose kernel the image predicts.

Cost 2 n d² a head and 9 n c for the branch. Han et al. 2024, arXiv 2412.06590, eq. 5-6.
"""

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from subquad.attention.bricks import head_dim, values_on
from subquad.grid import TokenGrid
from subquad.ops import inline_attention, inline_weights
from subquad.ops.padding import zero_padding


class InLineAttention(nn.Module):
    """`local` adds to the map's tokens a depthwise 3×3 of the values whose taps an MLP predicts for each image."""

    inputs = ("q", "k", "v", "x", "padding")

    def __init__(self, dim: int, num_heads: int, *, grid: TokenGrid, kv_grid: TokenGrid, local: bool = True) -> None:
        super().__init__()
        head_dim(dim, num_heads)
        self.num_heads = num_heads
        self.local = LocalKernel(dim, num_heads) if local else None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        padding: Tensor | None = None,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
    ) -> Tensor:
        y = inline_attention(q, k, v, padding)
        if self.local is None:
            return y
        # padding describes the keys: where queries stand on another grid, none of them is absent
        absent = padding if grid == kv_grid else None
        values = values_on(grid, kv_grid, zero_padding(v, padding))
        return y + grid.to_heads(filter_map(values, self.local(x, absent)), self.num_heads)

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        x: Tensor | None = None,
        padding: Tensor | None = None,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
    ) -> Tensor:
        return inline_weights(q, k, padding)[:, :, None]


class LocalKernel(nn.Module):
    """Nine taps for each channel from the mean token: an MLP per head, x (b, n, c) -> (b, c, 3, 3)."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv1d(dim, dim, 1, groups=num_heads)
        self.fc2 = nn.Conv1d(dim, 9 * dim, 1, groups=num_heads)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        if padding is None:
            mean = x.mean(dim=1)
        else:
            present = ~padding[..., None]
            mean = (x * present).sum(dim=1) / present.sum(dim=1).clamp(min=1)
        taps = self.fc2(F.gelu(self.fc1(mean[..., None])))
        return rearrange(taps, "b (c i j) 1 -> b c i j", i=3, j=3)


def filter_map(image: Tensor, kernels: Tensor) -> Tensor:
    """Depthwise 3×3 of (b, c, y, x) with a kernel for each image and channel (b, c, 3, 3), zeros outside.

    All images become channels of one: on the CPU 4 to 8 times faster than nine shifted products.
    """
    channels = rearrange(image, "b c y x -> 1 (b c) y x")
    filters = rearrange(kernels, "b c i j -> (b c) 1 i j")
    filtered = F.conv2d(channels, filters, padding=1, groups=channels.shape[1])
    return rearrange(filtered, "1 (b c) y x -> b c y x", c=image.shape[1])
