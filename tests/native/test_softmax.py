"""Softmax attention by the CPU's kernel: masks, biases, lengths."""

import pytest
import torch
from native_inputs import projected
from torch.testing import assert_close

from subquad import kernels, ops
from subquad.kernels import unavailable, use_backend
from subquad.kernels.declaring import Implementation

pytestmark = pytest.mark.skipif(unavailable("native") is not None, reason=f"no kernels: {unavailable('native')}")


def definition(q, k, v, forbidden, bias):
    return ops.softmax_weights(*(x.double() for x in (q, k)), forbidden, bias) @ v.double()


@pytest.mark.parametrize("queries, keys", [(1, 1), (3, 70), (64, 64), (65, 63), (130, 257)])
@pytest.mark.parametrize("width", [7, 16, 40, 64])
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
def test_lengths_masks_and_biases(queries, keys, width, threads):
    (q,), (k, v) = projected(2, 3, queries, width), projected(2, 3, keys, width, count=2)
    bias = torch.randn(3, queries, keys)
    masks = [torch.rand(2, 1, queries, keys) < 0.5, torch.rand(2, 1, 1, keys) < 0.5, torch.rand(queries, keys) < 0.5]
    for forbidden in (None, *masks, torch.rand(2, 3, queries, keys) < 0.9, torch.ones(1, 1, 1, keys) > 0):
        for added in (None, bias, torch.randn(2, 3, queries, keys), torch.randn(3, keys, queries).mT):
            got = ops.softmax_attention(q, k, v, forbidden, added, backend="native")
            expected = definition(q, k, v, forbidden, None if added is None else added.double())
            assert_close(got.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("order", ["up", "down", "one"])
def test_scores_of_any_size(order):
    """The largest score of a query comes last, first or far above all others: nothing overflows, nothing is lost."""
    (q,), (k, v) = projected(1, 2, 70, 16), projected(1, 2, 300, 16, count=2)
    sizes = {
        "up": torch.linspace(0, 300, 300),
        "down": torch.linspace(300, 0, 300),
        "one": 1000.0 * (torch.arange(300) == 200),
    }
    bias = sizes[order].expand(2, 70, 300)
    got = ops.softmax_attention(q, k, v, None, bias, backend="native")
    assert_close(got.double(), definition(q, k, v, None, bias.double()), rtol=1e-4, atol=1e-5)


def test_it_is_chosen_where_no_gradient_is_wanted(monkeypatch):
    called = []
    one = kernels.softmax_attention.implementations["native"]
    noting = Implementation(lambda *x: called.append(1) or one.function(*x))
    monkeypatch.setitem(kernels.softmax_attention.implementations, "native", noting)
    q, k, v = projected(1, 2, 30, 16, count=3)
    ops.softmax_attention(q, k, v)
    ops.softmax_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), torch.zeros(30, 30) > 0)
    assert len(called) == 2
    ops.softmax_attention(q.double(), k.double(), v.double())
    with use_backend("eager"):
        ops.softmax_attention(q, k, v)
    ops.softmax_attention(q.requires_grad_(), k, v).sum().backward()
    with use_backend("native"):
        ops.softmax_attention(q, k, v).sum().backward()
    assert len(called) == 2 and q.grad is not None
