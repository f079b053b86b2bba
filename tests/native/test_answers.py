"""The CPU kernels' answers against the eager form in float64, over widths, lengths, grids and sizes of numbers."""

from functools import partial

import pytest
import torch
from mechanisms import inputs_of, without_refused_prefix
from native_inputs import GRIDS, WITHOUT, projected
from operator_calls import TURNED
from torch.testing import assert_close

from subquad import ATTENTION, SubquadError, TokenGrid, ops
from subquad.attention.mhla import MHLAAttention
from subquad.kernels import unavailable, use_backend
from subquad.models.assembling import settings_of
from subquad.ops.branch_at_once import (
    linear_branch_answers,
    linear_branch_sums,
    map_filter,
    norm_projection,
    projection_residual,
)
from subquad.ops.linear_formula import linear_sums
from subquad.ops.mlp_formula import ACTIVATIONS
from subquad.positions import BiasTables
from subquad.rope import rotation_of

pytestmark = pytest.mark.skipif(unavailable("native") is not None, reason=f"no kernels: {unavailable('native')}")

WIDTHS = [7, 16, 24, 64, 130]


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


BEHIND = {"gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu, "nothing": lambda x: x}
"""What stands behind a projection or a filter, by its name."""
GELUS = {
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_activations_over_their_range(name, dtype, backend):
    hidden, some = torch.linspace(-40, 40, 301).to(dtype), torch.zeros(301, dtype=dtype)
    # what is projected is nothing, and the bias goes through alone
    eye, x = torch.eye(301, dtype=dtype), torch.zeros(1, 2, 301, dtype=dtype)
    got = ops.mlp_branch(x, some, some, eye, hidden, eye, some, activation=name, backend=backend)
    wanted = GELUS[name](hidden.double()).expand(got.shape)
    assert_close(
        got.double(),
        wanted,
        **({"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 4e-4}),
    )


@pytest.mark.parametrize("missing", [1, 2, 4, 6])
def test_an_mlp_without_factors_or_biases_goes_its_steps(missing):
    numbers = [torch.randn(shape) for shape in ((1, 2, 4), 4, 4, (6, 4), 6, (4, 6), 4)]
    numbers[missing] = None
    assert_close(ops.mlp_branch(*numbers), ops.mlp_branch(*numbers, backend="eager"))


def test_an_unknown_activation_is_refused():
    numbers = [torch.zeros(shape) for shape in ((1, 2, 4), 4, 4, (6, 4), 6, (4, 6), 4)]
    with pytest.raises(ValueError, match="activation must be one of gelu, gelu_tanh, quick_gelu, not 'relu'"):
        ops.mlp_branch(*numbers, activation="relu")
    with pytest.raises(ValueError, match="activation must be one of gelu, silu, nothing, not 'gelu_tanh'"):
        norm_projection(*numbers[:5], eps=1e-6, activation="gelu_tanh")


def test_what_is_not_a_number_stays_so_and_stays_where_it_is():
    q, k, v = projected(1, 2, 40, 16, count=3)
    q = q.clone()
    q[0, 1, 3, 5] = float("nan")
    for operation, more in ((ops.linear_attention, ()), (ops.pola_attention, (torch.full((2, 1, 16), 2.0),))):
        y = operation(q, k, v, *more, backend="native")
        assert y[0, 1, 3].isnan().all() and y.isnan().sum() == 16


@pytest.mark.parametrize("size", [1e5, 1e10])
def test_scores_of_offsets_may_be_of_any_size(size):
    grid = TokenGrid(7, 8)
    q, k, v = projected(2, 2, grid.num_tokens, 20, count=3)
    expected = ops.circulant_attention((size * q).double(), (size * k).double(), v.double(), grid=grid)
    got = ops.circulant_attention(size * q, size * k, v, grid=grid, backend="native")
    assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_what_is_infinite_has_the_feature_of_the_eager_form():
    q, k, v = projected(1, 2, 40, 16, count=3)
    q = q.clone()
    q[0, 1, 3, 5] = -float("inf")
    expected = ops.linear_attention(q, k, v, backend="eager")
    assert expected.isfinite().all()
    assert_close(ops.linear_attention(q, k, v, backend="native"), expected)


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tokens", [1, 17, 197, 500])
@pytest.mark.parametrize(("width", "has_bias"), [(20, False), (20, True), (11, True)])
def test_both_steps_of_a_branch_at_any_length(batch, tokens, width, has_bias, threads):
    heads = 3
    dim = heads * width
    draw = partial(torch.randn, dtype=torch.float64)
    x, norm, bias, qkv = draw(batch, tokens, dim), 1 + 0.1 * draw(dim), draw(dim), draw(3 * dim, dim) / dim**0.5
    proj, proj_bias = draw(dim, dim) / dim**0.5, draw(dim)
    qkv_bias = 0.3 * draw(3 * dim) if has_bias else None
    fused = torch.nn.functional.linear(torch.nn.functional.layer_norm(x, (dim,), norm, bias, 1e-6), qkv, qkv_bias)
    q, k, v = fused.unflatten(-1, (3, heads, width)).permute(2, 0, 3, 1, 4)
    y = ops.linear_attention(q, k, v).transpose(1, 2).flatten(2)
    expected = x + y @ proj.mT + proj_bias
    given = [one.float() for one in (x, norm, bias)]
    of_queries, of_others = (None, None) if qkv_bias is None else qkv_bias.float().split([dim, 2 * dim])
    settings = {"norm_eps": 1e-6, "feature_map": "relu"}
    sums = linear_branch_sums(*given, qkv[dim:].float(), of_others, num_heads=heads, **settings)
    assert_close(sums.double(), linear_sums(k, v), rtol=1e-5, atol=1e-4)
    behind = sums, proj.float(), proj_bias.float(), None
    answers = linear_branch_answers(*given, qkv[:dim].float(), of_queries, *behind, count=tokens, **settings)
    assert_close(answers.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize(("tokens", "width", "rows"), [(1, 20, 60), (17, 33, 7), (197, 64, 192), (70, 20, 400)])
@pytest.mark.parametrize("keeps", [False, True])
def test_what_lies_around_a_mechanism_at_any_length(tokens, width, rows, keeps, threads):
    draw = partial(torch.randn, dtype=torch.float64)
    x, norm, bias, weight = draw(2, tokens, width), 1 + 0.1 * draw(width), draw(width), draw(rows, width) / width**0.5
    x[:, 0] *= 1e-3  # so that the norm's eps is felt
    normed = torch.nn.functional.layer_norm(x, (width,), norm, bias, 1e-6)
    expected = torch.cat([normed @ weight.mT, normed], dim=-1) if keeps else normed @ weight.mT
    given = [one.float() for one in (x, norm, bias, weight)]
    projected = norm_projection(*given, None, eps=1e-6, keeps=keeps)
    assert_close(projected.double(), expected, rtol=1e-4, atol=1e-4)
    # from tokens that lie among others, as half of what a mechanism mixed
    y, back, more = draw(2, tokens, 2 * rows)[..., rows:], draw(width, rows) / rows**0.5, draw(width)
    answers = projection_residual(given[0], y.float(), back.float(), more.float(), None)
    assert_close(answers.double(), x + y @ back.mT + more, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize(("size", "width"), [((1, 1), 5), ((3, 8), 33), ((14, 9), 64), ((2, 40), 20)])
@pytest.mark.parametrize("side", [3, 5, 11])
@pytest.mark.parametrize("prefix", [0, 2])
def test_tokens_that_are_filtered_on_maps_of_any_size(size, width, side, prefix, threads):
    draw = partial(torch.randn, dtype=torch.float64)
    # as a convolution makes them: channel by channel
    image, weight, bias, first = draw(2, width, *size), draw(width, side, side), draw(width), draw(2, prefix, width)
    x = torch.cat([first, image.flatten(2).mT], dim=1) if prefix else image.flatten(2).mT
    local = torch.nn.functional.conv2d(image, weight[:, None], padding=side // 2, groups=width).flatten(2).mT
    for adds, activation, given in (
        (True, "gelu", bias),
        (True, "nothing", None),
        (False, "silu", bias),
        (False, "gelu", None),
    ):
        behind = local + x[:, prefix:] * adds + (0 if given is None else given)
        expected = torch.cat([first * adds, BEHIND[activation](behind)], dim=1)
        given = None if given is None else given.float()
        got = map_filter(x.float(), weight.float(), given, size, adds=adds, activation=activation)
        assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("activation", ["gelu", "silu", "nothing"])
def test_projections_behind_an_activation(activation, threads):
    draw = partial(torch.randn, dtype=torch.float64)
    x, norm, bias, weight, more = draw(2, 37, 20), 1 + 0.1 * draw(20), draw(20), draw(75, 20) / 20**0.5, draw(75)
    expected = torch.nn.functional.layer_norm(x, (20,), norm, bias, 1e-6) @ weight.mT + more
    expected = BEHIND[activation](expected)
    given = [one.float() for one in (x, norm, bias, weight, more)]
    assert_close(norm_projection(*given, eps=1e-6, activation=activation).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2, 3, 7], indirect=True)
@pytest.mark.parametrize("tokens", [1, 16, 17, 49, 100, 197, 321])
def test_tokens_that_threads_share_by_channels(tokens, threads):
    width, rows = 131, 530  # wide enough that it is worth it, and no multiple of anything
    draw = partial(torch.randn, dtype=torch.float64)
    x, norm, bias = draw(1, tokens, width), 1 + 0.1 * draw(width), draw(width)
    first, second = draw(rows, width) / width**0.5, draw(width, rows) / rows**0.5
    tensors = x, norm, bias, first, draw(rows), second, draw(width), draw(width)
    expected = ops.mlp_branch(*tensors, backend="eager")
    y = draw(1, tokens, rows)
    projected = x + tensors[-1] * (y @ second.mT + tensors[-2])
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        low = [one.to(dtype) for one in tensors]
        answers = projection_residual(low[0], y.to(dtype), low[5], low[6], low[7])
        assert_close(answers.double(), projected, rtol=tolerance, atol=tolerance)
        assert_close(ops.mlp_branch(*low, backend="native").double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("grid", [TokenGrid(1, 1), TokenGrid(5, 3, 2), TokenGrid(14, 14)], ids=str)
def test_blocks_of_any_size(grid, threads):
    module = MHLAAttention(36, 3, grid=grid, kv_grid=grid, num_pieces=6, local=False)
    q, k, v = projected(2, 3, grid.num_tokens, 12, count=3)
    with torch.no_grad():
        got = module(q, k, v, grid=grid, kv_grid=grid)
        weights = module.double().weights(q.double(), k.double(), grid=grid, kv_grid=grid)[:, :, 0]
    assert_close(got.double(), weights @ v.double(), rtol=1e-4, atol=1e-5)
