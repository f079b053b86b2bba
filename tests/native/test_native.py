"""The CPU kernels against the eager form in float64, and when they are used."""

import os
import re
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mechanisms import inputs_of, without_refused_prefix
from operator_calls import GRID, TURNED, rotation_tables
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import subquad
from subquad import ATTENTION, SubquadError, TokenGrid, kernels, ops
from subquad.kernels import OPERATORS, Backend, backends, choose, choosing, declaring, unavailable, use_backend
from subquad.kernels.cpu import library
from subquad.models.assembling import settings_of
from subquad.ops import focused_formula, soft_formula
from subquad.positions import BiasTables
from subquad.rope import rotation_of

pytestmark = pytest.mark.skipif(unavailable("native") is not None, reason=f"no kernels: {unavailable('native')}")

WIDTHS = [7, 16, 24, 64, 130]
GRIDS = [TokenGrid(5, 5), TokenGrid(14, 9, 1), TokenGrid(3, 22, 5), TokenGrid(1, 23), TokenGrid(17, 19)]
# a mechanism that has kernels has them for all its parts, softmax has PyTorch's
WITHOUT = {name for name in ATTENTION if f"{name}_attention" not in OPERATORS}


@pytest.fixture
def threads(request):
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def projected(*shape, count=1):
    """Tokens (b, h, n, d) as views of one fused projection."""
    b, h, n, d = shape
    return torch.randn(b, n, count, h, d).permute(2, 0, 3, 1, 4).unbind(0)


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("width", [8, 24, 64])
def test_every_mechanism_is_what_it_is_in_double_precision(name, grid, width):
    grid = without_refused_prefix(name, grid)
    settings = {"num_agents": 9} if "num_agents" in settings_of(name) else {}
    module = ATTENTION[name](2 * width, 2, grid=grid, kv_grid=grid, **settings)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    supply = inputs_of(module, grid, dim=2 * width)
    narrow = {key: None if tensor is None else tensor.float() for key, tensor in supply.items()}
    with torch.no_grad(), use_backend("auto" if name in WITHOUT else "native"):
        got = module(**narrow, grid=grid, kv_grid=grid)
    expected = module.double()(**supply, grid=grid, kv_grid=grid)
    assert_close(got.double(), expected, rtol=1e-4, atol=2e-5 * expected.abs().max().item())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (65, 200), (300, 63)])
def test_cores_at_any_width_and_length(width, threads, queries, keys):
    (q,), (k, v) = projected(2, 3, queries, width), projected(2, 3, keys, width, count=2)
    agents, power = torch.randn(2, 3, 5, width), 1 + 4 * torch.rand(3, 1, width)
    biases = torch.randn(3, 5, keys), torch.randn(3, queries, 5)
    few = 0.3 * torch.randn(2, 3, 5, width)
    calls = [
        (ops.linear_attention, (q, k, v), {}),
        (ops.linear_attention, (q, k, v), {"feature_map": "elu"}),
        (ops.inline_attention, (q, k + 50, v), {}),
        (ops.pola_attention, (q, k, v, power), {}),
        (ops.pola_attention, (q, k, v, power, None, power, torch.randn(3, keys, width)), {}),
        (ops.ttt_unit, (q, k, v, *torch.randn(2, 3, width, width) / width**0.5), {}),
        (ops.focused_attention, (q, k, v, power), {"power": 3}),
        (ops.focused_attention, (q, k, v, power), {"power": 1.5}),
        (ops.polapp_attention, (q, k, v, *torch.rand(2, 3, 1, 2 * width)), {}),
        (ops.agent_attention, (q, agents, k, v, *biases), {}),
        (ops.soft_attention, (k, few, v), {"inverse": "cholesky", "scale": 0.3}),
    ]
    for operation, tensors, settings in calls:
        got = operation(*tensors, **settings, backend="native")
        wide = [None if tensor is None else tensor.double() for tensor in tensors]
        expected = operation(*wide, **settings)
        assert got.shape == expected.shape and got.transpose(1, 2).is_contiguous()
        assert_close(got.double(), expected, rtol=1e-4, atol=1e-5 * max(1, expected.abs().max().item()))


LARGE = TokenGrid(30, 40, 2)
SIZES = [(grid, size) for grid in (*GRIDS, TokenGrid(2, 2), LARGE) for size in (1, 3, 5, 7, 9, 11)]
SIZES = [
    pytest.param(*pair, marks=pytest.mark.slow) if pair[0] == LARGE and pair[1] in (5, 9, 11) else pair
    for pair in SIZES
]


@pytest.mark.parametrize(("grid", "kernel_size"), SIZES, ids=str)
@pytest.mark.parametrize("own", [False, True])
def test_the_local_branch(grid, kernel_size, own):
    for width in (7, 16, 40):
        y, v, gate = projected(2, 3, grid.num_tokens, width, count=3)
        weight = torch.randn(*([2] if own else []), 3 * width, kernel_size, kernel_size)
        for bias, scale in ((None, None), (torch.randn(3 * width), gate)):
            tensors = y, v, weight, bias, scale
            wide = [None if tensor is None else tensor.double() for tensor in tensors]
            expected = ops.add_local(*wide, grid=grid, kv_grid=grid)
            got = ops.add_local(y.clone(), *tensors[1:], grid=grid, kv_grid=grid, backend="native")
            assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_means_windows_and_biases_of_the_map(grid):
    (x,) = projected(2, 3, grid.num_tokens, 24)
    for bins in (TokenGrid(1, 1), TokenGrid(1, 7), TokenGrid(grid.height, grid.width)):
        got = ops.pool_tokens(x, grid, bins, backend="native")
        expected = ops.pool_tokens(x.double(), grid, bins)
        assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
        ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
        (got,) = torch.autograd.grad(ops.pool_tokens(ours, grid, bins, backend="native"), ours, got)
        (wide,) = torch.autograd.grad(ops.pool_tokens(theirs, grid, bins), theirs, expected)
        assert_close(got.double(), wide, rtol=1e-4, atol=1e-5)
    weight = torch.randn(24, 24, 1, 3)
    got = ops.convolve_windows(x, weight, grid, backend="native")
    assert_close(got.double(), ops.convolve_windows(x.double(), weight.double(), grid), rtol=1e-4, atol=1e-4)
    tables = BiasTables(
        torch.randn(3, 6, 7, 7),
        torch.randn(3, 6, grid.height),
        torch.randn(3, 6, grid.width),
        torch.randn(3, 6, grid.prefix) if grid.prefix else None,
    )
    agents, written = torch.randn(2, 3, 6, 24), tables.written_out()
    expected = ops.agent_attention(x, agents, x, x, written, written.mT, backend="native")
    assert_close(ops.agent_attention(x, agents, x, x, tables, tables, backend="native"), expected)


def gradients_of(function, tensors, weight):
    """Gradients of a weighted sum, by `autograd.grad` alone and with a graph, and of the sum of their squares.

    With a graph the eager form is what is differentiated: only without one are the kernels' own gradients computed.
    """
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    plain = torch.autograd.grad((function(*tensors) * weight).sum(), tensors)
    first = torch.autograd.grad((function(*tensors) * weight).sum(), tensors, create_graph=True)
    second = torch.autograd.grad(sum(grad.square().sum() for grad in first), tensors, allow_unused=True)
    return [*plain, *first, *(grad for grad in second if grad is not None)]


@pytest.mark.parametrize("width", [7, 16, 40])
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize(
    "operation",
    [
        lambda *qkv, **more: ops.linear_attention(*qkv, **more),
        lambda *qkv, **more: ops.linear_attention(*qkv, feature_map="elu", eps=0.01, **more),
        ops.inline_attention,
    ],
    ids=["relu", "elu", "inline"],
)
def test_gradients_of_the_cores(operation, width, threads):
    (q, weight), (k, v) = projected(2, 3, 70, width, count=2), projected(2, 3, 130, width, count=2)
    expected = gradients_of(operation, [x.double() for x in (q, k, v)], weight.double())
    got = gradients_of(lambda *x: operation(*x, backend="native"), [q, k, v], weight)
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert_close(one.double(), other, rtol=1e-3, atol=1e-4 * other.abs().max().item())


@pytest.mark.parametrize("name", TURNED)
@pytest.mark.parametrize("tables", ["mala", "mlla"])
@pytest.mark.parametrize("width", [7, 16, 20, 40])
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
def test_turned_features_and_their_gradients(name, tables, width, threads):
    cos, sin, interleaved = rotation_tables(width, tables)
    operation, (q, k, v, weight) = getattr(ops, name), projected(2, 3, GRID.num_tokens, width, count=4)

    def mix(*qkv, **more):
        turn = rotation_of(*(None if x is None else x.to(qkv[0].dtype) for x in (cos, sin)), interleaved)
        return operation(*qkv, rotation=turn, **more)

    expected = [x.double() for x in (q, k, v)]
    expected = [mix(*expected), *gradients_of(mix, expected, weight.double())]
    got = [mix(q, k, v, backend="native"), *gradients_of(lambda *x: mix(*x, backend="native"), [q, k, v], weight)]
    for one, other in zip(got, expected, strict=True):
        assert_close(one.double(), other, rtol=1e-3, atol=1e-4 * other.abs().max().item())


@pytest.mark.parametrize("name", TURNED)
@pytest.mark.parametrize("width", [7, 64, 130])
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (65, 200), (300, 63)])
def test_features_that_are_not_turned_at_any_width_and_length(name, width, threads, queries, keys):
    """As exact as the eager form: MALA is a difference of numbers that grow with the width."""
    (q,), (k, v) = projected(2, 3, queries, width), projected(2, 3, keys, width, count=2)
    expected = getattr(ops, name)(q.double(), k.double(), v.double())
    got, eager = (getattr(ops, name)(q, k, v, backend=backend) for backend in ("native", "eager"))
    assert got.shape == expected.shape and got.transpose(1, 2).is_contiguous()
    off, allowed = ((y.double() - expected).abs().max().item() for y in (got, eager))
    assert off <= 3 * allowed + 1e-6 * expected.abs().max().item()


@pytest.mark.parametrize("name", TURNED)
def test_a_rotation_that_the_kernels_do_not_know_is_refused(name):
    operation, (q, k, v) = getattr(ops, name), projected(1, 2, 6, 8, count=3)
    tables = torch.ones(6, 8), torch.zeros(6, 8)
    with pytest.raises(SubquadError, match="it turns pairs of neighbours, and these are of two halves"):
        operation(q, k, v, rotation=rotation_of(*tables, False), backend="native")
    halves = operation(q, k, v, rotation=rotation_of(*tables, False))
    assert_close(halves, operation(q, k, v, backend="native"))
    with pytest.raises(SubquadError, match="queries and keys that are turned stand on one grid"):
        operation(q, k[:, :, 1:], v[:, :, 1:], rotation=rotation_of(*tables, True), backend="native")


@pytest.mark.parametrize("tables", ["mala", "mlla"])
@pytest.mark.parametrize("width", [7, 16, 20, 40])
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize(("size", "features"), [(1e-4, 2), (1, 1), (1, 2), (60, 2)])
def test_exponentials_of_both_signs_turned_and_at_any_size(tables, width, threads, size, features):
    """A host's rotation may be of heads, not of features: both halves turn alike then."""
    cos, sin, interleaved = rotation_tables(width, tables, features)
    q, k, v = projected(2, 3, GRID.num_tokens, width, count=3)
    tensors = q * size, k * size, v, *torch.rand(2, 3, 1, 2 * width)

    def mix(*given, **more):
        turn = rotation_of(*(None if x is None else x.to(given[0].dtype) for x in (cos, sin)), interleaved)
        return ops.polapp_attention(*given, rotation=turn, **more)

    expected = mix(*(x.double() for x in tensors))
    off, allowed = ((mix(*tensors, backend=name).double() - expected).norm() for name in ("native", "eager"))
    assert off <= 3 * allowed + 1e-6 * expected.norm()


@pytest.mark.parametrize("name", ["rala_attention"])
@pytest.mark.parametrize("size", [1, 40, 400])
def test_sharp_weights_of_keys_stay_in_range(name, size):
    """Scores of hundreds: their exponentials are taken of differences from the largest, whichever thread has that."""
    q, k, v, weight = projected(1, 2, 200, 16, count=4)
    operation, tensors = getattr(ops, name), (q * size, k * size, v)
    expected = gradients_of(operation, [x.double() for x in tensors], weight.double())[:3]
    got = gradients_of(lambda *x: operation(*x, backend="native"), tensors, weight)[:3]
    eager = gradients_of(lambda *x: operation(*x, backend="eager"), tensors, weight)[:3]
    for one, other, wide in zip(got, eager, expected, strict=True):
        allowed = (other.double() - wide).norm()
        assert (one.double() - wide).norm() <= 3 * allowed + 1e-5 * wide.norm()


@pytest.mark.parametrize("width", [7, 16, 40])
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("count", [4, 17])
def test_gradients_of_agent_attention(width, threads, count):
    (q, weight), (k, v) = projected(2, 3, 70, width, count=2), projected(2, 3, 130, width, count=2)
    biases = torch.randn(3, count, 130), torch.randn(3, 70, count)
    tensors = q, torch.randn(2, 3, count, width), k, v, *biases
    expected = gradients_of(ops.agent_attention, [x.double() for x in tensors], weight.double())
    got = gradients_of(lambda *x: ops.agent_attention(*x, backend="native"), tensors, weight)
    for one, other in zip(got, expected, strict=True):
        assert_close(one.double(), other, rtol=1e-3, atol=1e-4 * other.abs().max().item())


@pytest.mark.parametrize("width", [7, 16, 40])
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("power", [1.5, 3])
def test_gradients_of_focused_attention(width, threads, power):
    (q, weight), (k, v) = projected(2, 3, 70, width, count=2), projected(2, 3, 130, width, count=2)

    def mix(*tensors, backend=None):
        return ops.focused_attention(*tensors, power=power, backend=backend)

    tensors = q, k, v, 0.5 + torch.rand(3, 1, width)
    expected = gradients_of(mix, [x.double() for x in tensors], weight.double())
    got = gradients_of(lambda *x: mix(*x, backend="native"), tensors, weight)
    for one, other in zip(got, expected, strict=True):
        assert_close(one.double(), other, rtol=1e-3, atol=1e-4 * other.abs().max().item())


@pytest.mark.parametrize("width", [7, 16, 40])
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("least", [1, 3])
def test_gradients_of_polaformers_attention(width, threads, least):
    (q, weight), (k, v) = projected(2, 3, 70, width, count=2), projected(2, 3, 130, width, count=2)
    power, temperature = least + torch.rand(3, 1, width), 1 + torch.rand(3, 1, width)
    for more in ((), (temperature, torch.randn(3, 130, width))):

        def mix(q, k, v, power, *more, backend=None):
            return ops.pola_attention(q, k, v, power, None, *more, backend=backend)

        tensors = q, k, v, power, *more
        expected = gradients_of(mix, [x.double() for x in tensors], weight.double())
        got = gradients_of(lambda *x, mix=mix: mix(*x, backend="native"), tensors, weight)
        for one, other in zip(got, expected, strict=True):
            assert_close(one.double(), other, rtol=1e-3, atol=1e-4 * other.abs().max().item())


def test_a_token_of_zeros_has_no_gradient_of_powers():
    (q, k, v), power = projected(1, 2, 40, 16, count=3), 2 + torch.rand(2, 1, 16)
    q, k = q.clone().index_fill_(2, torch.tensor([5]), 0), k.clone().index_fill_(2, torch.tensor([7]), 0)

    def plain(backend):
        given = [x.detach().requires_grad_() for x in (q, k, v, power)]
        return torch.autograd.grad(ops.pola_attention(*given, backend=backend).square().sum(), given)

    for one, other in zip(plain("native"), plain("eager"), strict=True):
        assert_close(one, other, rtol=1e-3, atol=1e-5 * other.abs().max().item())


def test_gradients_with_a_graph_count_what_one_tensor_owes_another_once():
    """Agents are means of queries: the gradient to these through those is not the operator's."""
    grid, bins = TokenGrid(5, 6), TokenGrid(2, 2)
    (q, weight), (k, v) = projected(1, 2, 30, 16, count=2), projected(1, 2, 30, 16, count=2)
    biases = torch.randn(2, 4, 30), torch.randn(2, 30, 4)

    def mix(q, k, v, *biases, **more):
        return ops.agent_attention(q, ops.pool_tokens(q, grid, bins, **more), k, v, *biases, **more)

    tensors = q, k, v, *biases
    expected = gradients_of(mix, [x.double() for x in tensors], weight.double())
    got = gradients_of(lambda *x: mix(*x, backend="native"), tensors, weight)
    for one, other in zip(got, expected, strict=True):
        assert_close(one.double(), other, rtol=1e-3, atol=1e-4 * other.abs().max().item())


@pytest.mark.parametrize("width", [7, 16, 40])
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("count", [4, 17])
def test_gradients_of_gaussian_maps(width, threads, count):
    x, v, weight = projected(2, 3, 130, width, count=3)

    def mix(x, landmarks, v, **more):
        return ops.soft_attention(x, landmarks, v, inverse="cholesky", scale=0.3, **more)

    tensors = x, 0.3 * torch.randn(2, 3, count, width), v
    expected = gradients_of(mix, [x.double() for x in tensors], weight.double())
    got = gradients_of(lambda *x: mix(*x, backend="native"), tensors, weight)
    for one, other in zip(got, expected, strict=True):
        assert_close(one.double(), other, rtol=1e-3, atol=1e-4 * other.abs().max().item())


@pytest.mark.parametrize("size", [1, 9, 49])
@pytest.mark.parametrize("gradient", ["steps", "inverse"])
def test_gradients_of_newtons_steps(size, gradient):
    x = 0.3 * torch.randn(2, 3, size, 16)
    weight = torch.randn(2, 3, size, size)

    def inverse(x):
        return ops.newton_inverse(ops.gaussian_kernel(x, x), gradient=gradient)

    expected = gradients_of(inverse, [x.double()], weight.double())
    with use_backend("native"):
        got = gradients_of(inverse, [x], weight)
    for one, other in zip(got, expected, strict=True):
        assert_close(one.double(), other, rtol=1e-3, atol=2e-4 * other.abs().max().item())


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("kernel_size", [1, 3, 5, 7, 9])
@pytest.mark.parametrize("own", [False, True])
def test_gradients_of_the_local_branch(grid, kernel_size, own):
    y, v, gate, weight = projected(2, 3, grid.num_tokens, 24, count=4)
    kernels = torch.randn(*([2] if own else []), 72, kernel_size, kernel_size)
    tensors = y, v, kernels, torch.randn(72), gate

    def branch(*given, backend=None):
        return ops.add_local(*given, grid=grid, kv_grid=grid, backend=backend)

    expected = gradients_of(branch, [x.double() for x in tensors], weight.double())
    got = gradients_of(lambda *given: branch(*given, backend="native"), tensors, weight)
    for one, other in zip(got, expected, strict=True):
        assert_close(one.double(), other, rtol=1e-3, atol=1e-4 * other.abs().max().item())
    y.requires_grad_()
    (grad,) = torch.autograd.grad(branch(y, v, kernels, backend="native").sum(), y)
    assert (grad == 1).all()


@pytest.fixture
def gradient_kernels(monkeypatch):
    """The names of the gradient operators that are really run."""
    called = []
    for name, operator in OPERATORS.items():
        for backend, one in operator.implementations.items() if name.endswith("_gradient") else ():
            function = one.function
            noting = replace(one, function=lambda *x, name=name, function=function: called.append(name) or function(*x))
            monkeypatch.setitem(operator.implementations, backend, noting)
    return called


GRADIENT_CALLS = {
    "linear_attention_gradient": lambda x, few, grid: ops.linear_attention(x, x, x, backend="native"),
    **{
        f"{name}_gradient": lambda x, few, grid, name=name: getattr(ops, name)(x, x, x, backend="native")
        for name in TURNED
    },
    "inline_attention_gradient": lambda x, few, grid: ops.inline_attention(x, x, x, backend="native"),
    "focus_gradient": lambda x, few, grid: kernels.run(
        kernels.focus, "native", focused_formula._focused, (x, torch.ones(3, 1, 16)), (3.0,)
    ),
    "pola_attention_gradient": lambda x, few, grid: ops.pola_attention(x, x, x, torch.ones(3, 1, 16), backend="native"),
    "agent_attention_gradient": lambda x, few, grid: ops.agent_attention(
        x, few, x, x, torch.randn(3, 4, grid.num_tokens), torch.randn(3, grid.num_tokens, 4), backend="native"
    ),
    "depthwise_gradient": lambda x, few, grid: ops.add_local(
        x, x, torch.randn(48, 3, 3), grid=grid, kv_grid=grid, backend="native"
    ),
    "pool_gradient": lambda x, few, grid: ops.pool_tokens(x, grid, TokenGrid(2, 2), backend="native"),
    "soft_gather_gradient": lambda x, few, grid: kernels.run(
        kernels.soft_gather, "native", soft_formula._gather, (x, few, x), (1.0,)
    ),
    "soft_spread_gradient": lambda x, few, grid: kernels.run(
        kernels.soft_spread, "native", soft_formula._spread, (x, few, few), (1.0,)
    ),
    "newton_inverse_gradient": lambda x, few, grid: ops.newton_inverse(ops.gaussian_kernel(few, few)),
}


@pytest.mark.parametrize(
    "name",
    sorted(
        name
        for name, operator in OPERATORS.items()
        if name.endswith("_gradient") and "native" in operator.implementations
    ),
)
def test_plain_gradients_are_the_kernels_own(name, gradient_kernels):
    grid = TokenGrid(5, 6)
    x, few = (torch.randn(2, 3, count, 16, requires_grad=True) for count in (30, 4))
    with use_backend("native"):
        torch.autograd.grad(GRADIENT_CALLS[name](x, few, grid).sum(), (x, few), allow_unused=True)
    assert gradient_kernels == [name]


@pytest.mark.parametrize("keys", [1, 2, 200])
@pytest.mark.parametrize("sharp", [1, 30, 300])
@pytest.mark.parametrize("mean", [0, 30])
def test_gradients_of_saturated_softmaxes_are_as_exact_as_eager_ones(keys, sharp, mean):
    """Where one token has all the weight, differences of nearly equal numbers are what is left."""
    (q, weight), (k, v) = projected(1, 2, 60, 64, count=2), projected(1, 2, keys, 64, count=2)
    tensors = q * sharp, torch.randn(1, 2, 9, 64), k * sharp, v + mean, torch.randn(2, 9, keys), torch.randn(2, 60, 9)

    def gradients(backend, tensors, weight):
        tensors = [tensor.detach().requires_grad_() for tensor in tensors]
        return torch.autograd.grad(ops.agent_attention(*tensors, backend=backend), tensors, weight)

    exact = gradients("eager", [x.double() for x in tensors], weight.double())
    # what a difference of products of gradients and values over the agents may be off by
    products = (weight.norm(dim=-1).max() * (v + mean).norm(dim=-1).max()).item() * 2e-7
    scales = {"q": 1, "agents": sharp * 60**0.5, "k": 0, "v": 0, "key_bias": 0, "query_bias": 1}
    ours, theirs = (gradients(backend, tensors, weight) for backend in ("native", "eager"))
    for (name, scale), wide, eager, got in zip(scales.items(), exact, theirs, ours, strict=True):
        off, allowed = ((x.double() - wide).abs().max().item() for x in (got, eager))
        # a weight is as exact as its logit, which is as large as the queries are sharp
        assert off <= 3 * allowed + products * scale + 1e-7 * (10 + sharp) * wide.abs().max().item(), name


def test_powers_and_exponentials_over_their_range():
    sizes = torch.logspace(-6, 3, 4000)
    q = (sizes * torch.randn(4000).sign())[torch.randperm(4000)].reshape(1, 1, -1, 8)
    k, v = torch.randn(1, 1, 30, 8).sign(), torch.randn(1, 1, 30, 8)
    for p in (1.0, 1.7, 3.0, 5.0):
        power = torch.full((1, 1, 8), p)
        got = ops.pola_attention(q, k, v, power, eps=0, backend="native")
        expected = ops.pola_attention(q.double(), k.double(), v.double(), power.double(), eps=0)
        assert_close(got.double(), expected, rtol=1e-4, atol=1e-6)
    x = torch.linspace(-100, 80, 5001).reshape(1, 1, -1, 1)
    got = ops.linear_attention(x, x, x, feature_map="elu", backend="native")
    assert_close(got.double(), ops.linear_attention(*(x.double(),) * 3, feature_map="elu"), rtol=1e-4, atol=1e-5)


def test_what_is_not_a_number_stays_so_and_stays_where_it_is():
    q, k, v = projected(1, 2, 40, 16, count=3)
    q = q.clone()
    q[0, 1, 3, 5] = float("nan")
    for operation, more in ((ops.linear_attention, ()), (ops.pola_attention, (torch.full((2, 1, 16), 2.0),))):
        y = operation(q, k, v, *more, backend="native")
        assert y[0, 1, 3].isnan().all() and y.isnan().sum() == 16


def test_what_is_infinite_has_the_feature_of_the_eager_form():
    q, k, v = projected(1, 2, 40, 16, count=3)
    q = q.clone()
    q[0, 1, 3, 5] = -float("inf")
    expected = ops.linear_attention(q, k, v, backend="eager")
    assert expected.isfinite().all()
    assert_close(ops.linear_attention(q, k, v, backend="native"), expected)


def test_asking_for_kernels_and_not_getting_them_is_an_error():
    q, k, v = projected(1, 2, 9, 16, count=3)
    refusals = {
        "fp32 bf16, and a tensor is fp64": (q.double(), k.double(), v.double()),
        "no padding": (q, k, v, torch.zeros(1, 9, dtype=torch.bool)),
        "side by side": (q.mT.contiguous().mT, k, v),
        "a tensor is on meta": (q.to("meta"), k, v),
    }
    for reason, tensors in refusals.items():
        with pytest.raises(SubquadError, match=reason) as caught:
            ops.linear_attention(*tensors, backend="native")
        assert "\n" not in str(caught.value)
    with pytest.raises(SubquadError, match="no gradients"):
        ops.polapp_attention(q.clone().requires_grad_(), k, v, *torch.ones(2, 2, 1, 32), backend="native")
    with use_backend("native"), pytest.raises(SubquadError, match="linear attention"):
        ops.linear_attention(q.double(), k.double(), v.double())
    with pytest.raises(SubquadError, match="unknown backend 'nativ': did you mean native"), use_backend("nativ"):
        pass


def test_auto_takes_kernels_where_they_can_and_the_eager_form_elsewhere(monkeypatch):
    (q,) = projected(1, 2, 9, 16)
    linear, polapp = kernels.linear_attention, kernels.polapp_attention
    assert choose(linear, (q,)) == "native"
    assert choose(linear, (q.double(),)) is None and choose(linear, (q,), cannot="reason") is None
    learned = q.clone().requires_grad_()
    more = None, None, None, None, None, None, True, 1e-6
    assert choose(polapp, (learned,), more) is None and choose(linear, (learned,)) == "native"
    with torch.no_grad():
        assert choose(polapp, (learned,), more) == "native"
    with use_backend("eager"):
        assert choose(linear, (q,)) is None and choose(linear, (q,), backend="native") == "native"
    monkeypatch.setattr(backends, "_asked", "eager")
    assert choose(linear, (q,)) is None
    monkeypatch.undo()
    seen = []
    torch.func.vmap(lambda x: seen.append(choose(linear, (x,))) or x)(q)
    assert seen == [None]


def test_a_kernel_says_itself_what_it_has_no_gradient_for():
    grid, (v,) = TokenGrid(12, 12), projected(1, 2, 144, 8)
    weight = torch.randn(16, 11, 11, requires_grad=True)
    assert choose(kernels.depthwise, (v, weight, None), (grid.shape,)) is None
    with pytest.raises(SubquadError, match="a kernel of 11 has no gradient there, only those up to 9"):
        ops.add_local(v, v, weight, grid=grid, kv_grid=grid, backend="native")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once_whether_a_kernel_takes_it_or_it_is_raised_in_front_of_it(dtype):
    q, k, v = (x.to(dtype) for x in projected(1, 2, 30, 8, count=3))
    power, few = torch.full((2, 1, 8), 2.0), torch.randn(1, 2, 4, 8).to(dtype)
    for call in (
        lambda backend: ops.linear_attention(q, k, v, backend=backend),
        lambda backend: ops.inline_attention(q, k, v, backend=backend),
        lambda backend: ops.pola_attention(q, k, v, power, backend=backend),
        lambda backend: ops.soft_attention(q, few, v, backend=backend),
    ):
        got, expected = call("native"), call("eager")
        assert got.dtype == expected.dtype == dtype
        # both are computed in fp32: what is left is one rounding
        assert_close(got.float(), expected.float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.fixture
def second_backend(monkeypatch):
    """Another backend for CPUs, in fp32 and fp64, behind the one of the library."""
    monkeypatch.setattr(backends, "KERNELS", dict(backends.KERNELS))
    monkeypatch.setattr(choosing, "KERNELS", backends.KERNELS)
    monkeypatch.setattr(declaring, "KERNELS", backends.KERNELS)
    monkeypatch.setattr(backends, "BACKENDS", dict(backends.BACKENDS))
    dtypes = torch.float32, torch.float64
    kernels.register_backend(Backend("second", "another", devices=("cpu",), dtypes=dtypes, missing=lambda: None))
    monkeypatch.setattr(kernels.inline_attention, "implementations", dict(kernels.inline_attention.implementations))
    kernels.implements(kernels.inline_attention, "second")(lambda q, k, v: torch.full_like(q, 7))
    return "second"


def test_the_backend_that_was_asked_for_is_the_one_that_runs(second_backend):
    q, k, v = projected(1, 2, 9, 16, count=3)
    expected = ops.inline_attention(q, k, v, backend="eager")
    assert_close(ops.inline_attention(q, k, v, backend="native"), expected)
    assert (ops.inline_attention(q, k, v, backend=second_backend) == 7).all()
    with use_backend(second_backend):
        assert (ops.inline_attention(q, k, v) == 7).all()
    # of several on one device the first that can
    assert_close(ops.inline_attention(q, k, v), expected)
    assert (ops.inline_attention(*(x.double() for x in (q, k, v))) == 7).all()
    with pytest.raises(SubquadError, match='backend "second" has no kernel for linear attention'):
        ops.linear_attention(q, k, v, backend=second_backend)


def test_nothing_is_registered_twice(second_backend):
    with pytest.raises(SubquadError, match='backend "second" has a kernel for InLine attention already'):
        kernels.implements(kernels.inline_attention, second_backend)(lambda q, k, v: q)
    with pytest.raises(SubquadError, match='there is a backend "second" already'):
        kernels.register_backend(backends.KERNELS[second_backend])
    with pytest.raises(SubquadError, match='there is no backend "third"'):
        kernels.implements(kernels.inline_attention, "third")(lambda q, k, v: q)


def test_what_a_backend_has_no_kernel_for_is_eager_unless_that_very_call_asks(monkeypatch):
    q, k, v = projected(1, 2, 9, 16, count=3)
    monkeypatch.delitem(kernels.inline_attention.implementations, "native")
    expected = ops.inline_attention(q, k, v, backend="eager")
    with use_backend("native"):
        assert torch.equal(ops.inline_attention(q, k, v), expected)
    with pytest.raises(SubquadError, match='backend "native" has no kernel for InLine attention'):
        ops.inline_attention(q, k, v, backend="native")


def test_the_context_holds_inside_compiled_code():
    q, k, v = projected(1, 2, 9, 16, count=3)
    graphs = []
    compiled = torch.compile(
        lambda *x: ops.inline_attention(*x), backend=lambda graph, _: graphs.append(str(graph.graph)) or graph
    )
    results = []
    for backend in ("native", "auto", "eager", "native"):
        with use_backend(backend):
            results.append(compiled(q, k, v))
    assert ["subquad.inline_attention" in graph for graph in graphs] == [True, True, False]
    assert_close(results[0], results[2], rtol=1e-5, atol=1e-5)
    assert torch.equal(results[0], results[3])
    with use_backend("native"), pytest.raises(Exception, match="InLine attention: it computes in fp32 bf16"):
        compiled(q.double(), k.double(), v.double())


def test_what_is_exported_has_none_of_our_operators():
    class Mix(torch.nn.Module):
        def forward(self, q, k, v):
            return ops.inline_attention(q, k, v)

    exported = torch.export.export(Mix(), projected(1, 2, 9, 16, count=3))
    assert "subquad" not in str(exported.graph)


def test_operations_are_operators_of_torch():
    q, k, v = projected(1, 2, 12, 16, count=3)
    few, power = torch.randn(1, 2, 4, 16), torch.full((2, 1, 16), 2.0)
    bias, tables = torch.randn(2, 4, 12), (*(torch.randn(2, 4, n) for n in (3, 4)), None)
    tables = torch.randn(2, 4, 2, 2), *tables
    gram, turns = torch.eye(4).expand(2, 4, 4), (torch.ones(12, 16), torch.zeros(12, 16))
    calls = {
        kernels.linear_attention: (q, k, v, "relu", 1e-6),
        kernels.linear_sums: (k, v, "relu"),
        kernels.linear_answers: (q, torch.rand(1, 2, 16, 17), 12, "relu", 1e-6),
        kernels.inline_attention: (q, k, v),
        kernels.pola_attention: (q, k, v, power, None, None, 1e-6),
        kernels.polapp_attention: (q, k, v, *torch.rand(2, 2, 1, 32), None, None, True, 1e-6),
        kernels.agent_attention: (q, few, k, v, bias, bias),
        kernels.agent_attention_of_tables: (q, few, k, v, *tables, *tables),
        OPERATORS["linear_attention_gradient"]: (q, q, k, v, "elu", 1e-6),
        OPERATORS["inline_attention_gradient"]: (q, q, k, v),
        **{OPERATORS[name]: (q, k, v, *turns, True, 1e-6) for name in TURNED},
        **{OPERATORS[f"{name}_gradient"]: (q, q, k, v, *turns, True, 1e-6) for name in TURNED},
        kernels.ttt_unit: (q, k, v, *torch.randn(2, 2, 16, 16), *turns, True, 0.3),
        kernels.focus: (q, power, 3.0),
        OPERATORS["focus_gradient"]: (q, q, power, 3.0),
        OPERATORS["pola_attention_gradient"]: (q, q, k, v, power, None, None, 1e-6),
        OPERATORS["agent_attention_gradient"]: (q, q, few, k, v, bias, bias),
        kernels.local_branch: (q.clone(), v, None, torch.randn(32, 3, 3), None, [3, 4]),
        kernels.depthwise: (v, torch.randn(32, 3, 3), torch.randn(32), [3, 4]),
        OPERATORS["depthwise_gradient"]: (q, v, torch.randn(32, 3, 3), [3, 4]),
        kernels.pool: (q, [3, 4], [2, 2]),
        OPERATORS["pool_gradient"]: (few, q, [3, 4], [2, 2]),
        kernels.convolve_windows: (q, torch.randn(16, 16, 2, 2), 3, 4),
        kernels.soft_gather: (q, few, v, 1.0),
        kernels.soft_spread: (q, few, few, 1.0),
        OPERATORS["soft_gather_gradient"]: (few, q, few, v, 1.0),
        OPERATORS["soft_spread_gradient"]: (q, q, few, few, 1.0),
        OPERATORS["newton_inverse_gradient"]: (gram, gram, torch.full((2, 1, 1), 0.1), 3),
        kernels.newton_inverse: (gram, torch.full((2, 1, 1), 0.1), 3),
        kernels.mlp: (*(torch.randn(shape) for shape in ((2, 9, 4), 4, 4, (6, 4), 6, (4, 6), 4)), None, 1e-6),
    }
    assert {one.name for one in calls} == {name for name, one in OPERATORS.items() if "native" in one.implementations}
    for operator, arguments in calls.items():
        torch.library.opcheck(
            operator.packet.default, (*arguments, "native"), test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize("name", sorted(ATTENTION.keys() - WITHOUT))
def test_operations_are_counted(name):
    model = subquad.create_model("deit_tiny", attention=name, img_size=64, depths=(1,))
    counts = {}
    for backend in ("eager", "native"):
        with torch.no_grad(), use_backend(backend), FlopCounterMode(display=False) as counter:
            model.eval()(torch.randn(1, 3, 64, 64))
        counts[backend] = counter.get_total_flops()
    assert counts["native"] == pytest.approx(counts["eager"], rel=0.02)


def test_without_a_compiler_there_is_a_reason_and_the_eager_form(monkeypatch, tmp_path):
    (q,) = projected(1, 2, 9, 16)
    expected = ops.linear_attention(q, q, q, backend="eager")
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path))
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'x.cpp:1: error: nothing works' >&2; exit 1\n")
    broken.chmod(0o755)
    for compiler, reason in (
        (str(broken), "c\\+\\+ failed: x.cpp:1: error: nothing works"),
        (None, "no C\\+\\+ compiler"),
    ):
        monkeypatch.setattr(library.shutil, "which", lambda name, found=compiler: found)
        library._state.cache_clear()
        with pytest.raises(SubquadError, match=reason):
            ops.linear_attention(q, q, q, backend="native")
        assert torch.equal(ops.linear_attention(q, q, q), expected)
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".so"]
    monkeypatch.undo()
    library._state.cache_clear()
    assert library.missing() is None


@pytest.mark.parametrize("name", ATTENTION)
def test_nothing_is_held_after_a_step(name):
    """A function that is kept for the backward pass and holds a tensor of the graph would keep all of it for good."""
    grid = TokenGrid(4, 4)
    settings = {"num_agents": 4} if "num_agents" in settings_of(name) else {}
    module = ATTENTION[name](16, 2, grid=grid, kv_grid=grid, **settings)
    supply = {
        key: None if tensor is None else tensor.float().requires_grad_() * 1
        for key, tensor in inputs_of(module, grid, dim=16).items()
    }
    held = [weakref.ref(tensor) for tensor in supply.values() if tensor is not None]
    y = module(**supply, grid=grid, kv_grid=grid)
    held.append(weakref.ref(y))
    y.sum().backward()
    del y, supply
    assert not [reference for reference in held if reference() is not None]


@pytest.mark.slow
def test_the_environment_says_what_holds_where_nothing_was_said():
    code = "import torch; from subquad import kernels; print(kernels.choose(kernels.pool, (torch.ones(1, 1, 1, 1),)))"
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "SUBQUAD_BACKEND": "eager"}, capture_output=True, text=True
    )
    assert run.stdout == "None\n", run.stderr


def test_every_function_of_the_source_refuses_lengths_that_do_not_fit():
    """One that is not named in FUNCTIONS would give back what nobody wrote to."""
    sources = (Path(library.__file__).parent / "source").glob("*.h")
    named = {name for source in sources for name in re.findall(r"^KERNEL\(\s*(\w+)", source.read_text(), re.M)}
    assert named == set(library.FUNCTIONS)
