"""When the CPU kernels are used, what they are to PyTorch, and what they refuse."""

import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from hosts import without_prefix
from mechanisms import inputs_of
from native_inputs import WITHOUT, projected
from operator_calls import TURNED
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import subquad
from subquad import ATTENTION, SubquadError, TokenGrid, kernels, ops
from subquad.kernels import OPERATORS, Backend, backends, choose, choosing, declaring, unavailable, use_backend
from subquad.kernels.cpu import library
from subquad.models.assembling import settings_of
from subquad.models.layers import SelfAttention
from subquad.ops import linear_formula

pytestmark = pytest.mark.skipif(unavailable("native") is not None, reason=f"no kernels: {unavailable('native')}")


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
        kernels.compute(
            kernels.linear_sums,
            linear_formula._linear_sums,
            (k.clone().requires_grad_(), v),
            ("relu",),
            backend="native",
        )
    with use_backend("native"), pytest.raises(SubquadError, match="linear attention"):
        ops.linear_attention(q.double(), k.double(), v.double())
    with pytest.raises(SubquadError, match="unknown backend 'nativ': did you mean native"), use_backend("nativ"):
        pass


def test_auto_takes_kernels_where_they_can_and_the_eager_form_elsewhere(monkeypatch):
    (q,) = projected(1, 2, 9, 16)
    linear, sums = kernels.linear_attention, kernels.linear_sums
    assert choose(linear, (q,)) == "native"
    assert choose(linear, (q.double(),)) is None and choose(linear, (q,), cannot="reason") is None
    learned = q.clone().requires_grad_()
    assert choose(sums, (learned, q), ("relu",)) is None and choose(linear, (learned,)) == "native"
    with torch.no_grad():
        assert choose(sums, (learned, q), ("relu",)) == "native"
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


def calls_of_all():
    """Every operator that has a native kernel, with arguments that it takes."""
    q, k, v = projected(1, 2, 12, 16, count=3)
    few, power = torch.randn(1, 2, 4, 16), torch.full((2, 1, 16), 2.0)
    bias, tables = torch.randn(2, 4, 12), (*(torch.randn(2, 4, n) for n in (3, 4)), None)
    tables = torch.randn(2, 4, 2, 2), *tables
    gram, turns = torch.eye(4).expand(2, 4, 4), (torch.ones(12, 16), torch.zeros(12, 16))
    branch = torch.randn(32, 1, 3, 3), torch.randn(32)
    mlp = torch.randn(32, 16, 1), torch.randn(32), torch.randn(288, 16, 1), torch.randn(288)
    return {
        kernels.inline_mixer: (q, k, v, torch.randn(1, 12, 32), *mlp, [3, 4]),
        kernels.agent_mixer: (q, k, v, *tables, *tables, *branch, [3, 4], [2, 2], "channel"),
        kernels.pola_mixer: (q, k, v, v, power, power, q[0], *branch, [3, 4], 4.0, 1e-6, "channel"),
        kernels.soft_mixer: (
            *(q, v, torch.randn(16, 16, 2, 2), torch.ones(16), torch.ones(16), torch.randn(2, 1, 3, 3), None),
            *([3, 4], 20, 0.5, 1e-5, 0.01, 1.8, "head"),
        ),
        kernels.focused_mixer: (q, k, v, power, q[0], *branch, [3, 4], 3.0, 1e-6, "channel"),
        kernels.polapp_mixer: (
            *(q, k, v, v, *torch.rand(2, 2, 1, 32), None, None, *branch),
            *([3, 4], True, 1e-6, "channel"),
        ),
        kernels.ttt_mixer: (
            *(q, k, v, *torch.randn(2, 1, 16, 16), torch.randn(16, 1, 3, 3), None, None),
            *([3, 4], True, 0.3),
        ),
        kernels.circulant_mixer: (q, k, v, v, [3, 4]),
        kernels.mhla_mixer: (
            *(q, k, v, torch.rand(4, 4), power, power, *branch),
            *([3, 4], [2, 2], 1e-6, "channel"),
        ),
        kernels.linear_attention: (q, k, v, "relu", 1e-6),
        kernels.linear_sums: (k, v, "relu"),
        kernels.linear_answers: (q, torch.rand(1, 2, 16, 17), 12, "relu", 1e-6),
        kernels.inline_attention: (q, k, v),
        kernels.pola_attention: (q, k, v, power, None, None, 1e-6),
        kernels.polapp_attention: (q, k, v, *torch.rand(2, 2, 1, 32), None, None, True, 1e-6),
        kernels.softmax_attention: (q, k, v, torch.randn(1, 2, 12, 12), torch.rand(1, 1, 12, 12) < 0.5),
        OPERATORS["softmax_attention_gradient"]: (
            q,
            q,
            k,
            v,
            torch.randn(1, 2, 12, 12),
            torch.rand(1, 1, 12, 12) < 0.5,
        ),
        kernels.agent_attention: (q, few, k, v, bias, bias),
        kernels.agent_attention_of_tables: (q, few, k, v, *tables, *tables),
        OPERATORS["linear_attention_gradient"]: (q, q, k, v, "elu", 1e-6),
        OPERATORS["inline_attention_gradient"]: (q, q, k, v),
        **{OPERATORS[name]: (q, k, v, *turns, True, 1e-6) for name in TURNED},
        **{OPERATORS[f"{name}_gradient"]: (q, q, k, v, *turns, True, 1e-6) for name in TURNED},
        OPERATORS["polapp_attention_gradient"]: (q, q, k, v, *torch.rand(2, 2, 1, 32), None, None, True, 1e-6),
        kernels.circulant_attention: (q, k, v, [3, 4]),
        OPERATORS["circulant_attention_gradient"]: (q, q, k, v, [3, 4]),
        kernels.ttt_unit: (q, k, v, *torch.randn(2, 2, 16, 16), *turns, True, 0.3),
        OPERATORS["ttt_unit_gradient"]: (q, q, k, v, *torch.randn(2, 2, 16, 16), *turns, True, 0.3),
        kernels.mhla_sums: (k, v, power, [3, 4], [2, 2]),
        kernels.mhla_answers: (q, torch.rand(1, 2, 4, 16, 17), power, [3, 4], [2, 2]),
        OPERATORS["mhla_sums_gradient"]: (torch.rand(1, 2, 4, 16, 17), k, v, power, [3, 4], [2, 2]),
        OPERATORS["mhla_answers_gradient"]: (q, q, torch.rand(1, 2, 4, 16, 17), power, [3, 4], [2, 2]),
        kernels.focused_attention: (q, k, v, power, None, 3.0, 1e-6),
        OPERATORS["focused_attention_gradient"]: (q, q, k, v, power, None, 3.0, 1e-6),
        OPERATORS["pola_attention_gradient"]: (q, q, k, v, power, None, None, 1e-6),
        OPERATORS["agent_attention_gradient"]: (q, q, few, k, v, bias, bias),
        OPERATORS["agent_attention_of_tables_gradient"]: (q, q, few, k, v, *tables, *tables),
        OPERATORS["agent_attention_of_tables_keeping"]: (q, few, k, v, *tables, *tables),
        OPERATORS["agent_attention_of_tables_keeping_gradient"]: (
            *(q, q, few, k, v, *tables, *tables),
            *(few, torch.zeros(1, 2, 4), torch.ones(1, 2, 4)),
        ),
        kernels.local_branch: (q.clone(), v, None, torch.randn(32, 3, 3), None, [3, 4]),
        kernels.depthwise: (v, torch.randn(32, 3, 3), torch.randn(32), [3, 4]),
        kernels.map_filter: (torch.randn(2, 12, 8), torch.randn(8, 3, 3), torch.randn(8), [3, 4], True, "gelu"),
        OPERATORS["depthwise_gradient"]: (q, v, torch.randn(32, 3, 3), [3, 4]),
        kernels.map_products: (q, v, 3, [3, 4]),
        OPERATORS["map_products_gradient"]: (torch.randn(1, 9, 32), q, v, 3, [3, 4]),
        kernels.pool: (q, [3, 4], [2, 2]),
        OPERATORS["pool_gradient"]: (few, q, [3, 4], [2, 2]),
        kernels.convolve_windows: (q, torch.randn(16, 16, 2, 2), 3, 4),
        kernels.soft_gather: (q, few, v, 1.0),
        kernels.soft_spread: (q, few, few, 1.0),
        OPERATORS["soft_gather_gradient"]: (few, q, few, v, 1.0),
        OPERATORS["soft_spread_gradient"]: (q, q, few, few, 1.0),
        OPERATORS["newton_inverse_gradient"]: (gram, gram, torch.full((2, 1, 1), 0.1), 3),
        kernels.newton_inverse: (gram, torch.full((2, 1, 1), 0.1), 3),
        kernels.linear_branch_sums: (
            *(torch.randn(shape) for shape in ((2, 9, 8), 8, 8, (16, 8), 16)),
            *(2, "relu", 1e-6),
        ),
        kernels.linear_branch_answers: (
            *(torch.randn(shape) for shape in ((2, 9, 8), 8, 8, (8, 8), 8, (2, 2, 4, 5), (8, 8), 8)),
            *(None, 9, "relu", 1e-6, 1e-6),
        ),
        kernels.norm_projection: (
            *(torch.randn(shape) for shape in ((2, 9, 8), 8, 8, (24, 8))),
            None,
            1e-6,
            True,
            "gelu",
        ),
        kernels.projection_residual: (*(torch.randn(shape) for shape in ((2, 9, 8), (2, 9, 12), (8, 12), 8)), None),
        kernels.patch_tokens: (
            *(torch.randn(shape) for shape in ((2, 3, 4, 6), (8, 3, 2, 2), 8, (1, 1, 8), (1, 7, 8))),
        ),
        kernels.turned: (torch.randn(2, 3, 9, 8), *torch.randn(2, 9, 8), False),
        kernels.turned.gradient: (*torch.randn(2, 2, 3, 9, 8), *torch.randn(2, 9, 8), True),
        kernels.mlp: (*(torch.randn(shape) for shape in ((2, 9, 4), 4, 4, (6, 4), 6, (4, 6), 4)), None, "gelu", 1e-6),
    }


def test_operations_are_operators_of_torch():
    calls = calls_of_all()
    assert {one.name for one in calls} == {name for name, one in OPERATORS.items() if "native" in one.implementations}
    for operator, arguments in calls.items():
        torch.library.opcheck(
            operator.packet.default, (*arguments, "native"), test_utils=("test_schema", "test_faketensor")
        )


def test_operators_have_the_gradients_that_their_calls_have():
    calls = calls_of_all()
    of_keeping = {one.keeping: one for one in OPERATORS.values() if one.keeping is not None}
    differentiable = [one for one in calls if one.has_gradient("native")]
    assert len(differentiable) > 15
    for operator in differentiable:
        one = of_keeping.get(operator, operator)
        arguments, count = calls[operator], len(one.needed)
        learned = [
            tensor.detach().clone().requires_grad_() if tensor is not None and name not in one.masks else tensor
            for tensor, (name, _) in zip(arguments, one.needed, strict=False)
        ]
        wanted = [tensor for tensor in learned if tensor is not None and tensor.requires_grad]
        gradients = []
        for call in (
            lambda *given: operator.packet.default(*given, "native"),  # noqa: B023
            lambda *given: choosing.run(one, "native", lambda: None, given[:count], given[count:]),  # noqa: B023
        ):
            result = call(*learned, *arguments[count:])
            result = result if isinstance(result, torch.Tensor) else result[0]
            torch.manual_seed(1)
            weight = torch.randn_like(result)
            gradients.append(torch.autograd.grad(result, wanted, weight, allow_unused=True, materialize_grads=True))
        assert any(gradient.count_nonzero() for gradient in gradients[0]), operator.name
        for got, expected in zip(*gradients, strict=True):
            assert_close(got, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{operator.name}: {text}")  # noqa: B023


@pytest.mark.slow
def test_gradients_of_what_is_compiled_for_sizes_that_are_computed_are_those_of_the_formula():
    def of_pooled(x):
        # as in the stages of a pyramid: a number of tokens that is no size of what is given
        tokens = torch.nn.functional.avg_pool1d(x, 2).unflatten(1, (2, 8)).transpose(2, 3)
        return ops.linear_attention(tokens, tokens, tokens).square().sum()

    compiled = torch.compile(of_pooled, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (32, 48):
        x = torch.randn(2, 16, size, requires_grad=True)
        with use_backend("eager"):
            (expected,) = torch.autograd.grad(of_pooled(x), x)
        (got,) = torch.autograd.grad(compiled(x), x)
        assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_compiled_code_says_that_it_has_no_gradients_of_gradients():
    def answers(x):
        return ops.linear_attention(x, x, x).square().sum()

    x = torch.randn(1, 2, 12, 8, requires_grad=True)
    compiled = torch.compile(answers, fullgraph=True, backend="eager", dynamic=False)
    with pytest.raises(SubquadError, match="compiled code has no gradients of the gradients of linear attention"):
        torch.autograd.grad(compiled(x), x, create_graph=True)


@torch.no_grad()
def test_a_tensor_that_has_to_be_there_and_is_none_is_not_read():
    calls = calls_of_all()
    for gradient in {operator.gradient for operator in calls if operator.gradient is not None}:
        del calls[gradient]  # chosen with what it is the gradient of
    for operator, arguments in calls.items():
        tensors, settings = list(arguments[: len(operator.needed)]), arguments[len(operator.needed) :]
        assert choose(operator, tensors, settings) == "native", operator.name
        for place, (name, is_needed) in enumerate(operator.needed):
            given = [*tensors[:place], None, *tensors[place + 1 :]]
            if is_needed:
                assert choose(operator, given, settings) is None, (operator.name, name)
    q, v = projected(1, 2, 12, 16, count=2)
    with pytest.raises(SubquadError, match="can't compute InLine attention: k is None"):
        choose(kernels.inline_attention, (q, None, v), backend="native")


@torch.no_grad()
def test_what_is_more_than_its_numbers_is_not_read():
    for operator, arguments in calls_of_all().items():
        tensors, settings = list(arguments[: len(operator.needed)]), arguments[len(operator.needed) :]
        for place, (name, _) in enumerate(operator.needed):
            given = tensors[place]
            if given is None:
                continue
            strange = [given.float() if name in operator.masks else given > 0]
            strange += [] if name in operator.masks else [torch._neg_view(given)]
            for one in strange:
                asked = [*tensors[:place], one, *tensors[place + 1 :]]
                assert choose(operator, asked, settings, optional=True) is None, (operator.name, name, one.dtype)
        with forward_ad.dual_level():
            assert choose(operator, tensors, settings, optional=True) is None, operator.name
    with pytest.raises(SubquadError, match=r"compute in fp32 and bf16, and tokens are torch\.bool"):
        kernels.pool(torch.ones(1, 2, 6, 8, dtype=torch.bool), [2, 3], [1, 1], "native")


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")  # PyTorch's own, of what it makes up
@pytest.mark.parametrize("name", sorted(ATTENTION))
def test_derivatives_forward_and_several_gradients_at_once_are_those_of_the_formula(name):
    grid = TokenGrid(4, 4)
    torch.manual_seed(0)
    layer = SelfAttention(16, 2, ATTENTION[name], grid=grid).eval().requires_grad_(False)
    x, direction, gradients = torch.randn(1, 16, 16), torch.randn(1, 16, 16), torch.randn(3, 1, 16, 16)

    def derivatives():
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, direction), grid=grid)).tangent
        learned = x.clone().requires_grad_()
        y = layer(learned, grid=grid)
        (several,) = torch.autograd.grad(y, learned, gradients, is_grads_batched=True, retain_graph=True)
        return tangent, several, [torch.autograd.grad(y, learned, one, retain_graph=True)[0] for one in gradients]

    tangent, several, one_by_one = derivatives()
    assert_close(several, torch.stack(one_by_one), rtol=1e-3, atol=1e-5)
    # of what is linear at a point, in both directions
    assert_close((gradients[0] * tangent).sum(), (one_by_one[0] * direction).sum(), rtol=1e-3, atol=1e-4)
    with use_backend("eager"):
        assert_close(tangent, derivatives()[0])


@pytest.mark.parametrize("name", sorted(ATTENTION.keys() - WITHOUT))
def test_operations_are_counted(name):
    settings = {"img_size": 64, "depths": (1,), **without_prefix(name)}
    model = subquad.create_model("deit_tiny", attention=name, **settings)
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
    """One that is not found there would give back what nobody wrote to."""
    sources = (Path(library.__file__).parent / "source").glob("*.h")
    assert len(library.functions()) == sum(source.read_text().count("\nKERNEL(") for source in sources)
    loaded = library.library()
    assert all(getattr(loaded, f"{name}_float").errcheck is not None for name in library.functions())
