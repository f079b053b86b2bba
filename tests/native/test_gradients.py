"""The CPU kernels' gradients against those of the eager form in float64."""

from dataclasses import replace

import pytest
import torch
from native_inputs import GRIDS, projected
from operator_calls import TURNED
from operator_numbers import GRID, rotation_tables
from torch.testing import assert_close

from subquad import TokenGrid, kernels, ops
from subquad.kernels import OPERATORS, unavailable, use_backend
from subquad.ops import mhla_formula, soft_formula, ttt_formula
from subquad.ops.turning import turned_tokens
from subquad.positions import BiasTables, GridBias
from subquad.rope import Rotation, rotation_of

pytestmark = pytest.mark.skipif(unavailable("native") is not None, reason=f"no kernels: {unavailable('native')}")


def gradients_of(function, tensors, weight):
    """Gradients of a weighted sum, by `autograd.grad` alone and with a graph, and of the sum of their squares.

    With a graph the eager form is what is differentiated: only without one are the kernels' own gradients computed.
    """
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    plain = torch.autograd.grad((function(*tensors) * weight).sum(), tensors)
    first = torch.autograd.grad((function(*tensors) * weight).sum(), tensors, create_graph=True)
    second = torch.autograd.grad(sum(grad.square().sum() for grad in first), tensors, allow_unused=True)
    return [*plain, *first, *(grad for grad in second if grad is not None)]


def hold_gradients(function, tensors, weight):
    """Assert that the kernels' gradients are those of the eager form in float64; `function` takes a `backend`."""
    expected = gradients_of(function, [x.double() for x in tensors], weight.double())
    got = gradients_of(lambda *given: function(*given, backend="native"), tensors, weight)
    for one, other in zip(got, expected, strict=True):
        assert_close(one.double(), other, rtol=1e-3, atol=1e-4 * other.abs().max().item())


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
    hold_gradients(operation, (q, k, v), weight)


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


@pytest.mark.parametrize("tables", ["mala", "mlla"])
@pytest.mark.parametrize("width", [7, 16, 20, 40])
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize(("size", "features"), [(1e-4, 2), (1, 1), (1, 2), (60, 2)])
def test_exponentials_of_both_signs_turned_and_at_any_size(tables, width, threads, size, features):
    """A host's rotation may be of heads, not of features: both halves turn alike then."""
    cos, sin, interleaved = rotation_tables(width, tables, features)
    q, k, v, weight = projected(2, 3, GRID.num_tokens, width, count=4)
    tensors = q * size, k * size, v, *torch.rand(2, 3, 1, 2 * width)

    def mix(*given, **more):
        turn = rotation_of(*(None if x is None else x.to(given[0].dtype) for x in (cos, sin)), interleaved)
        return ops.polapp_attention(*given, rotation=turn, **more)

    def results(given, **more):
        answers = mix(*given, **more)
        # those of the largest exponents leave the range of fp32
        count = len(tensors) if size <= 1 else 0
        return [answers, *gradients_of(lambda *x: mix(*x, **more), given, weight.to(answers.dtype))[:count]]

    exact = results([x.double() for x in tensors])
    got, eager = (results(tensors, backend=name) for name in ("native", "eager"))
    for one, other, expected in zip(got, eager, exact, strict=True):
        off, allowed = ((x.double() - expected).norm() for x in (one, other))
        assert off <= 3 * allowed + 1e-6 * expected.norm()


@pytest.mark.parametrize("tables", ["mlla", None])
@pytest.mark.parametrize("width", [7, 16, 20, 40])
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
def test_gradients_of_a_unit_that_is_trained_on_the_way(tables, width, threads):
    cos, sin, interleaved = rotation_tables(width, tables) if tables else (None, None, True)
    q, k, v, weight = projected(2, 3, GRID.num_tokens, width, count=4)

    def mix(*given, **more):
        turn = rotation_of(*(None if x is None else x.to(given[0].dtype) for x in (cos, sin)), interleaved)
        return ops.ttt_unit(*given, rotation=turn, **more)

    hold_gradients(mix, (q, k, 9 * v, *(torch.randn(2, 3, width, width) / width**0.5)), weight)


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
def test_gradients_of_exponentials_of_both_signs(threads):
    (q, weight), (k, v) = projected(2, 3, 70, 12, count=2), projected(2, 3, 130, 12, count=2)
    hold_gradients(ops.polapp_attention, (q, k, v, *torch.rand(2, 3, 1, 24)), weight)


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
    hold_gradients(ops.agent_attention, tensors, weight)


@pytest.mark.parametrize("width", [7, 16, 40])
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("power", [1.5, 3])
def test_gradients_of_focused_attention(width, threads, power):
    (q, weight), (k, v) = projected(2, 3, 70, width, count=2), projected(2, 3, 130, width, count=2)

    def mix(q, k, v, temperature, *positions, backend=None):
        return ops.focused_attention(q, k, v, temperature, None, *positions, power=power, backend=backend)

    tensors = q, k, v, 0.5 + torch.rand(3, 1, width)
    for positions in ((), (torch.randn(3, 130, width),)):
        hold_gradients(mix, (*tensors, *positions), weight)


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
        hold_gradients(mix, tensors, weight)


@pytest.mark.parametrize("width", [7, 16, 40])
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("grid", [TokenGrid(2, 2), TokenGrid(5, 3, 2), TokenGrid(20, 21)], ids=str)
def test_gradients_of_states_of_blocks(grid, width, threads):
    q, k, v, weight = projected(2, 3, grid.num_tokens, width, count=4)
    blocks = 6 + min(grid.prefix, 1)

    def mix(*tensors, backend="auto"):
        with use_backend(backend):
            return ops.mhla_attention(*tensors, grid=grid, kv_grid=grid, pieces=(2, 3))

    scales = (0.5 + torch.rand(3, 1, width) for _ in range(2))
    hold_gradients(mix, (q, k, v, torch.rand(blocks, blocks), *scales), weight)


@pytest.mark.parametrize("width", [7, 16, 40])
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("grid", [(1, 1), (1, 26), (8, 9), (22, 15), (37, 4)])
def test_gradients_of_correlations_on_a_torus(grid, width, threads):
    grid = TokenGrid(*grid)
    q, k, v, weight = projected(2, 3, grid.num_tokens, width, count=4)

    def mix(*tensors, backend=None):
        return ops.circulant_attention(*tensors, grid=grid, backend=backend)

    assert_close(mix(q, k, v, backend="native").double(), mix(q.double(), k.double(), v.double()), rtol=1e-4, atol=1e-5)
    hold_gradients(mix, (q, k, v), weight)


@pytest.mark.parametrize("sizes", [(100, 1, 1), (1, 100, 1), (1, 1, 1e-30), (1e-20, 1, 1), (1, 1, 1e20)])
def test_gradients_of_correlations_where_numbers_are_of_many_sizes(sizes):
    """Of channels that saturate slopes are of 1e-37 and less, which nothing is to be divided by."""
    grid = TokenGrid(14, 14)
    q, k, v, weight = projected(2, 2, grid.num_tokens, 24, count=4)
    tokens = [size * x for size, x in zip(sizes, (q, k, v), strict=True)]
    found = {}
    for dtype, backend in ((torch.float64, "eager"), (torch.float32, "native")):
        given = [x.to(dtype).requires_grad_() for x in tokens]
        y = ops.circulant_attention(*given, grid=grid, backend=backend)
        found[backend] = [x.double() for x in (y, *torch.autograd.grad(y, given, weight.to(dtype)))]
    for wanted, got in zip(found["eager"], found["native"], strict=True):
        assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize(("offset", "spread", "width"), [(60, 1, 16), (-100, 1, 16), (300, 1, 7), (0, 60, 2)])
def test_gradients_of_streams_without_partners_are_as_exact_as_eager_ones(offset, spread, width):
    """Their divisors are of 1e-38, whose squares no number holds."""
    q, k, v, weight = projected(2, 3, 40, width, count=4)
    gains = [torch.rand(3, 1, 2 * width) for _ in range(2)]
    found = {}
    for name, dtype, backend in (
        ("exact", torch.float64, "eager"),
        ("eager", torch.float32, "eager"),
        ("native", torch.float32, "native"),
    ):
        given = [(offset + spread * x).to(dtype).requires_grad_() for x in (q, k)]
        y = ops.polapp_attention(*given, v.to(dtype), *(one.to(dtype) for one in gains), backend=backend)
        found[name] = [x.double() for x in (y, *torch.autograd.grad(y, given, weight.to(dtype)))]
    for exact, eager, native in zip(*found.values(), strict=True):
        scale = exact.abs().max()
        assert native.isfinite().all()
        assert (native - exact).abs().max() <= 4 * (eager - exact).abs().max() + 1e-5 * scale


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
    hold_gradients(mix, tensors, weight)


@pytest.mark.parametrize("width", [7, 16, 40])
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("count", [4, 17])
def test_gradients_of_gaussian_maps(width, threads, count):
    x, v, weight = projected(2, 3, 130, width, count=3)

    def mix(x, landmarks, v, **more):
        return ops.soft_attention(x, landmarks, v, inverse="cholesky", scale=0.3, **more)

    tensors = x, 0.3 * torch.randn(2, 3, count, width), v
    hold_gradients(mix, tensors, weight)


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

    hold_gradients(branch, tensors, weight)
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


def kept_natively(name):
    """Whether this operator's kernel keeps something for its gradient."""
    return "native" in OPERATORS[f"{name}_keeping"].implementations if f"{name}_keeping" in OPERATORS else False


GRADIENT_CALLS = {
    "linear_attention_gradient": lambda x, few, grid: ops.linear_attention(x, x, x, backend="native"),
    **{
        f"{name}_gradient": lambda x, few, grid, name=name: getattr(ops, name)(x, x, x, backend="native")
        for name in TURNED
    },
    "inline_attention_gradient": lambda x, few, grid: ops.inline_attention(x, x, x, backend="native"),
    "focused_attention_gradient": lambda x, few, grid: ops.focused_attention(
        x, x, x, torch.ones(3, 1, 16), power=3, backend="native"
    ),
    "ttt_unit_gradient": lambda x, few, grid: ops.ttt_unit(x, x, x, *torch.randn(2, 3, 16, 16), backend="native"),
    "circulant_attention_gradient": lambda x, few, grid: ops.circulant_attention(x, x, x, grid=grid, backend="native"),
    "polapp_attention_gradient": lambda x, few, grid: ops.polapp_attention(
        x, x, x, *torch.ones(2, 3, 1, 32), backend="native"
    ),
    "mhla_sums_gradient": lambda x, few, grid: kernels.run(
        kernels.mhla_sums, "native", mhla_formula._sums, (x, x, torch.ones(3, 1, 16)), (grid.shape, (2, 2))
    ),
    "mhla_answers_gradient": lambda x, few, grid: kernels.run(
        kernels.mhla_answers,
        "native",
        mhla_formula._answers,
        (x, torch.rand(2, 3, 4, 16, 17), torch.ones(3, 1, 16)),
        (grid.shape, (2, 2)),
    ),
    "pola_attention_gradient": lambda x, few, grid: ops.pola_attention(x, x, x, torch.ones(3, 1, 16), backend="native"),
    "softmax_attention_gradient": lambda x, few, grid: ops.softmax_attention(x, x, x, backend="native"),
    "agent_attention_gradient": lambda x, few, grid: ops.agent_attention(
        x, few, x, x, torch.randn(3, 4, grid.num_tokens), torch.randn(3, grid.num_tokens, 4), backend="native"
    ),
    "agent_attention_of_tables_keeping_gradient": lambda x, few, grid: ops.agent_attention(
        x, few, x, x, *(GridBias(3, TokenGrid(2, 2), grid).tables(grid) for _ in range(2)), backend="native"
    ),
    "depthwise_gradient": lambda x, few, grid: ops.add_local(
        x, x, torch.randn(48, 3, 3), grid=grid, kv_grid=grid, backend="native"
    ),
    "map_products_gradient": lambda x, few, grid: ttt_formula.filter_sums(x, x, grid=grid, seen=grid),
    "turned_gradient": lambda x, few, grid: turned_tokens(Rotation(*torch.randn(2, 30, 16), True), x),
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
        # where something is kept for a gradient, that from scratch is for who calls it
        if name.endswith("_gradient")
        and "native" in operator.implementations
        and not kept_natively(name.removesuffix("_gradient"))
    ),
)
def test_plain_gradients_are_the_kernels_own(name, gradient_kernels):
    grid = TokenGrid(5, 6)
    x, few = (torch.randn(2, 3, count, 16, requires_grad=True) for count in (30, 4))
    with use_backend("native"):
        torch.autograd.grad(GRADIENT_CALLS[name](x, few, grid).sum(), (x, few), allow_unused=True)
    assert gradient_kernels == [name]


TABLE_GRIDS = [TokenGrid(2, 2), TokenGrid(1, 9, 2), TokenGrid(8, 8), TokenGrid(9, 13, 2), TokenGrid(3, 150, 1)]


@pytest.mark.parametrize("grid", TABLE_GRIDS, ids=str)
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("count", [4, 17])
def test_gradients_of_tables(grid, threads, count):
    """Of maps of one place and many, narrower and wider than the blocks, of which rows end within a piece of work."""
    tables = [torch.randn(3, count, *size) for size in ((7, 7), (grid.height,), (grid.width,), (grid.prefix,))]
    tables = tables if grid.prefix else tables[:3]
    (q, weight), (k, v) = (projected(2, 3, grid.num_tokens, 16, count=2) for _ in range(2))

    def mix(q, agents, k, v, *tables, **more):
        halves = tables[: len(tables) // 2], tables[len(tables) // 2 :]
        biases = (BiasTables(*half) if grid.prefix else BiasTables(*half, None) for half in halves)
        return ops.agent_attention(q, agents, k, v, *biases, **more)

    others = [torch.randn_like(table) for table in tables]
    hold_gradients(mix, (q, torch.randn(2, 3, count, 16), k, v, *tables, *others), weight)


@pytest.mark.parametrize("keys", [1, 2, 200])
@pytest.mark.parametrize("sharp", [1, 30, 300])
@pytest.mark.parametrize("mean", [0, 30])
@pytest.mark.parametrize("of_tables", [True, False], ids=["tables", "written"])
def test_gradients_of_saturated_softmaxes_are_as_exact_as_eager_ones(keys, sharp, mean, of_tables):
    """Where one token has all the weight, differences of nearly equal numbers are what is left."""
    (q, weight), (k, v) = projected(1, 2, 60, 64, count=2), projected(1, 2, keys, 64, count=2)
    tensors = q * sharp, torch.randn(1, 2, 9, 64), k * sharp, v + mean, torch.randn(2, 9, keys), torch.randn(2, 9, 60)

    def mix(*tensors, **more):
        *tokens, key_bias, query_bias = tensors
        if of_tables:
            nothing = key_bias.new_zeros(2, 9, 1, 1)
            biases = (BiasTables(nothing, nothing[..., 0], columns, None) for columns in (key_bias, query_bias))
        else:
            biases = key_bias, query_bias.mT
        return ops.agent_attention(*tokens, *biases, **more)

    def gradients(backend, tensors, weight):
        tensors = [tensor.detach().requires_grad_() for tensor in tensors]
        return torch.autograd.grad(mix(*tensors, backend=backend), tensors, weight)

    exact = gradients("eager", [x.double() for x in tensors], weight.double())
    # what a difference of products of gradients and values over the agents may be off by
    products = (weight.norm(dim=-1).max() * (v + mean).norm(dim=-1).max()).item() * 2e-7
    scales = {"q": 1, "agents": sharp * 60**0.5, "k": 0, "v": 0, "key_bias": 0, "query_bias": 1}
    ours, theirs = (gradients(backend, tensors, weight) for backend in ("native", "eager"))
    for (name, scale), wide, eager, got in zip(scales.items(), exact, theirs, ours, strict=True):
        off, allowed = ((x.double() - wide).abs().max().item() for x in (got, eager))
        # a weight is as exact as its logit, which is as large as the queries are sharp
        assert off <= 3 * allowed + products * scale + 1e-7 * (10 + sharp) * wide.abs().max().item(), name
