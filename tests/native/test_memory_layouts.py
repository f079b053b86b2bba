"""Kernels read tensors however they lie in memory, or leave them to the formula: the numbers are the same."""

import pytest
import torch
from operator_calls import operator_calls
from torch import Tensor
from torch.testing import assert_close

from subquad.kernels import choose, unavailable

pytestmark = pytest.mark.skipif(unavailable("native") is not None, reason=f"no kernels: {unavailable('native')}")


def among_others(x: Tensor, step: int, axis: int) -> Tensor:
    """The same numbers, every `step` numbers along an axis, with others between them that must not be read."""
    shape = [size * step if place == axis else size for place, size in enumerate(x.shape)]
    room = torch.full(shape, True if x.dtype == torch.bool else float("nan"), dtype=x.dtype)
    inside = room[tuple(slice(None, None, step) if place == axis else slice(None) for place in range(x.dim()))]
    return inside.copy_(x)


def backwards(x: Tensor) -> Tensor:
    """The same numbers in memory with the last axis in front."""
    axes = tuple(reversed(range(x.dim())))
    return x.permute(axes).contiguous().permute(axes)


def layouts_of(x: Tensor) -> dict[str, Tensor]:
    """One tensor as it may lie in memory."""
    apart = {f"apart along axis {axis}": among_others(x, 2, axis) for axis in range(x.dim())}
    return {"backwards": backwards(x), **apart}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", operator_calls(8))
def test_numbers_are_read_wherever_they_lie(name, dtype):
    call = operator_calls(8)[name]
    tensors = [x if x is None or x.dtype == torch.bool else x.to(dtype).contiguous() for x in call.tensors]
    expected = call.by_kernel(tensors)
    for place, tensor in enumerate(tensors):
        for layout, lying in {} if tensor is None else layouts_of(tensor).items():
            given = [*tensors[:place], lying, *tensors[place + 1 :]]
            if choose(call.operator, given, call.settings) != "native":
                continue
            for got, one in zip(call.by_kernel(given), expected, strict=True):
                text = f"{list(call.operator.shapes.texts)[place]} {layout}"
                assert_close(got, one, rtol=1e-2, atol=1e-3 * one.abs().max().item(), msg=lambda m, t=text: f"{t}: {m}")


@pytest.mark.parametrize("name", operator_calls(8))
def test_gradients_lie_as_compiling_is_told(name):
    call = operator_calls(8)[name]
    tensors = [x if x is None or x.dtype == torch.bool else backwards(x.float()) for x in call.tensors]
    if choose(call.operator, tensors, call.settings) != "native":
        tensors = [x if x is None or x.dim() > 3 else y for x, y in zip(call.tensors, tensors, strict=True)]
        tensors = [x if x is None or x.dtype == torch.bool else x.float() for x in tensors]
    torch.library.opcheck(
        call.operator.packet.default, (*tensors, *call.settings, "native"), test_utils=("test_faketensor",)
    )
