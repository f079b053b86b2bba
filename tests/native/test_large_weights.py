"""Halves of blocks whose weights no near cache holds, of few tokens and of many, for one thread and for several."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels import unavailable
from subquad.ops.branch_at_once import norm_projection, projection_residual
from subquad.ops.mlp_formula import mlp_branch

pytestmark = pytest.mark.skipif(unavailable("native") is not None, reason=f"no kernels: {unavailable('native')}")

WIDTH, HIDDEN = 390, 1500
"""Whole vectors of neither, and odd numbers of parts."""


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def error(given: Tensor | None, wanted: Tensor) -> float:
    assert given is not None and given.dtype == torch.bfloat16
    return float((given.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("num_tokens", [1, 17, 197, 256, 257, 700])
@torch.inference_mode()
def test_halves_are_what_they_are_in_double_precision(num_tokens, threads):
    torch.manual_seed(num_tokens)
    x, weight, bias = drawn(1, num_tokens, WIDTH), drawn(WIDTH) * 0.1 + 1, drawn(WIDTH)
    first, second = drawn(HIDDEN, WIDTH) * WIDTH**-0.5, drawn(WIDTH, HIDDEN) * HIDDEN**-0.5
    inner, outer, scale = drawn(HIDDEN), drawn(WIDTH), drawn(WIDTH)
    wide = [each.double() for each in (x, weight, bias, first, second, inner, outer, scale)]
    x_, weight_, bias_, first_, second_, inner_, outer_, scale_ = wide
    normed = F.layer_norm(x_, (WIDTH,), weight_, bias_, 1e-6)
    projected = normed @ first_.mT + inner_
    given = norm_projection(x, weight, bias, first, inner, eps=1e-6, keeps=True)
    assert error(given, torch.cat([projected, normed], dim=-1)) < 0.005
    y = drawn(1, num_tokens, HIDDEN)
    wanted = x_ + scale_ * (y.double() @ second_.mT + outer_)
    assert error(projection_residual(x, y, second, outer, scale), wanted) < 0.005
    wanted = x_ + scale_ * (F.gelu(projected) @ second_.mT + outer_)
    assert error(mlp_branch(x, weight, bias, first, inner, second, outer, scale, eps=1e-6), wanted) < 0.005
