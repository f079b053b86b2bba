"""Heads that several threads work on at once: their partial sums come together to what one thread finds."""

import pytest
import torch
from torch.testing import assert_close

from subquad import ops
from subquad.kernels import unavailable

pytestmark = pytest.mark.skipif(unavailable("native") is not None, reason=f"no kernels: {unavailable('native')}")


WITHOUT_GRADIENTS = ("polapp",)


@pytest.fixture(params=[2, 3, 5])
def threads(request):
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def calls(keys, width):
    """Operations on one head, with logits far enough apart for parts of the keys to have other maxima."""
    q, k, v = (torch.randn(1, 1, keys, width) for _ in range(3))
    agents, power = 4 * torch.randn(1, 1, 5, width), 1 + 2 * torch.rand(1, 1, width)
    biases = 3 * torch.randn(1, 5, keys), torch.randn(1, keys, 5)
    return {
        "linear": (ops.linear_attention, (q, k, v)),
        "inline": (ops.inline_attention, (q, k + 5, v)),
        "mala": (ops.mala_attention, (q, k, v)),
        "rala": (ops.rala_attention, (3 * q, 3 * k, v)),
        "nala": (ops.nala_attention, (q, k, v)),
        "polapp": (ops.polapp_attention, (q, 3 * k, v, *torch.rand(2, 1, 1, 2 * width))),
        "focused": (lambda *x, **s: ops.focused_attention(*x, power=3, **s), (q, k, v, power)),
        "pola": (ops.pola_attention, (q, k, v, power)),
        "agent": (ops.agent_attention, (q, agents, 3 * k, v, *biases)),
        "soft": (
            lambda *x, **s: ops.soft_attention(*x, inverse="cholesky", scale=0.3, **s),
            (q, agents / 9, v),
        ),
    }


@pytest.mark.parametrize("name", calls(1, 8))
def test_a_head_that_threads_share_is_what_it_is_in_double_precision(name, threads):
    for keys in (190, 330):
        operation, tensors = calls(keys, 24)[name]
        learned = name not in WITHOUT_GRADIENTS
        narrow = [tensor.clone().requires_grad_(learned) for tensor in tensors]
        wide = [tensor.double().requires_grad_(learned) for tensor in tensors]
        weight = torch.randn(1, 1, keys, 24)
        with torch.set_grad_enabled(learned):
            got, expected = operation(*narrow, backend="native"), operation(*wide)
        assert_close(got.double(), expected, rtol=1e-4, atol=2e-5 * max(1.0, expected.abs().max().item()))
        if not learned:
            continue
        ours = torch.autograd.grad((got * weight).sum(), narrow)
        theirs = torch.autograd.grad((expected * weight).sum(), wide)
        for one, other in zip(ours, theirs, strict=True):
            assert_close(one.double(), other, rtol=1e-3, atol=2e-4 * max(1.0, other.abs().max().item()))
