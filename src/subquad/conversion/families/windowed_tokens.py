"""Attention of RF-DETR (transformers', and the package `rfdetr`) and LW-DETR: tokens in the order of windows.

Robinson et al. 2025, arXiv 2511.09554; Chen et al. 2024, arXiv 2406.03459. Most blocks see windows, which they are
handed as images; in the others the tokens of an image's windows follow one another, each window's class token with
them. Only these are converted: windows are cheap as they are.

Letters: b batch, n tokens of an image, c channels.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.conversion.converted_attention import ConvertedAttention, Mechanism
from subquad.conversion.families.transformers_attention import TransformersAttention
from subquad.errors import SubquadError
from subquad.grid import TokenGrid


class InOrderOfWindows(ConvertedAttention):
    """Knows where tokens stand that come in the order of windows.

    Attributes:
        side: windows in a row of them, and rows.
        in_front_of_windows: tokens in front of those of each window.
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


class WindowedTokensAttention(InOrderOfWindows, TransformersAttention):
    """Puts tokens in the order of the map, and back."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        order = self.order(self.grid_under(hidden_states), hidden_states.device)
        y, weights = super().forward(hidden_states.index_select(1, order), *args, **kwargs)
        return y.index_select(1, order.argsort()), weights


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


class RoboflowBlock(InOrderOfWindows):
    """A whole block of the package `rfdetr`, as it is the block that knows of windows: each has a class token."""

    replaces: ClassVar[tuple[str, ...]] = (
        "rfdetr.models.backbone.dinov2_with_windowed_attn.WindowedDinov2WithRegistersLayer",
    )
    in_front_of_windows: ClassVar[int] = 1

    @classmethod
    def side_of(cls, original: Any) -> int:
        return int(original.num_windows)

    @classmethod
    def is_target(cls, original: nn.Module, block: Any, number: int) -> bool:
        return number not in block.config.window_block_indexes

    def sizes(self, original: Any) -> tuple[int, int]:
        layer = original.attention.attention
        return layer.num_attention_heads, layer.attention_head_size

    def make_inner(self, original: Any, mechanism: Mechanism, grid: TokenGrid) -> Any:
        if grid.prefix != self.side_of(original) ** 2:
            raise SubquadError("an RF-DETR with registers in its windows can't be converted")
        return super().make_inner(original, mechanism, grid)

    def forward(
        self, hidden_states: Tensor, output_attentions: bool = False, run_full_attention: bool = False
    ) -> tuple[Tensor, None]:
        if not run_full_attention:
            raise SubquadError(
                "a converted block of RF-DETR sees whole images, and is called for windows: convert the network after "
                "window_block_indexes are set"
            )
        of_image = hidden_states.unflatten(0, (-1, self.side**2)).flatten(1, 2)
        order = self.order(self.grid_under(of_image), of_image.device)
        x = self.through("norm1", of_image).index_select(1, order)
        attention: Any = self._modules["attention"]
        layer = attention.attention
        q, k, v = (self.split(project(x)) for project in (layer.query, layer.key, layer.value))
        y = attention.output(self.mix(q, k, v, x), x).index_select(1, order.argsort()).view(hidden_states.shape)
        y = hidden_states + self.through("drop_path", self.through("layer_scale1", y))
        of_tokens = self.through("layer_scale2", self.through("mlp", self.through("norm2", y)))
        return y + self.through("drop_path", of_tokens), None
