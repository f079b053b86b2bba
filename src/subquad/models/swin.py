"""Swin, a pyramid of windows: tokens attend within a window, every second block shifts the windows.

Swin Transformer, Liu et al. 2021, arXiv 2103.14030. A window of None is the whole grid: what linear mechanisms get.
"""

from collections.abc import Sequence

from einops import rearrange
from torch import Tensor, nn

from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.models.backbone import Backbone, grids_of, least_for
from subquad.models.layers import Block, Mechanism, SelfAttention, move_tables
from subquad.models.stages import ConvEmbed, Stage, by_stage, drop_path_rates, fill_up
from subquad.models.windows import Windows, attend_in_windows, window_of, windows_of
from subquad.ranges import Count, DropRate, Positive, Ratio, checks_arguments


class Swin(Backbone):
    """A pyramid whose width doubles from stage to stage.

    Args:
        attention: the mechanism of each block.
        depths: blocks of each stage.
        window_size: of each block, tokens on a side; None for the whole grid.
        shift: whether every second block of a stage shifts its windows.
        embed_dim: channels of the first stage.
        num_heads: heads of each stage's blocks.
        qkv_bias: whether the projection to queries, keys and values has a bias.
        fixed_windows: whether windows keep their size on a smaller grid, which is filled up to them, and shift along
            both axes always, as in the released dense networks.
    """

    layout = "swin"

    @checks_arguments
    def __init__(
        self,
        attention: Sequence[Mechanism],
        *,
        depths: Sequence[Positive],
        window_size: Sequence[Positive | None],
        shift: bool = True,
        img_size: tuple[Positive, Positive] = (224, 224),
        patch_size: Positive = 4,
        in_chans: Positive = 3,
        num_classes: Count = 1000,
        embed_dim: Positive = 96,
        num_heads: Sequence[Positive] = (3, 6, 12, 24),
        mlp_ratio: Ratio = 4,
        qkv_bias: bool = True,
        fixed_windows: bool = False,
        global_pool: str = "avg",
        drop_rate: DropRate = 0,
        drop_path_rate: DropRate = 0,
    ) -> None:
        dims = [embed_dim * 2**s for s in range(len(depths))]
        mechanisms, windows = by_stage(attention, depths), by_stage(window_size, depths)
        rates = drop_path_rates(drop_path_rate, depths)
        stages = []
        for s, grid in enumerate(grids_of(img_size, patch_size, len(depths))):
            blocks = [
                Block(
                    dims[s],
                    WindowAttention(
                        dims[s],
                        num_heads[s],
                        mechanism,
                        grid=grid,
                        window_size=window,
                        shifted=shift and j % 2 == 1,
                        qkv_bias=qkv_bias,
                        fixed=fixed_windows,
                    ),
                    mlp_ratio=mlp_ratio,
                    drop=drop_rate,
                    drop_path=rates[s][j],
                    eps=1e-5,
                )
                for j, (mechanism, window) in enumerate(zip(mechanisms[s], windows[s], strict=True))
            ]
            embed = ConvEmbed(in_chans, embed_dim, patch_size, patch_size) if s == 0 else PatchMerging(dims[s - 1])
            stages.append(Stage(embed, blocks, dims[s], grid=grid, drop_rate=drop_rate if s == 0 else 0))
        super().__init__(
            stages,
            dims,
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            norm=nn.LayerNorm(dims[-1], eps=1e-5),
            global_pool=global_pool,
            drop_rate=drop_rate,
        )

    @property
    def least_size(self) -> int:
        return least_for(
            [(block.attn.window_size or 1 for block in stage.blocks) for stage in self.stages], self.patch_size
        )

    @staticmethod
    def default_reach(img_size: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        """Where attention is quadratic, each stage's default: 7 at 224 px, 9 at 288, 12 at 384, as published."""
        return {"window_size": (max(7, min(img_size) // 32),) * 4}


class PatchMerging(nn.Module):
    """Four neighbours become one token of twice the width: (b, c, y, x) to (b, 2c, y / 2, x / 2), rounded up."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim, eps=1e-5)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # the order of the released weights: down the first column of the four, then the second
        fours = rearrange(fill_up(x, 2), "b c (y j) (x i) -> b y x (i j c)", j=2, i=2)
        return self.reduction(self.norm(fours)).permute(0, 3, 1, 2)


class WindowAttention(SelfAttention):
    """Tokens attend within windows of `window_size` on a side, cut by the grid; None is one window, the whole grid.

    `shifted` moves the windows by half their size, along the axes that hold more than one of them; tokens that the
    shift brings together from opposite borders do not attend to each other. `fixed` windows keep their size on a
    smaller grid, and shift along both axes.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        attention: Mechanism,
        *,
        grid: TokenGrid,
        window_size: int | None = None,
        shifted: bool = False,
        qkv_bias: bool = True,
        fixed: bool = False,
    ) -> None:
        if window_size is not None and window_size < 1:
            raise SubquadError(f"a window needs at least one token on a side, got window_size {window_size}")
        super().__init__(dim, num_heads, attention, grid=window_of(grid, window_size, fixed=fixed), qkv_bias=qkv_bias)
        self.window_size, self.fixed = window_size, fixed
        self.shifted = shifted and window_size is not None
        if self.shifted and "mask" not in self.inner.inputs:
            raise SubquadError(
                f"shifted windows of {window_size}×{window_size} need a mechanism that honours a mask of pairs, and "
                f"{type(self.inner).__name__} has none: use window_size=None (the whole grid) or shift=False"
            )

    def forward(  # type: ignore[override]
        self, x: Tensor, *, grid: TokenGrid, padding: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        windows = self.windows_on(grid)
        if windows is None:
            return super().forward(x, grid=grid, padding=padding, mask=mask)
        if padding is not None or mask is not None:
            raise SubquadError(f"windows of {windows.window} take no padding and no mask of the whole grid of {grid}")
        return attend_in_windows(x, windows, super().forward)

    def is_plain_on(self, grid: TokenGrid) -> bool:
        """Where one window is the whole grid."""
        return self.windows_on(grid) is None

    def windows_on(self, grid: TokenGrid) -> Windows | None:
        return windows_of(grid, self.window_size, shifted=self.shifted, fixed=self.fixed)

    def regrid(self, old: TokenGrid, new: TokenGrid) -> None:
        before, now = (window_of(grid, self.window_size, fixed=self.fixed) for grid in (old, new))
        move_tables(self.inner, {before: now})
