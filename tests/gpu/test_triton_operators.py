"""Every operator that has a Triton kernel against its definition in float64, and what only those of the map have."""

import pytest
import torch
from kernels_here import DEVICE, DTYPES, ROUNDING, needs_kernels, relative_error
from operator_calls import operator_calls

from subquad import SubquadError, TokenGrid, kernels, ops
from subquad.kernels import OPERATORS
from subquad.kernels.triton import launch, local_kernels, newton_kernels, pool_kernels
from subquad.rope import ROPES, AxialRope, Rotation

pytestmark = needs_kernels

NAMES = sorted(name for name in operator_calls(8) if "triton" in OPERATORS[name].implementations)


def here(tensor, dtype):
    return None if tensor is None else tensor.to(DEVICE, dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "width", [24, pytest.param(64, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
)
def test_results_are_those_of_the_definition(name, dtype, width):
    call = operator_calls(width)[name]
    tensors = [here(tensor, dtype) for tensor in call.tensors]
    expected = call.exact([here(tensor, torch.float64) for tensor in tensors])
    results = call.operator(*tensors, *call.settings, "triton")
    results = [tensors[0]] if results is None else [results] if isinstance(results, torch.Tensor) else results
    # the definition may say nothing of a gradient that nobody asks for
    found = [one for one in results if one is not None]
    for place, (one, other) in enumerate(zip(found, expected, strict=False)):
        assert one.shape == other.shape
        assert (error := relative_error(one, other)) < ROUNDING[dtype], f"{place}: {error:.1e}"


def convolved(v, grid, weight, bias=None):
    """A convolution of each image with its own kernels (b, h·d, k, k)."""
    images = [
        torch.nn.functional.conv2d(
            image[None], kernel[:, None], bias, padding=kernel.shape[-1] // 2, groups=len(kernel)
        )
        for image, kernel in zip(grid.to_map(v), weight, strict=True)
    ]
    return grid.to_heads(torch.cat(images), v.shape[1])


@pytest.mark.parametrize(("grid", "size"), [(TokenGrid(3, 5, 1), 5), (TokenGrid(1, 2), 3)])
@pytest.mark.parametrize("per_image", [False, True])
def test_kernels_of_any_size_and_of_each_image_have_gradients(grid, size, per_image):
    b, h, d = 2, 2, 6
    y, v, gate, grad = torch.randn(4, b, grid.num_tokens, h, d, device=DEVICE).transpose(2, 3).unbind(0)
    weight = torch.randn(*([b] if per_image else []), h * d, size, size, device=DEVICE)
    bias = torch.randn(h * d, device=DEVICE)

    def results(dtype, function):
        tensors = [tensor.detach().to(dtype).requires_grad_() for tensor in (y, v, gate, weight, bias)]
        result = function(*tensors)
        return [result, *torch.autograd.grad(result, tensors, grad.to(dtype))]

    found = results(
        torch.float32,
        lambda y, v, gate, *filters: ops.add_local(y, v, *filters, gate, grid=grid, kv_grid=grid, backend="triton"),
    )
    expected = results(
        torch.float64,
        lambda y, v, gate, weight, bias: (
            (y + convolved(v, grid, weight if per_image else weight.expand(b, -1, -1, -1), bias)) * gate
        ),
    )
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < ROUNDING[torch.float32]
    with torch.no_grad():
        at_once = ops.add_local(y.clone(), v, weight, bias, gate, grid=grid, kv_grid=grid, backend="triton")
    assert relative_error(at_once, expected[0]) < ROUNDING[torch.float32]


@pytest.mark.parametrize("programs", [1, 1000])
def test_gradients_of_taps_are_sums_over_all_tiles_of_a_program(programs, monkeypatch):
    monkeypatch.setattr(launch, "PROGRAMS", programs)
    monkeypatch.setattr(launch, "_processors", lambda device: launch.INTERPRETED_PROCESSORS)
    grid = TokenGrid(9, 13, 1)
    v, grad = torch.randn(2, 2, grid.num_tokens, 3, 6, device=DEVICE).transpose(2, 3).unbind(0)
    assert (launch.split_of(v, 32, more=1).pieces == 1) == (programs == 1)
    monkeypatch.setattr(local_kernels, "OF_ONE_WARP", 1)
    weight, bias = torch.randn(18, 5, 5, device=DEVICE), torch.randn(18, device=DEVICE)
    found = OPERATORS["depthwise_gradient"](grad, v, weight, list(grid.shape), "triton")
    given = [x.double().requires_grad_() for x in (v, weight, bias)]
    image = convolved(given[0], grid, given[1].expand(2, -1, -1, -1), given[2])
    for one, other in zip(found, torch.autograd.grad(image, given, grad.double()), strict=True):
        assert relative_error(one, other) < ROUNDING[torch.float32]


def test_what_is_infinite_beside_a_token_stays_out_of_the_gradients_of_others():
    grid = TokenGrid(2, 3, 1)
    v, grad = torch.randn(2, 1, 7, 1, 4, device=DEVICE).transpose(2, 3).unbind(0)
    v[0, 0, 0], grad[0, 0, 0] = float("inf"), float("nan")
    weight = torch.randn(4, 3, 3, device=DEVICE)
    _, dweight, dbias = OPERATORS["depthwise_gradient"](grad, v, weight, list(grid.shape), "triton")
    assert dweight.isfinite().all() and dbias.isfinite().all()


@pytest.mark.parametrize("bins", [(1, 1), (2, 5), (5, 2), (6, 17)])
def test_means_over_any_number_of_bins_have_gradients(bins):
    grid, bins = TokenGrid(5, 7, 1), TokenGrid(*bins)
    x = torch.randn(1, 36, 2, 10, device=DEVICE).transpose(1, 2)
    grad = torch.randn(1, 2, bins.num_tokens, 10, device=DEVICE)
    found = []
    for backend, dtype in (("triton", torch.float32), ("eager", torch.float64)):
        tokens = x.to(dtype).requires_grad_()
        means = ops.pool_tokens(tokens, grid, bins, backend=backend)
        found.append([means, *torch.autograd.grad(means, tokens, grad.to(dtype))])
    for one, other in zip(*found, strict=True):
        assert relative_error(one, other) < ROUNDING[torch.float32]


def test_no_place_lies_in_more_bins_than_are_looked_at():
    for size in range(1, 20):
        for count in range(1, 40):
            bins = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
            most = max(sum(first <= place < behind for first, behind in bins) for place in range(size))
            assert most <= pool_kernels.most_bins(size, count)


@pytest.mark.parametrize("count", [5, 33, 70])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_newtons_steps_and_their_gradients_are_those_of_the_eager_form(count, steps):
    assert count < 64 or count > newton_kernels.LARGEST
    points = torch.randn(2, 3, count, 8, device=DEVICE) * 0.5
    grad = torch.randn(2, 3, count, count, device=DEVICE)
    found = []
    for backend, dtype in (("triton", torch.float32), ("eager", torch.float64)):
        gram = ops.gaussian_kernel(points.to(dtype), points.to(dtype)).requires_grad_()
        alpha = (1 / gram.detach().sum(dim=-1).amax(dim=-1)[..., None, None].square()).requires_grad_()
        with kernels.use_backend(backend):
            inverse = ops.newton_inverse(gram, alpha, steps=steps)
        found.append([inverse, *torch.autograd.grad(inverse, (gram, alpha), grad.to(dtype))])
    for one, other in zip(*found, strict=True):
        assert relative_error(one, other) < ROUNDING[torch.float32]


@pytest.mark.parametrize(
    "name", ["mala", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mlla", "rala", "nala"))]
)
def test_features_that_are_turned_in_two_halves_have_gradients(name):
    grid = TokenGrid(3, 4, 1)
    rotation = AxialRope(12, 2, **ROPES["dinov3"])(grid, torch.device(DEVICE))
    assert not rotation.interleaved
    q, k, v, grad = torch.randn(4, 1, grid.num_tokens, 2, 12, device=DEVICE).transpose(2, 3).unbind(0)
    found = []
    for backend, dtype in (("triton", torch.float32), ("eager", torch.float64)):
        tensors = [tensor.detach().to(dtype).requires_grad_() for tensor in (q, k, v)]
        result = getattr(ops, f"{name}_attention")(*tensors, rotation=rotation, backend=backend)
        found.append([result, *torch.autograd.grad(result, tensors, grad.to(dtype))])
    for one, other in zip(*found, strict=True):
        assert relative_error(one, other) < ROUNDING[torch.float32]


# what is turned of sizes that are far apart outgrows its divisor, which is not turned: these sizes are for none
POLAPP_TABLES = {
    "none": (0.5, None, True),
    "none, beyond exp": (40, None, True),
    "pairs of all features": (0.5, 24, True),
    "pairs in each half": (2, 12, True),
    "two halves of each half": (2, 12, False),
}


@pytest.mark.parametrize(("size", "width", "interleaved"), POLAPP_TABLES.values(), ids=POLAPP_TABLES)
def test_polapps_features_are_turned_and_lowered_as_in_the_formula(size, width, interleaved):
    n, angles = 70, torch.randn(70, width or 1, device=DEVICE)
    rotation = None if width is None else Rotation(angles.cos(), angles.sin(), interleaved)
    q, k, v, grad = torch.randn(4, 2, n, 2, 12, device=DEVICE).transpose(2, 3).unbind(0)
    given = (size * q, size * k, v, *torch.rand(2, 2, 1, 24, device=DEVICE).unbind(0))
    found = []
    for backend, dtype in (("triton", torch.float32), ("eager", torch.float64)):
        tensors = [tensor.detach().to(dtype).requires_grad_() for tensor in given]
        turning = (
            rotation if rotation is None else Rotation(rotation.cos.to(dtype), rotation.sin.to(dtype), interleaved)
        )
        result = ops.polapp_attention(*tensors, rotation=turning, backend=backend)
        found.append([result, *torch.autograd.grad(result, tensors, grad.to(dtype))])
    for one, other in zip(*found, strict=True):
        assert relative_error(one, other) < 4 * ROUNDING[torch.float32]


def test_polapps_features_that_turn_across_both_halves_are_refused():
    q, k, v = torch.randn(3, 1, 2, 5, 12, device=DEVICE).unbind(0)
    spikes, angles = torch.rand(2, 1, 24, device=DEVICE), torch.randn(5, 24, device=DEVICE)
    with pytest.raises(SubquadError, match="these are turned across"):
        ops.polapp_attention(
            q, k, v, spikes, spikes, rotation=Rotation(angles.cos(), angles.sin(), False), backend="triton"
        )


def test_turned_features_that_these_kernels_do_not_take_are_refused_in_one_line():
    wide = torch.randn(3, 1, 1, 5, 66, device=DEVICE).unbind(0)
    with pytest.raises(SubquadError, match="heads of up to 64 channels there, and these have 66"):
        ops.mala_attention(*wide, backend="triton")
    assert kernels.choose(kernels.mala_attention, (*wide, None, None), (True, 1e-6)) is None
