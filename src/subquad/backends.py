"""Which code computes an operation: eager PyTorch, which is the specification, or fused kernels of ours.

`auto` takes kernels wherever they can do what is asked and the eager form otherwise. A backend that was asked for by
name, at a call or with `use_backend`, and cannot do it is an error, never a silent fallback. $SUBQUAD_BACKEND is what
holds where nothing was said. Inside torch.compile only what a call says is seen (the oldest torch that we support
cannot trace a context variable): all else is the eager form there.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from subquad import native
from subquad.errors import SubquadError, unknown_name

BACKENDS = {
    "auto": "kernels where they can do what is asked, eager PyTorch otherwise",
    "eager": "PyTorch, on any device: the specification",
    "native": "C++ kernels for CPUs, compiled at first use: fp32; some have gradients",
}

_asked: ContextVar[str | None] = ContextVar("backend", default=None)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Compute operations with the backend `name` of BACKENDS inside this context."""
    token = _asked.set(_known(name))
    try:
        yield
    finally:
        _asked.reset(token)


def unavailable(name: str) -> str | None:
    """Why the backend `name` cannot work on this machine, in one line; None where it can."""
    return native.missing() if _known(name) == "native" else None


def uses_native(
    operation: str,
    *tensors: Tensor | None,
    cannot: str | None = None,
    gradients: bool = False,
    backend: str | None = None,
) -> bool:
    """Whether the CPU kernels compute `operation` of these tensors (tokens (b, h, n, d) and parameters).

    `cannot` is what keeps this call from them for reasons of its own, `gradients` whether they have some. Raises
    SubquadError where "native" was asked for and cannot be had.
    """
    if torch.compiler.is_compiling():
        asked = backend or "auto"
        reason: str | None = "torch.compile fuses the eager form itself"
    else:
        asked = _known(backend or _asked.get() or os.environ.get("SUBQUAD_BACKEND") or "auto")
        if asked == "eager":
            return False
        reason = cannot or _native_refuses(tensors, gradients) or native.missing()
    if reason is not None and asked == "native":
        raise SubquadError(f'backend "native" can\'t compute {operation}: {reason}; "auto" would take the eager form')
    return reason is None


def _native_refuses(tensors: tuple[Tensor | None, ...], has_gradients: bool) -> str | None:
    gradients = torch.is_grad_enabled() and not has_gradients
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.device.type != "cpu":
            return f"it is for CPUs, and a tensor is on {tensor.device}"
        if tensor.dtype != torch.float32:
            return f"it computes in fp32, and a tensor is {str(tensor.dtype).removeprefix('torch.')}"
        if gradients and tensor.requires_grad:
            return "it has no gradients, and one is asked for: call it under torch.no_grad()"
        if tensor.dim() == 4 and tensor.stride(3) != 1 and tensor.shape[3] > 1:
            return f"a head's channels have to lie side by side, and have a stride of {tensor.stride(3)}"
        if not tensor.numel():
            return "a tensor is empty"
    if torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None:
        return "it can't be traced"
    return None


def _known(name: str) -> str:
    if name not in BACKENDS:
        raise unknown_name("backend", name, BACKENDS)
    return name
