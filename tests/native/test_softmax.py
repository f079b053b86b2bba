"""Softmax attention by the CPU's kernel: masks, biases, lengths."""

from dataclasses import replace

import pytest
import torch
from native_inputs import projected
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from subquad import SubquadError, kernels, ops
from subquad.kernels import OPERATORS, unavailable, use_backend

pytestmark = pytest.mark.skipif(unavailable("native") is not None, reason=f"no kernels: {unavailable('native')}")


def definition(q, k, v, forbidden, bias):
    return ops.softmax_weights(*(x.double() for x in (q, k)), forbidden, bias) @ v.double()


@pytest.mark.parametrize("queries, keys", [(1, 1), (3, 70), (64, 64), (65, 63), (130, 257)])
@pytest.mark.parametrize("width", [7, 16, 40, 64])
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
def test_lengths_masks_and_biases(queries, keys, width, threads):
    (q,), (k, v) = projected(2, 3, queries, width), projected(2, 3, keys, width, count=2)
    bias = torch.randn(3, queries, keys)
    masks = [
        torch.rand(*shape) < 0.5
        for shape in ((2, 1, queries, keys), (2, 1, 1, keys), (2, 1, queries, 1), (queries, keys))
    ]
    for forbidden in (None, *masks, torch.rand(2, 3, queries, keys) < 0.9, torch.ones(1, 1, 1, keys) > 0):
        for added in (None, bias, torch.randn(2, 3, queries, keys), torch.randn(3, keys, queries).mT):
            got = ops.softmax_attention(q, k, v, forbidden, added, backend="native")
            expected = definition(q, k, v, forbidden, None if added is None else added.double())
            assert_close(got.double(), expected, rtol=1e-5, atol=2e-6)


def test_pairs_are_broadcast():
    q, k, v = projected(2, 3, 70, 16, count=3)
    forbidden = torch.rand(2, 1, 70, 1) < 0.5
    for shape in ((1, 1, 1, 1), (2, 1, 1, 70), (1, 3, 70, 1), (2, 3, 70, 70)):
        bias = torch.randn(*shape)
        got = kernels.softmax_attention(q, k, v, bias, forbidden, "native")
        expected = definition(q, k, v, forbidden, bias.double().expand(2, 3, 70, 70))
        assert_close(got.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("lowest", [-1e30, -1e37, None], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_lowest_numbers_are_biases_and_forbid_nothing(lowest, dtype):
    """Masks of other libraries: a query all of whose keys have the lowest number sees them all alike."""
    q, k, v = (x.to(dtype).requires_grad_() for x in projected(1, 2, 70, 8, count=3))
    bias, lowest = torch.zeros(2, 70, 70), lowest or torch.finfo(dtype).min
    bias[:, 1], bias[:, 2, 5:] = lowest, lowest
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    got = ops.softmax_attention(q, k, v, None, bias, backend="native")
    assert_close(got, ops.softmax_attention(q, k, v, None, bias, backend="eager"), rtol=tolerance, atol=tolerance)
    assert_close(got[:, :, 1], v.mean(dim=2), rtol=tolerance, atol=tolerance)
    # not PyTorch's gradients: the logarithm of a sum that it keeps has no digits for the number of such exponentials
    expected, weight = definition(q, k, v, None, bias.double()), torch.randn_like(got)
    gradients = (torch.autograd.grad((y * weight).sum(), (q, k, v)) for y in (got, expected))
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, rtol=5 * tolerance, atol=5 * tolerance)


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


@pytest.mark.parametrize("queries, keys", [(1, 1), (3, 70), (65, 63), (130, 257)])
@pytest.mark.parametrize("width", [7, 16, 40])
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
def test_gradients(queries, keys, width, threads):
    (q, weight), (k, v) = projected(2, 3, queries, width, count=2), projected(2, 3, keys, width, count=2)
    shared = torch.randn(3, queries, keys)
    for forbidden in (None, torch.rand(2, 1, queries, keys) < 0.5, torch.ones(1, 1, 1, keys) > 0):
        for bias in (None, shared, torch.randn(2, 3, queries, keys), shared[:1].expand(3, -1, -1)):
            given = [x for x in (q, k, v, bias) if x is not None]
            results = []
            for tensors, function in (
                (given, lambda q, k, v, *bias, m=forbidden: ops.softmax_attention(q, k, v, m, *bias)),
                (
                    [x.double() for x in given],
                    lambda q, k, v, *bias, m=forbidden: definition(q, k, v, m, *bias or (None,)),
                ),
            ):
                tensors = [x.detach().clone().requires_grad_() for x in tensors]
                results.append(torch.autograd.grad((function(*tensors) * weight).sum(), tensors))
            for got, expected in zip(*results, strict=True):
                assert_close(got.double(), expected, rtol=1e-4, atol=2e-5 * max(1.0, expected.abs().max().item()))


def test_gradients_of_gradients_are_those_of_the_formula():
    q, k, v = (x.clone().requires_grad_() for x in projected(1, 2, 30, 16, count=3))
    found = []
    for backend in ("native", "eager"):
        with sdpa_kernel(SDPBackend.MATH):
            y = ops.softmax_attention(q, k, v, backend=backend)
            (first,) = torch.autograd.grad(y.square().sum(), q, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), (q, k, v)))
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-4 * other.abs().max().item())


def test_who_computes(monkeypatch):
    called = []
    for operator in (kernels.softmax_attention, OPERATORS["softmax_attention_gradient"]):
        one = operator.implementations["native"]

        def noting(*x, one=one, name=operator.name):
            called.append(name.removeprefix("softmax_attention"))
            return one.function(*x)

        monkeypatch.setitem(operator.implementations, "native", replace(one, function=noting))
    q, k, v = projected(1, 2, 30, 16, count=3)
    ops.softmax_attention(q, k, v)
    ops.softmax_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), torch.zeros(30, 30) > 0)
    assert called == ["", ""]
    ops.softmax_attention(q.double(), k.double(), v.double())
    with use_backend("eager"):
        ops.softmax_attention(q, k, v)
    two = q.expand(2, -1, -1, -1)
    ops.softmax_attention(
        two, two, two, None, torch.zeros(2, 2, 30, 30).requires_grad_()
    )  # a bias of each image learns
    assert called == ["", ""]
    ops.softmax_attention(q.requires_grad_(), k, v, None, torch.zeros(2, 30, 30).requires_grad_()).sum().backward()
    assert called == ["", "", "", "_gradient"] and q.grad is not None


@pytest.mark.parametrize("backend", ["auto", "eager", "native"])
def test_numbers_are_not_taken_for_a_mask(backend):
    (q,) = projected(1, 2, 30, 16)
    with pytest.raises(SubquadError, match=r"forbidden pairs are True or False, got torch.float32"):
        ops.softmax_attention(q, q, q, torch.zeros(30, 30), backend=backend)
