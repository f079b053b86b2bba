"""The CPU kernels in bf16: within twice the error of rounding what they are given and what they give."""

import dataclasses

import pytest
import torch
from hosts import without_prefix
from operator_calls import operator_calls

import subquad
from subquad import ATTENTION, TokenGrid, kernels, ops, use_backend
from subquad.kernels import OPERATORS, unavailable

pytestmark = pytest.mark.skipif(unavailable("native") is not None, reason=f"no kernels: {unavailable('native')}")

BF16 = torch.bfloat16
NATIVE = sorted(name for name, one in OPERATORS.items() if "native" in one.implementations)
# all, as in `network.bfloat16()`; tokens beside parameters in fp32, as under autocast; and the reverse
ROUNDED = {"all": lambda tokens: True, "tokens": lambda tokens: tokens, "parameters": lambda tokens: not tokens}


def in_dtypes(tensors, rounded):
    """Tensors of a call in bf16 where `rounded` says so, else in fp32; what is yes or no stays that."""
    given = zip(tensors, rounded, strict=True)
    return [x if _is_no_number(x) else x.to(BF16 if low else torch.float32) for x, low in given]


def _is_no_number(x):
    return x is None or x.dtype == torch.bool


def widened(tensors):
    """In float64."""
    return [x if _is_no_number(x) else x.double() for x in tensors]


def test_kernels_take_no_images_at_all():
    for name, call in operator_calls(16).items():
        given = zip(call.tensors, call.of_tokens, strict=True)
        none = [x if _is_no_number(x) else x.float()[:0] if tokens else x.float() for x, tokens in given]
        try:
            results = call.by_kernel(none)
        except subquad.SubquadError:
            # refused, as what does not fit is
            continue
        # what is left are gradients of parameters
        assert results and all(x.isfinite().all() for x in results), name


def test_every_kernel_has_a_call():
    assert sorted(operator_calls(8)) == NATIVE


@pytest.mark.parametrize("rounded", ROUNDED)
@pytest.mark.parametrize("width", [7, 16, 40])
@pytest.mark.parametrize("name", NATIVE)
def test_a_kernel_errs_at_most_twice_as_much_as_rounding_does(name, width, rounded):
    errs_at_most_twice_as_much_as_rounding(operator_calls(width)[name], rounded)


@pytest.mark.parametrize("name", NATIVE)
def test_that_holds_whatever_numbers_are_drawn(name):
    # the largest of a few hundred errors is a matter of luck, that of eight draws is less so
    drawn = [list(errors_of(operator_calls(7, seed)[name], "tokens")) for seed in range(8)]
    for pairs in zip(*drawn, strict=True):
        for error, unavoidable in pairs:
            assert error.norm() <= 2 * unavoidable.norm()
        assert max(error.abs().max() for error, _ in pairs) <= 2 * max(rounding.abs().max() for _, rounding in pairs)


def errs_at_most_twice_as_much_as_rounding(call, rounded):
    for error, unavoidable in errors_of(call, rounded):
        assert error.norm() <= 2 * unavoidable.norm()
        assert error.abs().max() <= 2 * unavoidable.abs().max()


def errors_of(call, rounded):
    """Of each result: the kernel's error, and that of rounding what it is given and what it gives."""
    chosen = [ROUNDED[rounded](tokens) for tokens in call.of_tokens]
    given = in_dtypes(call.tensors, chosen)
    fp32 = in_dtypes(call.tensors, [False] * len(chosen))
    meant = [x if low or _is_no_number(x) else y.double() for x, y, low in zip(call.tensors, fp32, chosen, strict=True)]
    if not any(low and x is not None for x, low in zip(call.tensors, chosen, strict=True)):
        pytest.skip("nothing is rounded")
    exact, unrounded = call.exact(widened(given)), call.exact(meant)
    for got, from_given, from_meant in zip(call.by_kernel(given), exact, unrounded, strict=True):
        assert got.dtype in (BF16, torch.float32) and got.shape == from_given.shape
        yield got.double() - from_given, from_given.to(got.dtype).double() - from_meant


@pytest.mark.parametrize("name", NATIVE)
def test_results_have_the_dtypes_that_compiling_is_told(name):
    call = operator_calls(16)[name]
    for chosen in ROUNDED.values():
        given = in_dtypes(call.tensors, map(chosen, call.of_tokens))
        torch.library.opcheck(
            call.operator.packet.default, (*given, *call.settings, "native"), test_utils=("test_faketensor",)
        )


@pytest.mark.parametrize("name", NATIVE)
def test_tokens_of_several_dtypes_are_taken(name):
    call = operator_calls(16)[name]
    if sum(call.of_tokens) < 2:
        pytest.skip("there are no several tokens")
    first = call.of_tokens.index(True)
    given = in_dtypes(call.tensors, (place == first for place in range(len(call.tensors))))
    low, exact = call.by_kernel(given), call.exact(widened(given))
    for got, expected in zip(low, exact, strict=True):
        assert (got.double() - expected).norm() <= torch.finfo(got.dtype).eps * max(1, 20 * expected.norm())


@pytest.mark.parametrize("what", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("place", [0, 17, 39])
def test_what_is_no_number_is_where_it_is_in_fp32(what, place):
    """Of each operator of tokens the same numbers are lost in bf16 as in fp32, also at the ends of rows."""
    for name, call in operator_calls(40).items():
        if not call.of_tokens[0]:
            continue
        first = call.tensors[0].to(BF16)
        first[0, 1, ..., place] = what
        given = [first, *in_dtypes(call.tensors[1:], [True] * (len(call.tensors) - 1))]
        low, full = call.by_kernel(given), call.by_kernel(in_dtypes(given, [False] * len(given)))
        for one, other in zip(low, full, strict=True):
            assert torch.equal(one.isfinite(), other.to(one.dtype).isfinite()), name
            assert torch.equal(one.isnan(), other.isnan()), name


def test_rounding_is_to_the_nearest_even_and_keeps_what_is_no_number():
    """A mean over one place is a copy, and with a weight of 1 the local branch, which is rounded, is a sum of two."""
    numbers = torch.tensor([1.0, -3.5, 0.0, 65504.0, 3.3e38, 1e-30, float("nan"), float("inf")]).repeat(5)
    y, v = (x.view(1, 1, 1, 40).to(BF16) for x in (numbers, numbers.roll(1) * 2.0**-9))
    got = y.clone()
    weight, grid = torch.ones(40, 1, 1), TokenGrid(1, 1)
    ops.add_local(got, v, weight, grid=grid, kv_grid=grid, backend="native")
    assert torch.equal(got.nan_to_num(), (y.float() + v.float()).to(BF16).nan_to_num())


@pytest.mark.parametrize("name", sorted(name for name in ATTENTION if f"{name}_attention" in NATIVE))
@pytest.mark.parametrize("autocast", [False, True])
def test_networks_in_bf16_hand_bf16_to_the_kernels(name, autocast, monkeypatch):
    """No kernel of tokens sees fp32, and what comes out is as good as the eager form's."""
    seen = {}

    def noting(operator, function):
        def note(*arguments):
            seen.setdefault(operator.name, set()).add(arguments[0].dtype)
            return function(*arguments)

        return note

    for operator_name in NATIVE:
        operator = OPERATORS[operator_name]
        one = operator.implementations["native"]
        replaced = dataclasses.replace(one, function=noting(operator, one.function))
        monkeypatch.setitem(operator.implementations, "native", replaced)
    torch.manual_seed(0)
    settings = {"img_size": 64, "depths": (2,), **without_prefix(name)}
    model = subquad.create_model("deit_tiny", attention=name, **settings).eval()
    image = torch.randn(2, 3, 64, 64)
    exact = model.double()(image.double())
    if not autocast:
        model, image = model.to(BF16), image.to(BF16)
    else:
        model = model.float()
    errors = {}
    for backend in ("eager", "native"):
        with torch.no_grad(), use_backend(backend), torch.autocast("cpu", BF16, enabled=autocast):
            errors[backend] = (model(image).double() - exact).norm()
    assert errors["native"] <= 1.25 * errors["eager"] and seen
    # what lies between the maps of SOFT is in fp32
    assert {name for name, dtypes in seen.items() if dtypes != {BF16}} <= {"newton_inverse"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inline"])
def test_compiled_networks_in_bf16_do_too(name):
    model = subquad.create_model("deit_tiny", attention=name, img_size=64, depths=(1,)).eval().to(BF16)
    image = torch.randn(1, 3, 64, 64, dtype=BF16)
    graphs = []
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(str(graph.graph)) or graph)
    with torch.no_grad():
        assert torch.equal(compiled(image), model(image))
    assert any("subquad.inline_mixer" in graph for graph in graphs)
    assert kernels.choose(kernels.inline_attention, (image.new_zeros(1, 1, 4, 16),) * 3) == "native"
