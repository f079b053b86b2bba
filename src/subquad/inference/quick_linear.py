"""Linear layers by our kernel, on processors of which PyTorch's fp32 products use half: see `kernels.multipliers`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.models.layers import LinearLayer
from subquad.ops.branch_at_once import projection
from subquad.tracing import is_exporting

FEWEST = 64
"""Rows of tokens, and channels of the result, from which on the kernel is the faster one."""


class QuickLinear(LinearLayer):
    """A linear layer, of which `subquad.optimize` has made this class; in training it is what it was."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training or is_exporting():
            return F.linear(x, self.weight, self.bias)
        return self.product(x, self.weight, self.bias)

    @staticmethod
    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """W x + b of tokens x (…, c) with W = `weight` (m, c): by our kernel where it is faster and can."""
        own = x.dim() > 1 and x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
        # quantized weights, say, are tensors of other classes
        own = own and type(weight) in (nn.Parameter, Tensor) and x.shape[-1] > 0
        if own and min(x.numel() // x.shape[-1], len(weight)) >= FEWEST:
            y = projection(x.reshape(1, -1, x.shape[-1]), weight, bias)
            if y is not None:
                return y.view(*x.shape[:-1], len(weight))
        return F.linear(x, weight, bias)
