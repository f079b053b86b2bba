"""The exchange of `subquad.spread` over a channel of processes: sums and borders with gradients, and what they cost.

The gradient of a sum over processes is the sum of their gradients, that of a row that was sent goes back to where it
came from. What each process gets is the gradient of all processes' losses together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from subquad.grid import BandGrid, TokenGrid
from subquad.large.processes import Channel
from subquad.spread import Part


@dataclass
class Traffic:
    """What one process handed over, in both directions of a pass: messages and bytes, by what they were for."""

    sums: int = 0
    sum_bytes: int = 0
    borders: int = 0
    border_bytes: int = 0


class BandExchange:
    """A process's end of it; `traffic` counts, until it is set anew."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.traffic = Traffic()

    @property
    def index(self) -> int:
        """Which band this process holds, from the top."""
        return self.channel.index

    @property
    def is_last(self) -> bool:
        """Whether it is the last band."""
        return self.index == self.channel.count - 1

    @torch.compiler.disable
    def sums(self, parts: Sequence[Part]) -> tuple[Tensor, ...]:
        """Each part, in its dtype, summed over processes in one message, in fp32 at least, with gradients."""
        tensors = [part for part in parts if isinstance(part, Tensor)]
        dtype = torch.float32
        for tensor in tensors:
            dtype = torch.promote_types(dtype, tensor.dtype)
        like = tensors[0] if tensors else torch.empty(0)
        flat = [
            part.flatten().to(dtype) if isinstance(part, Tensor) else like.new_full((1,), part, dtype=dtype)
            for part in parts
        ]
        summed = _Sum.apply(torch.cat(flat), self).split([len(part) for part in flat])
        return tuple(
            of_all.view(part.shape).to(part.dtype) if isinstance(part, Tensor) else of_all[0]
            for of_all, part in zip(summed, parts, strict=True)
        )

    @torch.compiler.disable
    def largest(self, x: Tensor) -> Tensor:
        """The largest of all processes for each entry, without gradients."""
        most = x.detach().clone(memory_format=torch.contiguous_format)
        self.traffic.sums += 1
        self.traffic.sum_bytes += most.nbytes
        self.channel.largest(most)
        return most

    @torch.compiler.disable
    def with_borders(self, image: Tensor, above: int, below: int) -> Tensor:
        """A map (b, c, y, x) with the last rows of the band above and the first ones of that below, with gradients."""
        return _Borders.apply(image, above, below, self)

    @torch.compiler.disable
    def grid_of(self, image: Tensor, prefix: int) -> TokenGrid:
        """The grid of a band (b, c, y, x) of a map that has `prefix` tokens in front."""
        height, width = image.shape[-2:]
        heights = self.channel.gather([height], image)
        return BandGrid.cut(tuple(height for (height,) in heights), self.index, width, prefix)

    def __deepcopy__(self, memo: object) -> "BandExchange":
        return self

    def add(self, x: Tensor) -> Tensor:
        """The sum over processes of a tensor that nobody else reads, in place."""
        self.traffic.sums += 1
        self.traffic.sum_bytes += x.nbytes
        self.channel.add(x)
        return x

    def swap(self, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        """As the channel's, counted."""
        self.traffic.borders += 1
        self.traffic.border_bytes += up.nbytes * (self.index > 0)
        self.traffic.border_bytes += down.nbytes * (self.index < self.channel.count - 1)
        return self.channel.swap(up, down)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: BandExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.add(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.exchange), None


class _Borders(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, above: int, below: int, exchange: BandExchange) -> Tensor:
        ctx.exchange, ctx.above, ctx.below = exchange, above, below
        height = image.shape[2]
        # the first and the last band may be lower than what is asked of them: beyond the map lie zeros
        first = F.pad(image[:, :, :below], (0, 0, 0, max(below - height, 0)))
        last = F.pad(image[:, :, max(height - above, 0) :], (0, 0, max(above - height, 0), 0))
        from_above, from_below = exchange.swap(first, last)
        return torch.cat([from_above, image, from_below], dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        height = grad.shape[2] - ctx.above - ctx.below
        above, own, below = grad.split([ctx.above, height, ctx.below], dim=2)
        of_first, of_last = ctx.exchange.swap(above.contiguous(), below.contiguous())
        own = own.clone()
        own[:, :, : ctx.below] += of_first[:, :, :height]
        own[:, :, max(height - ctx.above, 0) :] += of_last[:, :, max(ctx.above - height, 0) :]
        return own, None, None, None
