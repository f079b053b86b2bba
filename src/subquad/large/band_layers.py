"""Layers that look beyond a token, made to see the bands beside: parameters and names stay what they were.

They ask `subquad.spread`; where nobody holds other tokens they are the layers that they were.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from subquad import spread
from subquad.grid import rows_beside


class BandConv2d(nn.Conv2d):
    """A convolution of a map of which this process holds a band: whole strides of rows, but for the last band."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        exchange = spread.current()
        above, below = beside(self)
        if exchange is None or not (above or below):
            return super()._conv_forward(x, weight, bias)
        x = exchange.with_borders(x, above, below)
        if exchange.is_last:
            # what the whole map has at its end
            x = F.pad(x, (0, 0, 0, above - below))
        return F.conv2d(x, weight, bias, self.stride, (0, int(self.padding[1])), self.dilation, self.groups)


def beside(conv: nn.Conv2d) -> tuple[int, int]:
    """How many rows above and below a band a convolution looks at."""
    return rows_beside(conv.kernel_size[0], conv.stride[0], int(conv.padding[0]), conv.dilation[0])


class BandBatchNorm(_BatchNorm):
    """A batch norm over the images and tokens of all bands, (b, c, …): mean, then variance, as one process has them."""

    def forward(self, x: Tensor) -> Tensor:
        exchange = spread.current()
        if exchange is None or not (self.training or self.running_mean is None):
            return super().forward(x)
        axes = [axis for axis in range(x.dim()) if axis != 1]
        wide, shape = x.to(torch.promote_types(x.dtype, torch.float32)), (1, -1) + (1,) * (x.dim() - 2)
        summed, count = exchange.sums([wide.sum(dim=axes), x.numel() // x.shape[1]])
        mean = summed / count
        centred = wide - mean.view(shape)
        variance = exchange.sums([centred.square().sum(dim=axes)])[0] / count
        self._remember(mean.detach(), variance.detach() * count / (count - 1))
        y = centred * (variance + self.eps).rsqrt().view(shape)
        return (y if self.weight is None else y * self.weight.view(shape) + self.bias.view(shape)).to(x.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        if not self.training or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


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


IN_BANDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: BandConv2d,
    _BatchNorm: BandBatchNorm,
    DropPath: BandDropPath,
}
"""What makes which layers, and all that are derived from them, see beside a band."""


def see_beside(modules: Iterable[nn.Module]) -> None:
    """Make every layer of `IN_BANDS` see the bands beside, in place."""
    for module in modules:
        for old, new in IN_BANDS.items():
            if isinstance(module, old):
                cls = type(module)
                # between a layer's own class and PyTorch's
                module.__class__ = new if issubclass(new, cls) else type(cls.__name__, (cls, new), {})
