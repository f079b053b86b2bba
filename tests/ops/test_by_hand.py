"""Operations against definitions written out by hand, where the explicit weights share code with the fast form."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from subquad import TokenGrid, ops
from subquad.kernels import use_backend


def heads(*shape, count=1):
    return torch.randn(count, *shape, dtype=torch.float64).unbind(0)


def test_softmax_with_a_bias_and_forbidden_pairs():
    (q, k, v), bias = heads(2, 3, 5, 4, count=3), torch.randn(3, 5, 5, dtype=torch.float64)
    forbidden = torch.rand(2, 1, 5, 5) < 0.4
    forbidden[..., 0] = False
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / 2 + bias
    weights = torch.exp(scores) * ~forbidden
    weights = weights / weights.sum(-1, keepdim=True)
    assert_close(ops.softmax_weights(q, k, forbidden, bias), weights)
    assert_close(ops.softmax_attention(q, k, v, forbidden, bias), weights @ v)


def test_a_query_that_may_see_nothing_has_no_weights():
    q, k = heads(1, 1, 3, 4, count=2)
    forbidden = torch.zeros(3, 3, dtype=torch.bool)
    forbidden[1] = True
    weights = ops.softmax_weights(q, k, forbidden)
    assert (weights[0, 0, 1] == 0).all() and weights.isfinite().all()


def test_a_bias_that_forbids_all_leaves_no_weights_and_hides_nothing():
    (q, k, v), bias = heads(1, 1, 3, 4, count=3), torch.zeros(1, 3, 3, dtype=torch.float64)
    bias[:, 1] = -float("inf")
    weights = ops.softmax_weights(q, k, None, bias)
    assert (weights[0, 0, 1] == 0).all()
    assert_close(weights @ v, ops.softmax_attention(q, k, v, None, bias))
    q[0, 0, 2, 0] = float("nan")
    weights = ops.softmax_weights(q, k, torch.zeros(3, 3, dtype=torch.bool))
    assert weights[0, 0, 2].isnan().all()


OF_SEVERAL_GRIDS = {
    "linear_attention": (),
    "softmax_attention": (),
    "inline_attention": (),
    "mala_attention": (),
    "mlla_attention": (),
    "rala_attention": (),
    "nala_attention": (),
    "focused_attention": ("1",),
    "pola_attention": ("1",),
    "polapp_attention": ("2", "2"),
    "ttt_unit": ("d", "d"),
}
"""Operations of queries and keys on grids of their own, and the shapes of their parameters: (h, 1, d) for "1"."""


@pytest.mark.parametrize("name", OF_SEVERAL_GRIDS)
def test_no_keys_at_all_are_what_padded_keys_are(name):
    (q,), (k, v) = heads(2, 3, 5, 8), heads(2, 3, 4, 8, count=2)
    shapes = {"1": (3, 1, 8), "2": (3, 1, 16), "d": (3, 8, 8)}
    parameters = [1 + torch.rand(shapes[shape], dtype=torch.float64) for shape in OF_SEVERAL_GRIDS[name]]
    operation, settings = getattr(ops, name), {"power": 3.0} if name == "focused_attention" else {}
    absent = torch.ones(2, 4, dtype=torch.bool)
    padding = absent[:, None, None] if name == "softmax_attention" else absent
    expected = operation(q, k, v, *parameters, padding, **settings)
    given = [x.requires_grad_() for x in (q, k[:, :, :0], v[:, :, :0])]
    y = operation(*given, *parameters, **settings)
    assert_close(y, expected)
    assert expected.isfinite().all() and (name == "ttt_unit" or (expected == 0).all())
    assert all(x is None or x.isfinite().all() for x in torch.autograd.grad(y.sum(), given, allow_unused=True))


def test_polar_attention_divides_by_its_temperature_and_adds_positions_to_keys():
    q, k, v = heads(1, 2, 5, 4, count=3)
    power, temperature = (1 + 2 * torch.rand(2, 1, 4, dtype=torch.float64) for _ in range(2))
    positions = torch.randn(2, 5, 4, dtype=torch.float64)
    a, b = q / temperature, (k + positions) / temperature
    up, down = (torch.stack([x.clamp(min=0) ** power, (-x).clamp(min=0) ** power]) for x in (a, b))
    same = torch.einsum("sbhid,sbhjd->bhij", up, down)
    opposite = torch.einsum("sbhid,sbhjd->bhij", up.flip(0), down)
    # weights are means over 5 keys before ε is added
    streams = zip((same, opposite), v.chunk(2, dim=-1), strict=True)
    expected = [weights / (weights.sum(-1, keepdim=True) + 5e-6) @ half for weights, half in streams]
    got = ops.pola_attention(q, k, v, power, None, temperature, positions)
    assert_close(got, torch.cat(expected, dim=-1))


@pytest.mark.parametrize("few", [True, False])
def test_an_idle_agent_and_padded_keys_are_as_if_they_were_not_there(few, monkeypatch):
    if not few:
        monkeypatch.setattr(ops.agent_formula, "SMALL", 0)
    (q,), (k, v), (agents,) = heads(2, 3, 6, 4), heads(2, 3, 7, 4, count=2), heads(2, 3, 5, 4)
    key_bias, query_bias = torch.randn(3, 5, 7, dtype=torch.float64), torch.randn(3, 6, 5, dtype=torch.float64)
    idle, padding = torch.zeros(2, 5, dtype=torch.bool), torch.zeros(2, 7, dtype=torch.bool)
    idle[:, 3], padding[:, 5:] = True, True
    there = [0, 1, 2, 4]
    expected = ops.agent_attention(
        q, agents[:, :, there], k[:, :, :5], v[:, :, :5], key_bias[:, there, :5], query_bias[..., there]
    )
    tensors = q, agents, k, v, key_bias, query_bias, padding, idle
    assert_close(ops.agent_attention(*tensors), expected)
    weights = ops.agent_weights(q, agents, k, key_bias, query_bias, padding, idle)
    assert_close(weights @ v, expected)


@pytest.mark.parametrize("inverse", ["cholesky", "pinv"])
def test_an_idle_landmark_and_padded_keys_are_as_if_they_were_not_there(inverse):
    (q, v), (landmarks,) = heads(2, 3, 7, 4, count=2), heads(2, 3, 4, 4)
    idle, padding = torch.zeros(2, 4, dtype=torch.bool), torch.zeros(2, 7, dtype=torch.bool)
    idle[:, 1], padding[:, 5:] = True, True
    expected = ops.soft_attention(q[:, :, :5], landmarks[:, :, [0, 2, 3]], v[:, :, :5], inverse=inverse)
    got = ops.soft_attention(q, landmarks, v, padding, idle, inverse=inverse)
    assert_close(got[:, :, :5], expected)


@pytest.mark.parametrize("own", [False, True])
def test_the_local_branch_with_bias_and_gate(own):
    grid = TokenGrid(4, 5, 1)
    y, v, gate = heads(2, 3, 21, 2, count=3)
    weight = torch.randn(*([2] if own else []), 6, 3, 3, dtype=torch.float64)
    bias = torch.randn(6, dtype=torch.float64)
    expected = y.clone()
    for image in range(2):
        for channel in range(6):
            h, d = divmod(channel, 2)
            kernel = (weight[image] if own else weight)[channel]
            line = F.conv2d(v[image, h, 1:, d].reshape(1, 1, 4, 5), kernel[None, None], padding=1) + bias[channel]
            expected[image, h, 1:, d] += line.flatten()
    got = ops.add_local(y.clone(), v, weight, bias, gate, grid=grid, kv_grid=grid, backend="eager")
    assert_close(got, expected * gate)


def test_windows_are_a_convolution_whose_stride_is_its_size():
    grid, (x,) = TokenGrid(5, 7), heads(2, 3, 35, 4)
    weight = torch.randn(4, 4, 2, 3, dtype=torch.float64)
    for h in range(3):
        image = x[:, h].mT.reshape(2, 4, 5, 7)
        expected = F.conv2d(image, weight, stride=(2, 3)).flatten(2).mT
        assert_close(ops.convolve_windows(x, weight, grid)[:, h], expected)


def test_a_kernel_without_a_gradient_of_its_own_leaves_it_to_pytorch():
    grid = TokenGrid(9, 9)
    y, v, weight = torch.randn(1, 2, 81, 4), torch.randn(1, 2, 81, 4), torch.randn(8, 11, 11, requires_grad=True)
    gradients = []
    for backend in ("auto", "eager"):
        with use_backend(backend):
            branch = ops.add_local(y, v, weight, grid=grid, kv_grid=grid)
        gradients += torch.autograd.grad(branch.sum(), weight)
    assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("operation", [ops.linear_attention, ops.inline_attention])
def test_autocast_does_not_lower_what_is_summed(operation):
    q, k, v = torch.randn(3, 1, 2, 200, 16).unbind(0)
    expected = operation(q, k, v, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        got = operation(q, k, v, backend="eager")
    assert got.dtype == torch.float32
    assert_close(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float16, 7e-4), (torch.bfloat16, 5.5e-3)])
@pytest.mark.parametrize("deviation", [0.01, 1, 30])
def test_focused_attention_in_half_precision_loses_no_more_than_the_rounding_of_its_inputs(dtype, rounding, deviation):
    q, k, v = heads(1, 2, 784, 32, count=3)
    temperature = F.softplus(torch.zeros(2, 1, 32, dtype=torch.float64))
    inputs = deviation * q, deviation * k, v
    expected = ops.focused_attention(*inputs, temperature, power=3)
    got = ops.focused_attention(*(tensor.to(dtype) for tensor in inputs), temperature.float(), power=3)
    assert got.dtype == dtype and (got - expected).norm() <= rounding * expected.norm()


@pytest.mark.parametrize("backend", ["eager", "auto"])
@pytest.mark.parametrize(("power", "deviation"), [(3, 1e7), (8, 1e-4), (16, 30), (32, 1)])
def test_powers_of_focused_attention_may_leave_the_range_of_fp32(power, deviation, backend):
    q, k, v = heads(1, 2, 20, 8, count=3)
    inputs = deviation * q, deviation * k, v, torch.full((2, 1, 8), 0.7, dtype=torch.float64)

    def answered(*tensors):
        leaves = [tensor.requires_grad_() for tensor in tensors]
        y = ops.focused_attention(*leaves, power=power, backend=backend)
        return y, *torch.autograd.grad(y.square().sum(), leaves)

    got = answered(*(tensor.float() for tensor in inputs))
    for one, expected in zip(got, answered(*inputs), strict=True):
        assert (one - expected).norm() <= 2e-5 * power * expected.norm()


@pytest.mark.parametrize("power", [3, 4, 32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_focused_attention_has_numbers_where_no_feature_of_a_token_is_positive(dtype, power):
    q, k, v = (tensor.to(dtype) for tensor in heads(1, 2, 20, 8, count=3))
    q[:, :, 3], k[:, :, 5] = -1, 0
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    y = ops.focused_attention(*leaves, torch.full((2, 1, 8), 0.7), power=power)
    y.float().square().sum().backward()
    assert all(tensor.isfinite().all() for tensor in (y, *(leaf.grad for leaf in leaves)))
