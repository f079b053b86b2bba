"""Attention layers of transformers' RF-DETR and LW-DETR, whose tokens come in the order of windows.

Robinson et al. 2025, arXiv 2511.09554; Chen et al. 2024, arXiv 2406.03459. Most blocks see windows, which they are
handed as images; in the others the tokens of an image's windows follow one another, each window's class token with
them. Only these are converted: windows are cheap as they are.

Letters: b batch, n tokens of an image, c channels.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.conversion.families.transformers_attention import TransformersAttention
from subquad.grid import TokenGrid


class WindowedTokensAttention(TransformersAttention):
    """Puts tokens in the order of the map, and back.

    Attributes:
        side: windows in a row of them, and rows.
    """

    others_see: ClassVar[str | None] = "windows"
    in_front_of_windows: ClassVar[int] = 0

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        self.side = self.side_of(original)

    @classmethod
    def side_of(cls, original: Any) -> int:
        """Windows in a row of them."""
        return int(original.config.num_windows_side)

    @classmethod
    def tokens_beside(cls, original: nn.Module, number: int) -> int:
        # the embedding's are those of one window
        return cls.in_front_of_windows * (cls.side_of(original) ** 2 - 1)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        order = self.order(self.grid_under(hidden_states), hidden_states.device)
        y, weights = super().forward(hidden_states.index_select(1, order), *args, **kwargs)
        return y.index_select(1, order.argsort()), weights

    def window_of(self, grid: TokenGrid) -> tuple[int, int]:
        """Rows and columns of a window."""
        return grid.height // self.side, grid.width // self.side

    def order(self, grid: TokenGrid, device: torch.device) -> Tensor:
        """(n,), where the tokens of an image stand among those of its windows: class tokens first, then the map's."""
        rows, columns = self.window_of(grid)
        front = self.in_front_of_windows
        windows = torch.arange(grid.num_tokens, device=device).view(self.side**2, front + rows * columns)
        of_map = windows[:, front:].reshape(self.side, self.side, rows, columns).transpose(1, 2)
        return torch.cat([windows[:, :front].flatten(), of_map.flatten()])


class LwDetrAttention(WindowedTokensAttention):
    """LW-DETR's, without class tokens."""

    replaces = ("transformers.models.lw_detr.modeling_lw_detr.LwDetrViTAttention",)

    @classmethod
    def is_target(cls, original: nn.Module, block: Any, number: int) -> bool:
        return not block.window


class RfDetrAttention(WindowedTokensAttention):
    """RF-DETR's, a DINOv2 with a class token in each window."""

    replaces = ("transformers.models.rf_detr.modeling_rf_detr.RfDetrDinov2Attention",)
    in_front_of_windows: ClassVar[int] = 1

    @classmethod
    def side_of(cls, original: Any) -> int:
        return int(original.config.num_windows)

    @classmethod
    def is_target(cls, original: nn.Module, block: Any, number: int) -> bool:
        return bool(block.global_attention)

    def window_of(self, grid: TokenGrid) -> tuple[int, int]:
        # transformers cuts oblong maps as if their sides were exchanged
        rows, columns = super().window_of(grid)
        return columns, rows
