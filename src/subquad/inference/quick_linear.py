"""Linear layers by our kernel, on processors of which PyTorch's fp32 products use half: see `kernels.multipliers`."""

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, fx, nn

from subquad.models.layers import LinearLayer
from subquad.ops.branch_at_once import projection

FEWEST = 64
"""Rows of tokens, and channels of the result, from which on the kernel is the faster one."""


@register_notrace_module
class QuickLinear(LinearLayer):
    """A linear layer, of which `subquad.optimize` has made this class; in training it is what it was."""

    @staticmethod
    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """W x + b of tokens x (…, c), as `quick_product` gives it."""
        return quick_product(x, weight, bias)


@fx.wrap  # whoever traces by torch.fx calls it as one
def quick_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W x + b of tokens x (…, c) with W = `weight` (m, c): by our kernel where it is faster and can."""
    own = x.dim() > 1 and x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
    # quantized weights, say, are tensors of other classes
    own = own and type(weight) in (nn.Parameter, Tensor) and x.shape[-1] > 0
    if own and min(x.numel() // x.shape[-1], len(weight)) >= FEWEST:
        y = projection(x.reshape(1, -1, x.shape[-1]), weight, bias)
        if y is not None:
            return y.view(*x.shape[:-1], len(weight))
    return F.linear(x, weight, bias)
