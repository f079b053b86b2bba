"""torchvision's Swin and Swin v2, whose attention layers cut windows out of maps (b, y, x, c) themselves.

Letters: b batch, h heads, n tokens, d channels of a head, c = h·d channels, y x rows and columns.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.conversion.converted_attention import channels_into
from subquad.conversion.families.map_attention import MapRecorder
from subquad.conversion.families.windowed_blocks import WindowedAttention, as_cosines, continuous_bias, window_bias
from subquad.conversion.grid_recorder import GridRecorder
from subquad.grid import TokenGrid
from subquad.inference.foreign_halves import three
from subquad.models.windows import Windows


class TorchvisionRecorder(MapRecorder):
    """Listens to networks that do not say which images they are made for, and take any."""

    usual_size = (224, 224)


class TorchvisionSwinAttention(WindowedAttention):
    """A table of biases; windows are not shifted along an axis that one of them fills.

    Attributes:
        buffers_of_windows: what the layer keeps of its windows beside parameters, as files of its weights have it.
        of_windows: names of what goes where there are no windows.
    """

    replaces: ClassVar[tuple[str, ...]] = ("torchvision.models.swin_transformer.ShiftedWindowAttention",)
    listener: ClassVar[type[GridRecorder]] = TorchvisionRecorder
    is_handed_maps: ClassVar[bool] = True
    pads_first: ClassVar[bool] = True
    buffers_of_windows: ClassVar[tuple[str, ...]] = ("relative_position_index",)
    of_windows: ClassVar[tuple[str, ...]] = ("relative_position_bias_table",)

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        self.dropout = original.dropout
        if self.window is not None:
            for name in self.buffers_of_windows:
                self.register_buffer(name, original.get_buffer(name).detach().clone())

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_heads, channels_into(original.proj) // original.num_heads

    def tokens_width(self, original: Any) -> int:
        return channels_into(original.qkv)

    def kept(self, original: nn.Module) -> Iterable[tuple[str, nn.Module | nn.Parameter]]:
        unused = self.of_windows if self.window is None else ()
        return ((name, part) for name, part in super().kept(original) if name not in unused)

    @classmethod
    def map_under(cls, x: Tensor) -> TokenGrid:
        return TokenGrid(x.shape[1], x.shape[2])

    def windows_on(self, grid: TokenGrid, shifted: bool = True) -> Windows | None:
        if self.window is None:
            return None
        rows, columns = Windows(grid, self.window).counts
        # the factor is 0 for one window and 1 for more
        down, right = (
            (1 - 1 // count) * moved if moved else 0 for count, moved in zip((rows, columns), self.shift, strict=True)
        )
        return Windows(grid, self.window, (down, right) if shifted and any(self.shift) else None, self.pads_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.attended(x)

    def heads_of(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(self.split, three([self.through("qkv", tokens)]))
        return q, k, v

    def bias(self, window: TokenGrid) -> Tensor:
        table = self.own_weight("relative_position_bias_table")
        assert table is not None
        return window_bias(table, window)

    def project(self, tokens: Tensor) -> Tensor:
        return F.dropout(self.through("proj", tokens), self.dropout, self.training)


class TorchvisionSwinV2Attention(TorchvisionSwinAttention):
    """Cosines of queries and keys, which have no bias, and biases of a small network: arXiv 2111.09883."""

    replaces: ClassVar[tuple[str, ...]] = ("torchvision.models.swin_transformer.ShiftedWindowAttentionV2",)
    buffers_of_windows: ClassVar[tuple[str, ...]] = ("relative_position_index", "relative_coords_table")
    of_windows: ClassVar[tuple[str, ...]] = ("cpb_mlp",)

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        own: Any = self.get_submodule("qkv")
        if own.bias is not None:
            _, of_keys, _ = own.bias.chunk(3)
            with torch.no_grad():
                # torchvision takes it away in every call
                of_keys.zero_()

    def heads_of(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads_of(tokens)
        scale = self.own_weight("logit_scale")
        assert scale is not None
        return *as_cosines(q, k, scale), v

    def bias(self, window: TokenGrid) -> Tensor:
        return continuous_bias(self.get_submodule("cpb_mlp"), self.get_buffer("relative_coords_table"), window)
