"""Layers of bf16 or fp16 that multiply in fp32, on processors on which PyTorch multiplies these in plain loops.

`subquad.optimize` makes these classes of a network's layers there (see `instructions.loops_over`). Weights are widened
at each call, so that they stay a network's own and what is loaded into them counts.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, fx, nn

from subquad.attention.bricks import ConvLayer
from subquad.models.layers import LinearLayer
from subquad.tracing import is_exporting

FEWEST = 8
"""Rows of tokens from which on widening takes less time than the loops."""


@register_notrace_module
class WidenedLinear(LinearLayer):
    """A linear layer of bf16 or fp16; in training it is what it was."""

    @staticmethod
    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """W x + b of tokens x (…, c), as `widened_product` gives it."""
        return widened_product(x, weight, bias)


@register_notrace_module
class WidenedConv2d(ConvLayer):
    """A convolution of bf16 or fp16; in training it is what it was."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training or is_exporting() or not _widens(x, self.weight):
            return super().forward(x)
        return self._conv_forward(*_wide(x, self.weight, self.bias)).to(x.dtype)

    @staticmethod
    def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, **settings: Any) -> Tensor:
        """What `F.conv2d` gives of maps x (b, c, y, x), by fp32."""
        if not _widens(x, weight):
            return F.conv2d(x, weight, bias, **settings)
        return F.conv2d(*_wide(x, weight, bias), **settings).to(x.dtype)

    @staticmethod
    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """W x + b of patches x (…, c), as `widened_product` gives it."""
        return widened_product(x, weight, bias)


CLASSES: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: WidenedLinear, nn.Conv2d: WidenedConv2d}
"""What becomes of layers of these classes."""


@fx.wrap  # whoever traces by torch.fx calls it as one
def widened_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W x + b of tokens x (…, c) with W = `weight` (m, c), by fp32 where there are more than a few."""
    if not _widens(x, weight) or x.shape[:-1].numel() < FEWEST:
        return F.linear(x, weight, bias)
    return F.linear(*_wide(x, weight, bias)).to(x.dtype)


def _widens(x: Tensor, weight: Tensor) -> bool:
    # weights that are quantized, say, are tensors of other classes
    plain = type(weight) in (nn.Parameter, Tensor) and x.device.type == "cpu"
    return plain and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)


def _wide(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    return x.float(), weight.float(), None if bias is None else bias.float()
