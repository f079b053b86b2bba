"""The Triton kernels against the explicit weights in float64: on a GPU, or with TRITON_INTERPRET=1 on the CPU.

Their sums are in fp32, their results in the precision of the tokens; an error is measured against the size of what it
is an error of.
"""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from kernels_here import DEVICE, DTYPES, ROUNDING, needs_kernels, relative_error
from mechanisms import inputs_of, without_refused_prefix
from torch.utils.flop_counter import FlopCounterMode

from subquad import ATTENTION, SubquadError, TokenGrid, kernels, ops
from subquad.kernels import OPERATORS, choose, use_backend
from subquad.kernels.choosing import short_name
from subquad.kernels.triton import MOST_TURNED, launch, maps_calls
from subquad.kernels.triton.tile_table import watching
from subquad.kernels.triton.tiles import nearest
from subquad.models.assembling import settings_of

pytestmark = needs_kernels


def projected(b, h, n, d, count):
    """Tokens (b, h, n, d) as views of one fused projection."""
    return torch.randn(b, n, count, h, d, device=DEVICE).permute(2, 0, 3, 1, 4).unbind(0)


def streams(weights, v):
    """Weights (b, h, 2, n, n) of two streams, each of which weighs its half of the values."""
    same = (v.shape[-1] + 1) // 2
    return torch.cat([weights[:, :, 0] @ v[..., :same], weights[:, :, 1] @ v[..., same:]], dim=-1)


def cases(b, h, n_q, n_k, d):
    """By name what is called, what it is by its explicit weights, and its tensors."""
    with torch.device(DEVICE):
        return cases_here(b, h, n_q, n_k, d)


def cases_here(b, h, n_q, n_k, d):
    """The same on the default device."""
    (q,), (k, v) = projected(b, h, n_q, d, 1), projected(b, h, n_k, d, 2)
    power, warm, places = 1 + 2 * torch.rand(h, 1, d), 1 + torch.rand(h, 1, d), torch.randn(h, n_k, d)
    found = {
        "relu": (ops.linear_attention, lambda q, k, v: ops.linear_weights(q, k) @ v, (q, k, v)),
        "elu": (
            lambda *qkv, **more: ops.linear_attention(*qkv, feature_map="elu", eps=0.01, **more),
            lambda q, k, v: ops.linear_weights(q, k, feature_map="elu", eps=0.01) @ v,
            (q, k, v),
        ),
        "inline": (ops.inline_attention, lambda q, k, v: ops.inline_weights(q, k) @ v, (q, k + 3, v)),
        "pola": (
            ops.pola_attention,
            lambda q, k, v, power: streams(ops.pola_weights(q, k, power), v),
            (q, k, v, power),
        ),
        "pola with positions": (
            lambda q, k, v, power, t, places, **more: ops.pola_attention(q, k, v, power, None, t, places, **more),
            lambda q, k, v, power, t, places: streams(ops.pola_weights(q, k, power, None, t, places), v),
            (q, k, v, power, warm, places),
        ),
    }
    same, opposite = torch.rand(2, h, 1, 2 * d).unbind(0)
    found["polapp"] = (
        ops.polapp_attention,
        lambda q, k, v, same, opposite: streams(ops.polapp_weights(q, k, same, opposite), v),
        (q, k, v, same, opposite),
    )
    for few in (9, 70):
        agents, landmarks = torch.randn(b, h, few, d), 2 * torch.randn(b, h, few, d) / d**0.5
        found[f"{few} agents"] = (
            ops.agent_attention,
            lambda q, agents, k, v, *biases: ops.agent_weights(q, agents, k, *biases) @ v,
            (q, agents, k, v, torch.randn(h, few, n_k), torch.randn(h, n_q, few)),
        )
        found[f"{few} landmarks"] = (
            lambda *given, **more: ops.soft_attention(*given, inverse="cholesky", scale=0.3 / d**0.5, **more),
            lambda k, landmarks, v: ops.soft_weights(k * 0.3 / d**0.5, landmarks, inverse="cholesky") @ v,
            (k, landmarks, v),
        )
    return found


NAMES = list(cases(1, 1, 1, 1, 2))
SHAPES = [
    (2, 2, 70, 200, 24),
    (1, 3, 3, 2, 5),
    *(pytest.param(shape, marks=pytest.mark.slow) for shape in [(1, 1, 300, 130, 64), (3, 1, 65, 33, 128)]),
]


def with_gradients(function, tensors, weight):
    """The result, and its weighed sum's gradients."""
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    result = function(*tensors)
    return [result, *torch.autograd.grad((result * weight.to(result.dtype)).sum(), tensors)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients_are_those_of_the_explicit_weights(name, dtype, shape):
    call, weights, tensors = cases(*shape)[name]
    tensors = [tensor.to(DEVICE, dtype) for tensor in tensors]
    weight = torch.randn_like(tensors[0])
    try:
        got = with_gradients(lambda *given: call(*given, backend="triton"), tensors, weight)
    except SubquadError as refusal:
        assert shape[-1] > MOST_TURNED and "channels" in str(refusal)
        pytest.skip(str(refusal))
    expected = with_gradients(weights, [tensor.double() for tensor in tensors], weight.double())
    for place, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert one.dtype == dtype and one.shape == other.shape
        error = relative_error(one, other)
        assert error < ROUNDING[dtype], f"{place}: {error:.1e}"


READ_ONCE = {"relu": "relu.state", "inline": "inline.state", "pola": "pola.state", "9 agents": "agent.gather"}


@pytest.mark.parametrize("name", READ_ONCE)
def test_keys_and_values_are_read_once_on_the_way_back(name):
    call, _, tensors = cases(1, 2, 20, 20, 16)[name]
    launched = []
    with watching(lambda key, defaults: launched.append(key.split()[0]) or {}):
        with_gradients(lambda *given: call(*given, backend="triton"), [x.to(DEVICE) for x in tensors], tensors[0])
    assert launched.count(READ_ONCE[name]) == 1


@pytest.mark.parametrize("images", [1, 5])
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_biases_have_the_sum_over_images_however_these_are_grouped(images, groups, monkeypatch):
    call, weights, tensors = cases(images, 2, 40, 33, 8)["9 agents"]
    tensors = [tensor.to(DEVICE) for tensor in tensors]
    groups = min(groups, images)
    monkeypatch.setattr(
        maps_calls,
        "groups_of",
        lambda x, block, times: (groups, launch.split_of(x, block, times=times, groups=groups)),
    )
    got = with_gradients(lambda *given: call(*given, backend="triton"), tensors, tensors[0])
    expected = with_gradients(weights, [tensor.double() for tensor in tensors], tensors[0])
    for one, other in zip(got, expected, strict=True):
        assert relative_error(one, other) < ROUNDING[torch.float32]


def test_groups_of_images_fill_the_device_and_hold_all_images(monkeypatch):
    for processors in (2, 132):
        monkeypatch.setattr(launch, "INTERPRETED_PROCESSORS", processors)
        for b, h, n in itertools.product((1, 3, 64, 200), (1, 12), (1, 49, 3136, 65536)):
            groups, split = launch.groups_of(torch.empty(b, h, n, 1).expand(b, h, n, 64), 32)
            each = -(-b // groups)
            assert 1 <= groups <= b and (groups - 1) * each < b <= groups * each
            assert split.pieces * split.chunk >= n > (split.pieces - 1) * split.chunk
            # all of it is as much as can be had, or half of what fills the device
            assert groups * split.pieces * h * 2 >= min(b * h * -(-n // 32), launch.PROGRAMS * processors) / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_may_be_split_in_any_way(name, monkeypatch):
    call, _, tensors = cases(1, 2, 260, 270, 16)[name]
    weight = torch.randn_like(tensors[0])
    results = []
    for programs in (1, 1000):
        monkeypatch.setattr(launch, "PROGRAMS", programs)
        results.append(with_gradients(lambda *given: call(*given, backend="triton"), tensors, weight))
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("name", [name for name in ATTENTION if f"{name}_attention" in kernels.OPERATORS])
@pytest.mark.parametrize("grid", [TokenGrid(5, 5), pytest.param(TokenGrid(6, 11, 1), marks=pytest.mark.slow)], ids=str)
def test_every_mechanism_is_what_it_is_in_double_precision(name, grid):
    settings = {"num_agents": 9} if "num_agents" in settings_of(name) else {}
    grid = without_refused_prefix(name, grid)
    module = ATTENTION[name](32, 2, grid=grid, kv_grid=grid, **settings)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    supply = {
        key: None if tensor is None else tensor.to(DEVICE) for key, tensor in inputs_of(module, grid, dim=32).items()
    }
    found = []
    for backend, dtype in (("triton", torch.float32), ("eager", torch.float64)):
        module = module.to(DEVICE, dtype)
        module.zero_grad()
        given = {key: None if x is None else x.detach().to(dtype).requires_grad_() for key, x in supply.items()}
        with use_backend(backend):
            y = module(**given, grid=grid, kv_grid=grid)
        y.sum().backward()
        learned = [*module.parameters(), *(x for x in given.values() if x is not None)]
        found.append([y, *(x.grad for x in learned)])
    for one, other in zip(*found, strict=True):
        assert (one.double() - other).norm() <= 2e-5 * other.norm().clamp(min=1)


@triton.jit
def nearest_kernel(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, nearest(tl.load(x + at)))


def test_numbers_whose_digits_are_cut_off_are_the_nearest_ones():
    x = torch.randn(64) * 10.0 ** torch.arange(-32, 32)
    # what is not a number may have all digits, as on a GPU
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000, 0], dtype=torch.int32).view(torch.float32)
    x[:5] = bits
    y = torch.empty_like(x, device=DEVICE)
    nearest_kernel[1,](x.to(DEVICE), y, SIZE=64)
    seen = (y.cpu().view(torch.int32) & ~0x1FFF).view(torch.float32)
    assert torch.equal(seen.isnan(), x.isnan()) and torch.equal(seen[3:5], x[3:5])
    assert ((seen[5:].double() - x[5:].double()).abs() <= 2**-11 * x[5:].double().abs()).all()


def test_gradients_of_gradients_are_those_of_the_eager_form():
    q, k, v = projected(1, 2, 9, 16, 3)
    for backend in ("triton", "eager"):
        given = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        first = torch.autograd.grad(ops.linear_attention(*given, backend=backend).sum(), given, create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in first), given)
        if backend == "triton":
            found = second
    for one, other in zip(found, second, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm()


def test_what_is_not_a_number_or_infinite_stays_where_it_is():
    q, k, v = projected(1, 2, 40, 16, 3)
    q = q.clone()
    q[0, 1, 3, 5], q[0, 0, 4, 2] = float("nan"), -float("inf")
    for operation, more in ((ops.linear_attention, ()), (ops.inline_attention, ())):
        y = operation(q, k, v, *more, backend="triton")
        expected = operation(q, k, v, *more, backend="eager")
        assert torch.equal(y.isnan(), expected.isnan()) and torch.equal(y.isfinite(), expected.isfinite())


@pytest.mark.parametrize("mean", [300, 10_000])
def test_keys_with_a_large_mean_do_not_cancel(mean):
    q, k, v = projected(1, 1, 500, 16, 3)
    got = ops.inline_attention(q, k + mean, v, backend="triton")
    expected = ops.inline_attention(q.double(), (k + mean).double(), v.double())
    assert (got.double() - expected).norm() < 1e-4 * expected.norm()


def test_keys_that_a_bias_forbids_have_no_weight():
    q, k, v = projected(1, 2, 150, 16, 3)
    agents, query_bias = torch.randn(1, 2, 4, 16, device=DEVICE), torch.zeros(2, 150, 4, device=DEVICE)
    key_bias = torch.zeros(2, 4, 150, device=DEVICE)
    key_bias[..., 20:] = -float("inf")
    got = ops.agent_attention(q, agents, k, v, key_bias, query_bias, backend="triton")
    few = k[:, :, :20], v[:, :, :20], key_bias[..., :20]
    expected = ops.agent_attention(q, agents, *few, query_bias, backend="eager")
    assert (got - expected).norm() < 1e-5 * expected.norm()


def test_asking_for_kernels_and_not_getting_them_is_an_error():
    q, k, v = projected(1, 2, 9, 16, 3)
    wide = torch.randn(3, 1, 1, 5, 130, device=DEVICE)
    refusals = {
        f"it computes in {' '.join(map(short_name, DTYPES))}, and a tensor is fp64": (
            q.double(),
            k.double(),
            v.double(),
        ),
        "no padding": (q, k, v, torch.zeros(1, 9, dtype=torch.bool, device=DEVICE)),
        "heads of up to 128 channels here, and these have 130": wide,
    }
    for reason, tensors in refusals.items():
        with pytest.raises(SubquadError, match=reason) as caught:
            ops.linear_attention(*tensors, backend="triton")
        assert "\n" not in str(caught.value)
        with use_backend("triton"), pytest.raises(SubquadError, match=reason):
            ops.linear_attention(*tensors)
    grid, weight = TokenGrid(3, 3), torch.randn(16, 16, 2, 2, device=DEVICE)
    with pytest.raises(SubquadError, match='backend "triton" has no kernel for a convolution of windows'):
        ops.convolve_windows(q, weight, grid, backend="triton")
    with use_backend("triton"):
        assert torch.equal(
            ops.convolve_windows(q, weight, grid), ops.convolve_windows(q, weight, grid, backend="eager")
        )


def test_auto_takes_them_for_cuda_tensors():
    (q,) = projected(1, 2, 9, 16, 1)
    settings = "relu", 1e-6
    assert choose(kernels.linear_attention, (q, q, q), settings) == ("triton" if q.is_cuda else None)
    assert choose(kernels.linear_attention, (q.double(),) * 3, settings) is None


def test_operations_are_operators_of_torch():
    q, k, v = (x.requires_grad_() for x in projected(1, 2, 12, 16, 3))
    few, power = torch.randn(1, 2, 4, 16, device=DEVICE), torch.full((2, 1, 16), 2.0, device=DEVICE)
    bias, taps = torch.randn(2, 4, 12, device=DEVICE), torch.randn(32, 3, 3, device=DEVICE)
    turns = few.new_ones(12, 16), few.new_ones(2, 12, 16), True, 1e-6

    def state_of(name, kind):
        if kind != "_keeping_gradient":
            return ()
        return (OPERATORS[f"{name}_attention_keeping"](q, k, v, *turns, "triton")[1].detach(),)

    spikes = torch.rand(2, 1, 32, device=DEVICE)
    gram, state = torch.rand(1, 2, 5, 5, device=DEVICE), torch.rand(2, 2, 19, 16, device=DEVICE)
    calls = {
        kernels.linear_attention: (q, k, v, "relu", 1e-6),
        OPERATORS["linear_attention_gradient"]: (q, q, k, v, "elu", 1e-6),
        kernels.inline_attention: (q, k, v),
        OPERATORS["inline_attention_gradient"]: (q, q, k, v),
        kernels.pola_attention: (q, k, v, power, None, bias.new_zeros(2, 12, 16), 1e-6),
        OPERATORS["pola_attention_gradient"]: (q, q, k, v, power, power, None, 1e-6),
        kernels.agent_attention: (q, few, k, v, bias, bias),
        OPERATORS["agent_attention_gradient"]: (q, q, few, k, v, bias, bias),
        kernels.soft_gather: (q, few, v, 0.5),
        OPERATORS["soft_gather_gradient"]: (few, q, few, v, 0.5),
        kernels.soft_spread: (q, few, few, 0.5),
        OPERATORS["soft_spread_gradient"]: (q, q, few, few, 0.5),
        OPERATORS["linear_attention_keeping"]: (q, k, v, "elu", 1e-6),
        OPERATORS["linear_attention_keeping_gradient"]: (q, q, k, v, "elu", 1e-6, state[:, :1, :17]),
        OPERATORS["inline_attention_keeping"]: (q, k, v),
        OPERATORS["inline_attention_keeping_gradient"]: (q, q, k, v, state[:, :1]),
        OPERATORS["pola_attention_keeping"]: (q, k, v, power, None, None, 1e-6),
        OPERATORS["pola_attention_keeping_gradient"]: (q, q, k, v, power, power, None, 1e-6, state[:, :, :17]),
        OPERATORS["agent_attention_keeping"]: (q, few, k, v, bias, bias),
        OPERATORS["agent_attention_keeping_gradient"]: (q, q, few, k, v, bias, bias, few, few[..., 0]),
        **{
            OPERATORS[f"{name}_attention{kind}"]: (
                *((q,) if "gradient" in kind else ()),
                q,
                k,
                v,
                *turns,
                *state_of(name, kind),
            )
            for name in ("mlla", "mala", "rala", "nala")
            for kind in ("", "_gradient", "_keeping", "_keeping_gradient")
        },
        kernels.polapp_attention: (q, k, v, spikes, spikes, *turns),
        OPERATORS["polapp_attention_gradient"]: (q, q, k, v, spikes, spikes, *turns),
        kernels.local_branch: (q, k, v, taps, None, [3, 4]),
        kernels.depthwise: (v, taps, taps[:, 0, 0], [2, 4]),
        OPERATORS["depthwise_gradient"]: (q, v, taps, [3, 4]),
        kernels.pool: (q, [3, 3], [2, 2]),
        OPERATORS["pool_gradient"]: (few, q, [3, 3], [2, 2]),
        kernels.newton_inverse: (gram, gram[..., :1, :1], 2),
        OPERATORS["newton_inverse_gradient"]: (gram, gram, gram[..., :1, :1], 2),
    }
    assert {one.name for one in calls} == {name for name, one in OPERATORS.items() if "triton" in one.implementations}
    for operator, arguments in calls.items():
        arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
        torch.library.opcheck(
            operator.packet.default, (*arguments, "triton"), test_utils=("test_schema", "test_faketensor")
        )


def test_they_compile_without_a_graph_break_forward_and_backward():
    q, k, v = projected(1, 2, 20, 16, 3)
    compiled = torch.compile(lambda *x: ops.inline_attention(*x), backend="aot_eager", fullgraph=True)
    with use_backend("triton"):
        got = with_gradients(compiled, [q, k, v], q)
    expected = with_gradients(lambda *x: ops.inline_attention(*x, backend="eager"), [q, k, v], q)
    for one, other in zip(got, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


# softmax-free attention computes its map twice instead of keeping it, and says so
@pytest.mark.parametrize("name", ["relu", "inline", "pola", "9 agents"])
def test_operations_are_counted(name):
    call, _, tensors = cases(1, 2, 40, 40, 16)[name]
    counts = []
    for backend in ("triton", "eager"):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call(*tensors, backend=backend)
        counts.append(counter.get_total_flops())
    assert counts[0] == pytest.approx(counts[1], rel=0.1)


FAR_GRID = TokenGrid(3, 3)
FAR = {
    "linear": lambda x, backend: ops.linear_attention(x, x, x, backend=backend),
    "inline": lambda x, backend: ops.inline_attention(x, x, x, backend=backend),
    "pool": lambda x, backend: ops.pool_tokens(x, FAR_GRID, TokenGrid(2, 2), backend=backend),
    "local": lambda x, backend: ops.add_local(
        x.clone(), x, torch.ones(4, 3, 3, device=DEVICE), grid=FAR_GRID, kv_grid=FAR_GRID, backend=backend
    ),
}


@pytest.mark.parametrize("name", FAR)
def test_tokens_may_lie_further_apart_than_32_bits_count(name):
    """A million tokens of a fused projection of 2,304 channels do; here some tokens in a room that is never touched."""
    try:
        room = torch.empty(2**32, dtype=torch.float16, device=DEVICE)
    except RuntimeError as error:
        pytest.skip(f"there is no room of 8 GB: {error}")
    near = torch.randn(1, 1, 9, 4, device=DEVICE, dtype=torch.float16)
    far = room.as_strided(near.shape, (0, 0, (2**32 - 4) // 8, 1))
    far.copy_(near)
    assert relative_error(FAR[name](far, "triton"), FAR[name](near.float(), "eager")) < 2e-3


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU knows bf16")
def test_the_interpreter_refuses_what_numpy_does_not_know():
    (x,) = projected(1, 1, 9, 16, 1)
    with pytest.raises(SubquadError, match="it computes in fp32 fp16, and a tensor is bf16"):
        ops.linear_attention(x.bfloat16(), x.bfloat16(), x.bfloat16(), backend="triton")
