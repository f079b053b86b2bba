"""Swin's layers of other libraries: a quadratic mechanism stays in their windows, any other sees the whole map.

Where libraries shift and cut windows in the block, a class stands for a block, not for an attention layer. As in
Agent-Swin (arXiv 2312.08874), what is not quadratic has no windows, no shift and no relative bias.

Letters: b batch, h heads, n tokens, d channels of a head, c = h·d channels, y x rows and columns, r l windows.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.conversion.converted_attention import ConvertedAttention, Mechanism, channels_into, is_quadratic
from subquad.conversion.families.pair_biases import with_bias
from subquad.grid import TokenGrid
from subquad.inference.foreign_halves import KnowsFewSteps, three
from subquad.kernels import replayed
from subquad.models.layers import move_tables
from subquad.models.windows import Windows

BIAS = "relative_position_bias_table"


class Parts(nn.ModuleDict):
    """Modules, and tensors beside them that it is called for: who lends tensors, as accelerate does, hears of calls."""

    def forward(self, *names: str) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, name, None) for name in names)


class WindowedAttention(ConvertedAttention):
    """Attention in windows of maps (b, y, x, c), or on all of a map.

    Attributes:
        pads_first: whether maps are filled up to whole windows before they are shifted, or behind that.
    """

    host: ClassVar[str] = "swin"
    pads_first: ClassVar[bool] = False

    # what a family says of its layers, beside `sizes` and `forward`

    def window_of(self, original: Any) -> tuple[int, int]:
        """Height and width of the windows."""
        return original.window_size

    def shift_of(self, original: Any) -> tuple[int, int]:
        """Rows and columns that the map is shifted by."""
        return original.shift_size

    def heads_of(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (b, h, n, d) of tokens (b, n, c)."""
        raise NotImplementedError

    def bias(self, window: TokenGrid) -> Tensor:
        """The relative bias (h, n, n) of a window."""
        raise NotImplementedError

    def project(self, tokens: Tensor) -> Tensor:
        """Mixed tokens (b, n, c) through the layer's output projection."""
        raise NotImplementedError

    # what they share

    def make_inner(self, original: Any, mechanism: Mechanism, grid: TokenGrid) -> Any:
        self.grid = grid
        windowed = is_quadratic(mechanism)
        self.window = TokenGrid(*self.window_of(original)) if windowed else None
        down, right = self.shift_of(original)
        self.shift = (down, right)
        if windowed:
            # the relative bias is that of the layer
            mechanism = without_bias(mechanism)
        return super().make_inner(original, mechanism, self.window or grid)

    def attended(self, image: Tensor, shifted: bool = True) -> Tensor:
        """A map (b, y, x, c) through the attention layer, in windows that may be `shifted` where the layer's are."""
        grid = TokenGrid(image.shape[1], image.shape[2])
        windows = self.windows_on(grid, shifted)
        if windows is None:
            return self._attend(image.flatten(1, 2), grid).view_as(image)
        mask = windows.mask(image.shape[0], image.device)
        return windows.scatter(self._attend(windows.gather(image), windows.window, mask))

    def windows_on(self, grid: TokenGrid, shifted: bool = True) -> Windows | None:
        """The layer's windows on a map, whose fillings take part; None where it has none."""
        if self.window is None:
            return None
        return Windows(grid, self.window, self.shift if shifted and any(self.shift) else None, self.pads_first)

    def _attend(self, tokens: Tensor, grid: TokenGrid, mask: Tensor | None = None) -> Tensor:
        """Tokens (b, n, c) to (b, n, c)."""
        q, k, v = self.heads_of(tokens)
        if self.window is not None:
            q, k, v = with_bias(q, k, v, self.bias(self.window))
        y = self.mix(q, k, v, tokens, grid=grid, mask=mask)
        return self.project(y.unflatten(-1, (self.num_heads, -1))[..., : self.width].flatten(2))


class WithTable(WindowedAttention):
    """A block whose layer `attn` has the parts of the authors' code: one projection, one behind, a table of biases.

    Attributes:
        names: of the parts of `attn` that are kept, beside its table.
    """

    names: ClassVar[tuple[str, ...]] = ("qkv", "proj", "proj_drop")
    attn: Parts

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.attn.num_heads, channels_into(original.attn.proj) // original.attn.num_heads

    def tokens_width(self, original: Any) -> int:
        return channels_into(original.attn.qkv)

    def projections(self, attention: Any) -> nn.Module:
        """What is kept of the attention layer, under its names; its biases where `self.window` is not None."""
        parts = Parts({name: getattr(attention, name) for name in self.names})
        if self.window is not None:
            carry(attention, parts, BIAS)
        return parts

    def heads_of(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(self.split, three([self.attn["qkv"](tokens)]))
        return q, k, v

    def bias(self, window: TokenGrid) -> Tensor:
        (table,) = self.attn(BIAS)
        return window_bias(table, window)

    def project(self, tokens: Tensor) -> Tensor:
        parts: Any = self.attn
        return parts["proj_drop"](parts["proj"](tokens))


class WindowedBlock(KnowsFewSteps, WindowedAttention):
    """A whole block, of libraries that shift and cut windows there.

    Attributes:
        layer_name: the name of the block's attention layer.
    """

    layer_name: ClassVar[str] = "attn"

    # what a family says of its blocks, beside that

    def projections(self, attention: Any) -> nn.Module:
        """What is kept of the attention layer, under its names; its biases where `self.window` is not None."""
        raise NotImplementedError

    def move_bias(self, move: Callable[[Any], None]) -> None:
        """Make the biases for other windows, as `move` does with those of a block of the old kind."""
        raise NotImplementedError

    def few_steps(self, x: Tensor, grid: TokenGrid) -> Tensor:
        """Tokens (b, n, c) of a map behind the block in evaluation, by kernels of few steps where there are some.

        Blocks with norms behind attention (v2) have none, and go the steps of their `forward`.
        """
        raise NotImplementedError

    # what they share

    @classmethod
    def grid_of(cls, original: Any, grid: TokenGrid) -> TokenGrid:
        return TokenGrid(*original.input_resolution)

    def kept(self, original: Any) -> Iterable[tuple[str, nn.Module | nn.Parameter]]:
        for name, part in super().kept(original):
            yield name, part if name != self.layer_name else self.projections(part)

    def replayed_on(self, x: Tensor, grid: TokenGrid, **settings: bool) -> Tensor:
        """What `few_steps` gives, as one call of the library where that is kernels alone."""
        few_steps: Callable[..., Tensor] = self.few_steps
        steps = partial(few_steps, grid=grid, **settings)
        y = replayed(self, "block", steps, x.contiguous(), settings=(grid, *settings.values()))
        assert y is not None
        return y

    def set_input_size(self, feat_size: tuple[int, int], window_size: Any, always_partition: Any = None) -> None:
        """What timm's `set_input_size` calls: windows and position parameters for another map, the old block's too."""
        original: Any = self.original
        sizes = {"feat_size": feat_size, "window_size": window_size, "always_partition": always_partition}
        old, self.grid = self.window or self.grid, TokenGrid(*feat_size)
        if self.window is not None:
            self.move_bias(lambda block: block.set_input_size(**sizes))
        original.set_input_size(**sizes)
        if self.window is not None:
            self.window = TokenGrid(*self.window_of(original))
        down, right = self.shift_of(original)
        self.shift = (down, right)
        move_tables(self.inner, {old: self.window or self.grid})


def without_bias(mechanism: Any) -> Mechanism:
    """A quadratic mechanism without a relative bias of its own."""
    if "relative_bias" not in getattr(mechanism, "keywords", {}):
        return mechanism
    return type(mechanism)(mechanism, relative_bias=False)


def window_bias(table: Tensor, window: TokenGrid) -> Tensor:
    """(h, n, n) of the tokens of a window, from a table ((2y - 1)·(2x - 1), h) of their distances."""
    rows = torch.arange(window.height, device=table.device).repeat_interleave(window.width)
    columns = torch.arange(window.width, device=table.device).repeat(window.height)
    down = rows[:, None] - rows[None, :] + window.height - 1
    right = columns[:, None] - columns[None, :] + window.width - 1
    return table[down * (2 * window.width - 1) + right].permute(2, 0, 1)


def continuous_bias(network: nn.Module, distances: Tensor, window: TokenGrid) -> Tensor:
    """Swin v2's bias (h, n, n), which a small network gives to logarithmic distances: arXiv 2111.09883, section 3.3."""
    table = network(distances).flatten(0, -2)
    return window_bias(16 * table.sigmoid(), window)


def as_cosines(q: Tensor, k: Tensor, logit_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Heads whose softmax attention has Swin v2's logits, cosines times a learned scale of at most 100."""
    scale = logit_scale.clamp(max=math.log(100)).exp()
    # attention divides by the root of the width
    return F.normalize(q, dim=-1) * (scale * q.shape[-1] ** 0.5), F.normalize(k, dim=-1)


def carry(attention: nn.Module, parts: nn.Module, name: str) -> None:
    """Copy a parameter, if there is one."""
    parameter = attention._parameters.get(name)
    if parameter is not None:
        parts.register_parameter(name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
