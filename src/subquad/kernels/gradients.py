"""Kernels with a gradient: the kernel's own, and where gradients of it are wanted too, that of the eager form."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subquad.tracing import is_traced


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernel: Callable[..., Tensor | tuple[Tensor, ...]],
        gradient: Callable[..., tuple[Tensor | None, ...]],
        eager: Callable[..., Tensor],
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.gradient, ctx.eager, ctx.count = gradient, eager, len(tensors)
        results = kernel(*tensors)
        result, *kept = (results,) if isinstance(results, Tensor) else results
        ctx.save_for_backward(*tensors, *kept)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # read once: what is computed again in the backward pass is there only once
        (grad,), saved = grads, ctx.saved_tensors
        tensors, kept = saved[: ctx.count], saved[ctx.count :]
        if not torch.is_grad_enabled() and not _is_of_several(grad):
            # a sum's gradient, for one, is a single number expanded
            grad = grad if grad.stride(-1) == 1 else grad.contiguous()
            return None, None, None, *ctx.gradient(kept, grad, *tensors)
        wanted = [k for k, tensor in enumerate(tensors) if tensor is not None and tensor.requires_grad]
        with torch.enable_grad():
            # of one tensor another may have been made, as agents are of queries: that is no part of this gradient
            own: list[Any] = [tensor if tensor is None else tensor.view_as(tensor) for tensor in tensors]
            result = ctx.eager(*own)
        graph = torch.is_grad_enabled()
        gradients = torch.autograd.grad(result, [own[k] for k in wanted], grad, create_graph=graph, allow_unused=True)
        places = dict(zip(wanted, gradients, strict=True))
        return None, None, None, *(places.get(k) for k in range(len(tensors)))


def _is_of_several(grad: Tensor) -> bool:
    """Whether it stands for several gradients at once (`is_grads_batched`, a vectorized Jacobian)."""
    if is_traced():
        return False
    return torch._C._functorch.is_batchedtensor(grad) or torch._C._functorch.is_legacy_batchedtensor(grad)


def learns(*tensors: Tensor | None) -> bool:
    """Whether a gradient of any of these is wanted."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def with_gradient(
    kernel: Callable[..., Tensor | tuple[Tensor, ...]],
    gradient: Callable[..., tuple[Tensor | None, ...]],
    eager: Callable[..., Tensor],
    *tensors: Tensor | None,
) -> Tensor:
    """`kernel(*tensors)`, differentiable by `gradient(kept, grad, *tensors)`, which has a result for each of them.

    `kernel` gives a result, or a result and tensors that are kept for its gradient.
    Gradients of gradients go through `eager(*tensors)`, which computes the same. The functions are kept for the
    backward pass and must hold no tensor of the graph themselves: it would never be freed.
    """
    if learns(*tensors):
        return _WithGradient.apply(kernel, gradient, eager, *tensors)
    results = kernel(*tensors)
    return results if isinstance(results, Tensor) else results[0]
