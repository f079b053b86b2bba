"""Kernels whose arguments lie in a memory, as they are called on aarch64, are those that ctypes calls."""

import ctypes

import pytest
import torch

from subquad import ATTENTION, TokenGrid, use_backend
from subquad.attention import traits_of
from subquad.kernels.cpu import by_memory, library
from subquad.kernels.cpu.by_memory import ByMemory
from subquad.models.layers import SelfAttention
from subquad.substituting import substituted

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=f"no kernels: {library.missing()}")


class Counting(ByMemory):
    calls = 0

    def __call__(self, *arguments):
        Counting.calls += 1
        return super().__call__(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", list(ATTENTION))
def test_arguments_in_a_memory_are_the_same_call(name, dtype):
    grid = TokenGrid(6, 5, 0 if "prefix" in traits_of(ATTENTION[name]).refuses else 1)
    layer = SelfAttention(48, 2, ATTENTION[name], grid=grid).to(dtype)
    tokens = torch.randn(2, grid.num_tokens, 48).to(dtype)

    Counting.calls = 0

    def run():
        x = tokens.clone().requires_grad_()
        with torch.no_grad():
            inferred = layer(x, grid=grid)
        out = layer(x, grid=grid)
        out.square().mean().backward()
        return inferred, out.detach(), x.grad

    with use_backend("auto"):
        direct = run()
        with substituted(by_memory, "IS_NEEDED", True), substituted(library, "ByMemory", Counting):
            in_a_memory = run()
        assert Counting.calls
    assert all(torch.equal(a, b) for a, b in zip(direct, in_a_memory, strict=True))


def test_a_number_without_a_size_is_refused():
    with pytest.raises(TypeError, match="newton_inverse_float is called with 3, which is no number of C"):
        ByMemory("newton_inverse_float", library.library().newton_inverse_float_unpacked)(ctypes.c_float(1), 3)
