"""SOFT: softmax-free attention, a Gaussian kernel through a few landmarks. One projection is query and key at once.

Cost n m d + m³ a head with m landmarks. Lu et al. 2021, arXiv 2110.11945.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from subquad import spread
from subquad.attention.bricks import LocalConv, finish, head_dim, is_plain, silence
from subquad.attention.key_removal import cut
from subquad.attention.refusing import refuse
from subquad.attention.traits import Traits
from subquad.errors import unknown_name
from subquad.grid import TokenGrid
from subquad.ops import INVERSES, convolve_windows, soft_attention, soft_weights
from subquad.ops.at_once import soft_at_once
from subquad.ops.map_formulas import fill_window
from subquad.ops.padding import zero_padding
from subquad.ranges import Positive, checks_arguments


class SoftAttention(nn.Module):
    """`ratio` is the side of a landmark's window, `kernel_size` that of the local branch, one kernel a head.

    By default the window is as large as the construction grid needs for at most 49 landmarks (8, 4, 2 at the published
    56², 28², 14²), and the kernel goes with it (9, 5, 3). The window stays: a larger grid at a call has more landmarks.
    `inverse`, `newton_steps` and `gradient` say how the landmarks' kernel is inverted, see `soft_attention`.
    """

    inputs = ("q", "v", "padding")
    traits = Traits(
        label="SOFT",
        pools=True,
        key_removal=cut,
        start_quietly=lambda new: start_soft(new),
        refuses={"kv_grid": "its keys are its queries; keep them on one grid"},
        in_hosts={"softnet": {"ratio": (8, 4, 2, 1), "kernel_size": (9, 5, 3, 3)}},
        spreads=True,
        no_streaming="its landmarks grow in number with the image, and are no state of a fixed size",
        colour="#c28a00",
    )

    @checks_arguments
    def __init__(
        self,
        dim: Positive,
        num_heads: Positive,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
        ratio: Positive | None = None,
        local: bool = True,
        kernel_size: Positive | None = None,
        inverse: str = "ridge",
        newton_steps: Positive = 20,
        gradient: str = "steps",
    ) -> None:
        super().__init__()
        if inverse not in INVERSES:
            raise unknown_name("inverse", inverse, INVERSES)
        if gradient not in ("steps", "inverse"):
            raise unknown_name("gradient", gradient, ("steps", "inverse"))
        self.inverse, self.newton_steps, self.gradient = inverse, newton_steps, gradient
        refuse(self, grid=grid, kv_grid=kv_grid)
        width = head_dim(dim, num_heads)
        self.num_heads = num_heads
        self.window = landmark_window(grid, ratio)
        self.landmark = nn.Conv2d(width, width, self.window, stride=self.window, bias=False)
        self.landmark_norm = nn.LayerNorm(width, eps=1e-5)
        if kernel_size is None:
            kernel_size = min(9, 2 * (max(2, *self.window) // 2) + 1)
        self.local = LocalConv(num_heads, width, kernel_size, filters="head", bias=False) if local else None

    def forward(
        self, q: Tensor, v: Tensor, padding: Tensor | None = None, *, grid: TokenGrid, kv_grid: TokenGrid
    ) -> Tensor:
        grid.check(q)
        refuse(self, grid=grid, kv_grid=kv_grid)
        if padding is None and self.inverse == "ridge":
            whole = self._at_once(q, v, grid)
            if whole is not None:
                return whole
        landmarks, idle = self.landmarks(q, padding, grid)
        y = soft_attention(
            q,
            landmarks,
            v,
            padding,
            idle,
            inverse=self.inverse,
            steps=self.newton_steps,
            gradient=self.gradient,
            scale=soft_scale(q),
        )
        return finish(self.local, y, v, grid=grid, kv_grid=kv_grid, padding=padding)

    def _at_once(self, q: Tensor, v: Tensor, grid: TokenGrid) -> Tensor | None:
        local, norm = self.local, self.landmark_norm
        if not (is_plain(local, LocalConv) and is_plain(norm, nn.LayerNorm) and is_plain(self.landmark, nn.Conv2d)):
            return None
        return soft_at_once(
            q,
            v,
            self.landmark.weight,
            norm.weight,
            norm.bias,
            local.weight,
            local.bias,
            steps=self.newton_steps,
            scale=soft_scale(q),
            norm_eps=norm.eps,
            grid=grid,
            filters=local.filters,
        )

    def weights(self, q: Tensor, padding: Tensor | None = None, *, grid: TokenGrid, kv_grid: TokenGrid) -> Tensor:
        grid.check(q)
        refuse(self, grid=grid, kv_grid=kv_grid)
        landmarks, idle = self.landmarks(q, padding, grid)
        weights = soft_weights(
            q * soft_scale(q), landmarks, padding, idle, inverse=self.inverse, steps=self.newton_steps
        )
        return weights[:, :, None]

    def landmarks(self, q: Tensor, padding: Tensor | None, grid: TokenGrid) -> tuple[Tensor, Tensor | None]:
        """Landmarks (b, h, m, d) of queries, which are scaled here, and which of them saw nothing but padding (b, m).

        Rows and columns that fill no window are left out, as published; a grid smaller than one window is filled up.
        """
        tokens = self._of_windows(zero_padding(q, padding), grid) * soft_scale(q)
        tokens = F.gelu(self.landmark_norm(tokens))
        if padding is None:
            return tokens, None
        present = fill_window(grid.to_map((~padding)[:, None, :, None].to(q.dtype)), self.window)
        return tokens, F.max_pool2d(present, self.window, self.window).flatten(1) == 0

    def _of_windows(self, q: Tensor, grid: TokenGrid) -> Tensor:
        """What `landmark` makes of each head's map: (b, h, m, d) of (b, h, n, d)."""
        if spread.is_spread() or is_plain(self.landmark, nn.Conv2d):
            return convolve_windows(q, self.landmark.weight, grid)
        # somebody listens, or it computes more than its weight says
        heads = rearrange(fill_window(grid.to_map(q), self.window), "b (h d) y x -> (b h) d y x", h=q.shape[1])
        return rearrange(self.landmark(heads), "(b h) d y x -> b h (y x) d", h=q.shape[1])


def start_soft(new: Any) -> None:
    """Let landmarks be the means of their windows, and the local branch add nothing."""
    landmark = new.landmark
    silence(new.local)
    with torch.no_grad():
        count = math.prod(landmark.kernel_size)
        taps = torch.eye(landmark.out_channels, device=landmark.weight.device)[..., None, None] / count
        landmark.weight.copy_(taps.expand_as(landmark.weight))


def soft_scale(q: Tensor) -> float:
    """What tokens (…, d) are multiplied by: d^-¼, so that squared distances have the usual d^-½."""
    return q.shape[-1] ** -0.25


def landmark_window(grid: TokenGrid, ratio: int | None, *, most: int = 49) -> tuple[int, int]:
    """The (height, width) of a landmark's window: `ratio` squared tokens, in a row on a grid of one row."""
    if grid.height == 1:
        length = math.ceil(grid.width / most) if ratio is None else ratio**2
        return 1, length
    if ratio is not None:
        return ratio, ratio
    side = math.ceil(math.sqrt(grid.num_places / most))
    return min(side, grid.height), min(side, grid.width)
