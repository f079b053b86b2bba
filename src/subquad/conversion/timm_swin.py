"""timm's Swin: a block in whose windows a quadratic mechanism stays, and in which any other sees the whole map.

timm shifts and cuts windows in the block, so that this stands for a block, not for an attention layer. As in Agent-Swin
(arXiv 2312.08874), what is not quadratic has no windows, no shift and no relative bias.

Letters: b batch, h heads, n tokens, d channels of a head, c = h·d channels, y x rows and columns, r l windows.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from subquad.conversion.converted_attention import ConvertedAttention, Mechanism, is_quadratic
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.models.layers import move_tables
from subquad.models.swin import border_mask

BIAS = "relative_position_bias_table"


class TimmSwinBlock(ConvertedAttention):
    """timm's block, (b, y, x, c) to (b, y, x, c)."""

    replaces: ClassVar[tuple[str, ...]] = ("timm.models.swin_transformer.SwinTransformerBlock",)
    host: ClassVar[str] = "swin"

    def check(self, original: Any) -> None:
        kind = type(original.attn)
        if f"{kind.__module__}.{kind.__qualname__}" != "timm.models.swin_transformer.WindowAttention":
            raise SubquadError(f"this Swin block has a {kind.__module__}.{kind.__qualname__}, which is not known here")

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.attn.num_heads, original.attn.proj.in_features // original.attn.num_heads

    def tokens_width(self, original: Any) -> int:
        return original.attn.proj.out_features

    @classmethod
    def grid_of(cls, original: Any, grid: TokenGrid) -> TokenGrid:
        return TokenGrid(*original.input_resolution)

    def make_inner(self, original: Any, mechanism: Mechanism, grid: TokenGrid) -> Any:
        self.grid = grid
        windowed = is_quadratic(mechanism)
        self.window = TokenGrid(*original.window_size) if windowed else None
        self.shift = tuple(original.shift_size)
        if windowed:
            # the relative bias is timm's own
            mechanism = without_bias(mechanism)
        return super().make_inner(original, mechanism, self.window or grid)

    def kept(self, original: Any) -> Iterable[tuple[str, nn.Module | nn.Parameter]]:
        for name, part in super().kept(original):
            yield name, part if name != "attn" else self._projections(part)

    def _projections(self, attention: Any) -> nn.Module:
        """What is kept of timm's window attention, under its names."""
        parts = nn.ModuleDict({name: getattr(attention, name) for name in ("qkv", "proj", "proj_drop")})
        if self.window is not None:
            bias = getattr(attention, BIAS)
            parts.register_parameter(BIAS, nn.Parameter(bias.detach().clone(), bias.requires_grad))
        return parts

    def forward(self, x: Tensor) -> Tensor:
        normed = self.through("norm1", x)
        y = self._whole(normed) if self.window is None else self._in_windows(normed, self.window)
        x = x + self.through("drop_path1", y)
        tokens = x.flatten(1, 2)
        return x + self.through("drop_path2", self.through("mlp", self.through("norm2", tokens))).view_as(x)

    def _whole(self, image: Tensor) -> Tensor:
        grid = TokenGrid(image.shape[1], image.shape[2])
        return self._attend(image.flatten(1, 2), grid).view_as(image)

    def _in_windows(self, image: Tensor, window: TokenGrid) -> Tensor:
        """Windows are shifted first and filled up then, as timm does; those of the last filled up take part."""
        height, width = image.shape[1:3]
        shifted = any(self.shift)
        if shifted:
            image = image.roll((-self.shift[0], -self.shift[1]), dims=(1, 2))
        image = F.pad(image, (0, 0, 0, -width % window.width, 0, -height % window.height))
        rows, columns = image.shape[1] // window.height, image.shape[2] // window.width
        mask = border_mask(rows, columns, window, self.shift, image.device) if shifted else None
        if mask is not None:
            mask = mask.repeat(len(image), 1, 1)[:, None]
        sizes = {"r": rows, "l": columns, "y": window.height, "x": window.width}
        y = self._attend(rearrange(image, "b (r y) (l x) c -> (b r l) (y x) c", **sizes), window, mask)
        image = rearrange(y, "(b r l) (y x) c -> b (r y) (l x) c", **sizes)[:, :height, :width]
        return image.roll(self.shift, dims=(1, 2)) if shifted else image

    def _attend(self, tokens: Tensor, grid: TokenGrid, mask: Tensor | None = None) -> Tensor:
        """Tokens (b, n, c) to (b, n, c)."""
        parts: Any = self.attn
        q, k, v = (self.split(part) for part in parts["qkv"](tokens).chunk(3, dim=-1))
        if self.window is not None:
            q, k, v = with_bias(q, k, v, window_bias(parts.get_parameter(BIAS), self.window))
        y = self.mix(q, k, v, tokens, grid=grid, mask=mask)
        y = y.unflatten(-1, (self.num_heads, -1))[..., : self.width].flatten(2)
        return parts["proj_drop"](parts["proj"](y))

    def set_input_size(self, feat_size: tuple[int, int], window_size: Any, always_partition: Any = None) -> None:
        """What timm's `set_input_size` calls: position parameters for another map.

        Raises:
            SubquadError: there are windows.
        """
        if self.window is not None:
            raise SubquadError("a converted Swin block keeps its windows: call set_input_size before subquad.convert")
        old, self.grid = self.grid, TokenGrid(*feat_size)
        move_tables(self.inner, {old: self.grid})


def without_bias(mechanism: Any) -> Mechanism:
    """A quadratic mechanism without a relative bias of its own."""
    if "relative_bias" not in getattr(mechanism, "keywords", {}):
        return mechanism
    return type(mechanism)(mechanism, relative_bias=False)


def window_bias(table: Tensor, window: TokenGrid) -> Tensor:
    """(h, n, n) of the tokens of a window, from timm's table ((2y - 1)·(2x - 1), h) of their distances."""
    rows = torch.arange(window.height, device=table.device).repeat_interleave(window.width)
    columns = torch.arange(window.width, device=table.device).repeat(window.height)
    down = rows[:, None] - rows[None, :] + window.height - 1
    right = columns[:, None] - columns[None, :] + window.width - 1
    return table[down * (2 * window.width - 1) + right].permute(2, 0, 1)


def with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads (b, h, n, d + n) whose softmax attention has a bias (h, n, n) on its logits.

    A query is followed by its bias to each key, a key by a one at its own place; values by zeros.
    """
    n = q.shape[2]
    longer = q.shape[-1] + n
    # softmax attention divides by the root of the width that it sees
    q = torch.cat([q * (longer / q.shape[-1]) ** 0.5, (bias * longer**0.5).expand(len(q), -1, -1, -1)], dim=-1)
    own = torch.eye(n, dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
    return q, torch.cat([k, own], dim=-1), F.pad(v, (0, n))
