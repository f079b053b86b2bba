"""Sums over tokens in fp32: half-precision inputs are raised, autocast is switched off, the result is lowered again."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from subquad.errors import SubquadError, shown

P = ParamSpec("P")
R = TypeVar("R")

HALF = (torch.float16, torch.bfloat16)


def in_fp32(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Let `function` see fp32 where any of its tensors is half precision; its result has the dtype of the first one.

    Sums of products overflow fp16 at modest sizes, and autocast would lower every product inside `function`.
    Float64 and float32 pass through.
    """

    @functools.wraps(function)
    def raised(*tensors: P.args, **settings: P.kwargs) -> Tensor:
        return _raised_call(function, tensors, settings).to(_first(tensors, settings).dtype)

    return raised


def kept_in_fp32(function: Callable[P, R]) -> Callable[P, R]:
    """As `in_fp32` for sums that others go on with: its results, however many, stay fp32."""

    @functools.wraps(function)
    def raised(*tensors: P.args, **settings: P.kwargs) -> R:
        return _raised_call(function, tensors, settings)

    return raised


def _raised_call(function: Callable[..., R], tensors: Sequence[object], settings: Mapping[str, object]) -> R:
    first = _first(tensors, settings)
    device = first.device.type
    # the meta device has no autocast to ask about
    if device != "meta" and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return function(*map(_raise, tensors), **_raised(settings))
    if any(isinstance(value, Tensor) and value.dtype in HALF for value in (*tensors, *settings.values())):
        return function(*map(_raise, tensors), **_raised(settings))
    return function(*tensors, **settings)


def of_widest_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tokens of several dtypes, of which PyTorch makes no product, in one dtype that holds all their numbers."""
    wide = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    return tuple(x.to(wide) for x in tensors)


def _first(tensors: Sequence[object], settings: Mapping[str, object]) -> Tensor:
    """What decides on the dtype: the first argument, given by place or by name."""
    first = tensors[0] if tensors else next(iter(settings.values()), None)
    if not isinstance(first, Tensor):
        raise SubquadError(f"the first argument is a tensor, got {shown(first)}")
    return first


def _raised(settings: Mapping[str, object]) -> dict[str, object]:
    return {name: _raise(value) for name, value in settings.items()}


def _raise(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value
