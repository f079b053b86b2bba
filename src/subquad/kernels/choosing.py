"""Which code computes an operation: eager PyTorch, which is the specification, or fused kernels of ours.

`auto` takes kernels wherever they can do what is asked and the eager form otherwise. A backend that was asked for by
name, at a call or with `use_backend`, and cannot do it is an error, never a silent fallback; only what it has no kernel
for at all (`subquad list --backends` says what it has) is computed by PyTorch. $SUBQUAD_BACKEND is what holds where
nothing was said. Inside torch.compile kernels stay what they are; what is exported has the eager form.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from subquad.errors import SubquadError, unknown_name
from subquad.kernels import TITLES, Operator, cpu, has_gradient, has_kernel, name_of, triton

BACKENDS = {
    "auto": "kernels where they can, PyTorch otherwise",
    "eager": "PyTorch on any device: the specification",
    "native": "C++ kernels for CPUs: fp32",
    "triton": "kernels for CUDA devices: fp32 fp16 bf16",
}
KERNELS = {"native": cpu, "triton": triton}

# a plain variable of the process: torch.compile guards on it, and its oldest version here can't trace anything better
_asked = os.environ.get("SUBQUAD_BACKEND") or "auto"


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Compute operations with the backend `name` of BACKENDS inside this context, in all threads."""
    global _asked
    before, _asked = _asked, _known(name)
    try:
        yield
    finally:
        _asked = before


def unavailable(name: str) -> str | None:
    """Why the backend `name` cannot work on this machine, in one line; None where it can."""
    return _missing(name) if _known(name) in KERNELS else None


def kernel_for(
    operator: Operator, *tensors: Tensor | None, cannot: str | None = None, backend: str | None = None
) -> str | None:
    """The backend whose kernel computes `operator` of these tensors (tokens (b, h, n, d) and parameters), if one does.

    `cannot` is what keeps this call from kernels for reasons of its own. Raises SubquadError where a backend was asked
    for by name, with `backend` or around this call, and cannot be had.
    """
    asked = _known(backend or _asked)
    if asked == "eager":
        return None
    name = _for_device(tensors) if asked == "auto" else asked
    if name is None:
        return None
    title = TITLES[name_of(operator)]
    if not has_kernel(operator, name):
        if backend == name:
            raise SubquadError(f'backend "{name}" has no kernel for {title}: see subquad list --backends')
        return None
    reason = cannot or _refuses(name, operator, tensors) or _missing(name)
    if reason is not None and asked != "auto":
        raise SubquadError(f'backend "{name}" can\'t compute {title}: {reason}; "auto" would take the eager form')
    return name if reason is None else None


def _for_device(tensors: tuple[Tensor | None, ...]) -> str | None:
    """The backend for the device of the first tensor."""
    first = tensors[0]
    # what is exported is to run where there is none of our code
    if first is None or _is_exporting():
        return None
    return {"cpu": "native", "cuda": "triton"}.get(first.device.type)


@torch.compiler.assume_constant_result
def _is_exporting() -> bool:
    # torch 2.11 takes the function itself for true wherever it traces it
    return torch.compiler.is_exporting()


@torch.compiler.assume_constant_result
def _missing(name: str) -> str | None:
    return KERNELS[name].missing()


@torch.compiler.assume_constant_result
def _most_channels(name: str) -> int:
    return KERNELS[name].most_channels()


def _refuses(name: str, operator: Operator, tensors: tuple[Tensor | None, ...]) -> str | None:
    """What keeps these tensors from the kernels of the backend `name`."""
    learned = torch.is_grad_enabled() and not has_gradient(operator, name)
    devices, dtypes, most = KERNELS[name].DEVICES, KERNELS[name].DTYPES, _most_channels(name)
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.device.type not in devices:
            return f"it is for {' and '.join(devices)}, and a tensor is on {tensor.device}"
        if tensor.dtype not in dtypes:
            return f"it computes in {' '.join(map(short_name, dtypes))}, and a tensor is {short_name(tensor.dtype)}"
        if learned and tensor.requires_grad:
            return "it has no gradients, and one is asked for: call it under torch.no_grad()"
        if tensor.dim() == 4 and tensor.stride(3) != 1 and tensor.shape[3] > 1:
            return f"a head's channels have to lie side by side, and have a stride of {tensor.stride(3)}"
        if tensor.dim() == 4 and tensor.shape[3] > most:
            return f"it takes heads of up to {most} channels here, and these have {tensor.shape[3]}"
        if not tensor.numel():
            return "a tensor is empty"
    if not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None
    ):
        return "it can't be traced"
    return None


def short_name(dtype: torch.dtype) -> str:
    """A dtype as people write it: fp32."""
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def _known(name: str) -> str:
    if name not in BACKENDS:
        raise unknown_name("backend", name, BACKENDS)
    return name
