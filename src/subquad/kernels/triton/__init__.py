"""Fused kernels for CUDA devices, in Triton: fp32, fp16 and bf16, summed in fp32, forward and backward.

With TRITON_INTERPRET=1 they run, slowly, on the CPU: that is how they are tested where there is no GPU.
Nothing here imports Triton before a kernel runs.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from subquad.kernels.backends import Backend, register_backend
from subquad.kernels.declaring import OPERATORS, check_arguments, implements

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = ("cuda", "cpu") if INTERPRETED else ("cuda",)
# numpy, which interprets, has no bf16: products of it are of other numbers there
DTYPES = (torch.float32, torch.float16, *(() if INTERPRETED else (torch.bfloat16,)))
LEAST_CAPABILITY = (8, 0)

KERNELS = {
    "linear_calls": ("linear_attention", "linear_attention_keeping", "pola_attention", "pola_attention_keeping"),
    "inline_kernels": ("inline_attention", "inline_attention_keeping"),
    "maps_calls": ("agent_attention", "agent_attention_keeping", "soft_gather", "soft_spread"),
    "state_calls": tuple(
        f"{name}_attention{kind}" for name in ("mlla", "mala", "rala", "nala") for kind in ("", "_keeping")
    ),
    "polapp_calls": ("polapp_attention",),
    "local_kernels": ("local_branch", "depthwise"),
    "pool_kernels": ("pool",),
    "newton_kernels": ("newton_inverse",),
}
"""Operators by the file that computes them and, where they have some, their gradients."""


# each call of an operation asks, and a driver's answers take longer than all else that is looked at
@lru_cache
def missing() -> str | None:
    """Why these kernels can't run here, in one line; None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if INTERPRETED:
        return None
    if not torch.cuda.is_available() or torch.version.hip:
        return "there is no CUDA device"
    found = torch.cuda.get_device_capability()
    if found < LEAST_CAPABILITY:
        needed, has = (".".join(map(str, numbers)) for numbers in (LEAST_CAPABILITY, found))
        return f"they need compute capability {needed}, and the device has {has}"
    return None


@lru_cache
def most_channels() -> int:
    """Of a head: a state of 128² numbers needs the shared memory of a data center's GPU."""
    if not torch.cuda.is_available():
        return 128
    properties = torch.cuda.get_device_properties()
    # PyTorch's types have not known it in all versions
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return 128 if shared >= 160 * 2**10 else 64


def _lazily(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported at its first call, run on the device of its first tensor."""

    def call(first: torch.Tensor, *rest: Any) -> Any:
        check_arguments(OPERATORS[name], (first, *rest))
        for note in _notes:
            note(name, (first, *rest))
        function = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        with torch.cuda.device_of(first):
            return function(first, *rest)

    return call


_notes: list[Callable[[str, tuple[Any, ...]], None]] = []


@contextmanager
def noting(note: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Let `note(name, arguments)` hear of every operator that these kernels compute inside this context."""
    _notes.append(note)
    try:
        yield
    finally:
        _notes.remove(note)


def function_of(name: str) -> Callable[..., Any]:
    """What computes an operator."""
    return OPERATORS[name].implementations["triton"].function


register_backend(
    Backend(
        "triton",
        "kernels for CUDA devices: fp32 fp16 bf16",
        devices=DEVICES,
        dtypes=DTYPES,
        missing=missing,
        most_channels=most_channels,
        only_by_name=("cpu",),
    )
)


def _unknown_features(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, feature_map: str, eps: float) -> str | None:
    """What keeps linear attention from these kernels."""
    return None if feature_map != "none" else "it makes features of tokens, and these are features"


MOST_OF_TWO_STATES = 64
"""Channels of a head in fp16 beyond which PolaFormer's two states, as the tf32 numbers of products, fit no GPU."""


def _too_wide_for_two_states(q: torch.Tensor, *rest: Any) -> str | None:
    """What keeps PolaFormer's attention from these kernels."""
    if q.dtype != torch.float16 or q.shape[3] <= MOST_OF_TWO_STATES:
        return None
    return f"it takes heads of up to {MOST_OF_TWO_STATES} channels in fp16 there, and these have {q.shape[3]}"


MOST_TURNED = 64
"""Channels of a head beyond which features that are turned, and their partners, are too much for a program."""


def _wide_or_apart(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor | None, *rest: Any
) -> str | None:
    """What keeps attention with one state of turned features from these kernels."""
    if q.shape[3] > MOST_TURNED:
        return f"it takes heads of up to {MOST_TURNED} channels there, and these have {q.shape[3]}"
    apart = cos is not None and q.shape[2] != k.shape[2]
    return "queries and keys that are turned stand on one grid" if apart else None


def _polapp_apart(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    same: torch.Tensor,
    opposite: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
    eps: float,
) -> str | None:
    """What keeps PolaFormer++'s attention from these kernels."""
    if cos is not None and not interleaved and cos.shape[-1] != q.shape[3]:
        return "it turns within positive and within negative features, and these are turned across"
    return _wide_or_apart(q, k, v, cos)


CANNOT: dict[str, Callable[..., str | None]] = {
    "linear_attention": _unknown_features,
    "pola_attention": _too_wide_for_two_states,
}
CANNOT |= {f"{name}_attention": _wide_or_apart for name in ("mlla", "mala", "rala", "nala")}
CANNOT["polapp_attention"] = _polapp_apart
for _module, _names in KERNELS.items():
    for _name in (found for name in _names for found in (name, f"{name}_gradient") if found in OPERATORS):
        implements(OPERATORS[_name], "triton", cannot=CANNOT.get(_name))(_lazily(_module, _name))
