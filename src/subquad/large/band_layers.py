"""Layers that look beyond a token, made to see the bands beside: parameters and names stay what they were."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from subquad import spread


class BandConv2d(nn.Conv2d):
    """A convolution of a map of which this process holds a band of rows, whole strides of them but for the last band.

    It is told rows by `subquad.spread`; where nobody has any it is the convolution that it was.
    """

    def forward(self, x: Tensor) -> Tensor:
        exchange = spread.current()
        above, below = rows_beside(self)
        if exchange is None or not (above or below):
            return super().forward(x)
        x = exchange.with_borders(x, above, below)
        if exchange.is_last:
            # what the whole map has at its end
            x = F.pad(x, (0, 0, 0, above - below))
        return F.conv2d(x, self.weight, self.bias, self.stride, (0, int(self.padding[1])), self.dilation, self.groups)


def rows_beside(conv: nn.Conv2d) -> tuple[int, int]:
    """How many rows above and below a band a convolution looks at."""
    above, reach = int(conv.padding[0]), conv.dilation[0] * (conv.kernel_size[0] - 1) + 1
    return above, max(reach - conv.stride[0] - above, 0)


class BandDropPath(DropPath):
    """Stochastic depth: what the first process draws holds for all that hold the image."""

    def forward(self, x: Tensor) -> Tensor:
        exchange = spread.current()
        if exchange is None or not self.training or self.drop_prob == 0:
            return super().forward(x)
        keep = 1 - self.drop_prob
        drawn = x.new_empty((len(x),) + (1,) * (x.dim() - 1)).bernoulli_(keep)
        with torch.no_grad():
            (kept,) = exchange.sums([drawn if exchange.index == 0 else torch.zeros_like(drawn)])
        kept = kept.to(x.dtype)
        return x * (kept / keep if self.scale_by_keep else kept)


IN_BANDS: dict[type[nn.Module], type[nn.Module]] = {nn.Conv2d: BandConv2d, DropPath: BandDropPath}
"""What stands in for which class of layers."""


def see_beside(modules: Iterable[nn.Module]) -> None:
    """Make every layer of a class of `IN_BANDS` what stands in for it, in place."""
    for module in modules:
        if (new := IN_BANDS.get(type(module))) is not None:
            module.__class__ = new
