"""Every registered mechanism keeps every promise of the contract (subquad.attention.ATTENTION)."""

import copy
import inspect
import math
import re
from functools import partial

import pytest
import torch
from mechanisms import (
    BATCH,
    DIM,
    GRIDS,
    HEADS,
    SEQUENCE,
    assert_refused,
    build,
    but_values,
    check_weights,
    each,
    inputs_of,
    lent,
    refuses,
    rotation_of,
    without_refused_prefix,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from subquad import ATTENTION, SubquadError, TokenGrid
from subquad.attention import traits_of
from subquad.attention.contract import VOCABULARY
from subquad.models.layers import SelfAttention

every_mechanism = pytest.mark.parametrize("name", ATTENTION)
# tables that all heads share, and such as differ from head to head
TURNED = [
    pytest.param(name, rope, id=f"{name} turned as {rope}")
    for name, cls in ATTENTION.items()
    if "rotation" in cls.inputs
    for rope in ("mala", "mlla", "dinov3")
]
# as it is, and with a rotation where the mechanism turns its features itself
every_way = pytest.mark.parametrize(
    ("name", "rope"), [*(pytest.param(name, None, id=name) for name in ATTENTION), *TURNED]
)
every_grid = pytest.mark.parametrize("grid", GRIDS, ids=str)


@every_mechanism
def test_inputs_are_words_of_the_vocabulary_in_order_and_the_arguments_of_forward(name):
    cls = ATTENTION[name]
    assert [word for word in VOCABULARY if word in cls.inputs] == list(cls.inputs)
    assert tuple(inspect.signature(cls.forward).parameters) == ("self", *cls.inputs, "grid", "kv_grid")
    expected = tuple(word for word in cls.inputs if word != "v")
    assert tuple(inspect.signature(cls.weights).parameters) == ("self", *expected, "grid", "kv_grid")


@every_way
@every_grid
def test_weights_times_values_is_the_fast_form_without_its_local_branch(name, rope, grid):
    grid = without_refused_prefix(name, grid)
    module = build(name, grid, local=False)
    weights = check_weights(module, inputs_of(module, grid, rope=rope), grid=grid, kv_grid=grid)
    if weights is not None:
        assert weights.shape[:2] == (BATCH, HEADS) and weights.shape[3:] == (grid.num_tokens, grid.num_tokens)


@every_way
@every_grid
def test_a_mechanism_works_on_another_grid_than_it_was_built_for(name, rope, grid):
    grid = without_refused_prefix(name, grid)
    built = TokenGrid(1, 31, grid.prefix) if grid.height == 1 else TokenGrid(6, 6, grid.prefix)
    module = build(name, built, local=False)
    supply = inputs_of(module, grid, rope=rope)
    check_weights(module, supply, grid=grid, kv_grid=grid)
    whole = build(name, built)(**supply, grid=grid, kv_grid=grid)
    assert whole.shape == supply["v"].shape and whole.isfinite().all()


@every_mechanism
def test_a_mechanism_built_for_a_map_works_on_a_sequence_and_the_other_way_round(name):
    for built, called in ((TokenGrid(6, 6), SEQUENCE), (SEQUENCE, TokenGrid(6, 6)), (TokenGrid(8, 8), TokenGrid(1, 1))):
        module = build(name, built)
        assert module(**inputs_of(module, called), grid=called, kv_grid=called).isfinite().all()


@every_way
@pytest.mark.parametrize("prefix", range(6))
def test_prefix_tokens_attend_and_are_attended(name, rope, prefix):
    grid = TokenGrid(4, 5, prefix)
    if prefix and refuses(name, "prefix"):
        assert_refused(name, lambda: build(name, grid), "prefix")
        return
    module = build(name, grid)
    supply = inputs_of(module, grid, rope=rope)
    supply["v"].requires_grad_()
    y = module(**supply, grid=grid, kv_grid=grid)
    assert y.shape == supply["v"].shape == (BATCH, len(y[0]), 20 + prefix, DIM // HEADS)
    (gradient,) = torch.autograd.grad(y[:, :, -1].sum(), supply["v"])
    assert (gradient.abs().sum(dim=(0, 1, 3)) > 0).all(), "the last token does not see all values"


@every_mechanism
def test_keys_may_stand_on_a_coarser_grid_or_that_is_refused_in_one_line(name):
    grid, kv_grid = TokenGrid(6, 9), TokenGrid(3, 4)
    if refuses(name, "kv_grid"):
        refusal = assert_refused(name, lambda: build(name, grid, kv_grid=kv_grid), "kv_grid")
        assert re.search(r"6×9 .*3×4", refusal)
        return
    module = build(name, grid, kv_grid=kv_grid, local=False)
    supply = inputs_of(module, grid, kv_grid=kv_grid)
    check_weights(module, supply, grid=grid, kv_grid=kv_grid)
    y = build(name, grid, kv_grid=kv_grid)(**supply, grid=grid, kv_grid=kv_grid)
    assert y.shape == (*supply["v"].shape[:2], *supply["q"].shape[2:])


@every_way
@pytest.mark.parametrize("grid", [SEQUENCE, TokenGrid(1, 23, 2), TokenGrid(5, 5, 1)], ids=str)
def test_what_stands_in_the_padding_does_not_matter_or_padding_is_refused(name, rope, grid):
    grid = without_refused_prefix(name, grid)
    module = build(name, grid)
    supply = inputs_of(module, grid, rope=rope)
    padding = torch.zeros(BATCH, grid.num_tokens, dtype=torch.bool)
    padding[0, -9:] = True
    supply["padding"] = padding
    if refuses(name, "padding"):
        grids = {"grid": grid, "kv_grid": grid}
        for call in (lambda: module(**supply, **grids), lambda: module.weights(**but_values(supply), **grids)):
            assert_refused(name, call, "padding")
        return
    y = module(**supply, grid=grid, kv_grid=grid)
    if not traits_of(module).no_weights:
        assert (module.weights(**but_values(supply), grid=grid, kv_grid=grid)[0, ..., -9:] == 0).all()
    # not even whether it is a number
    for value in (7.0, math.nan):
        for word in ("q", "k", "v", "x"):
            if word in supply:
                supply[word] = supply[word].clone()
                supply[word][0].masked_fill_(padding[0][:, None], value)
        changed = module(**supply, grid=grid, kv_grid=grid)
        torch.testing.assert_close(changed[0, :, :-9], y[0, :, :-9], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(changed[1], y[1], rtol=1e-12, atol=1e-12)


REFUSED = [(name, what) for name, cls in ATTENTION.items() for what in traits_of(cls).refuses]


@pytest.mark.parametrize(("name", "what"), REFUSED)
def test_what_a_mechanism_refuses_it_refuses_at_a_call_too(name, what):
    built = TokenGrid(4, 4)
    module = build(name, built)
    grid = TokenGrid(4, 4, 2) if what == "prefix" else built
    kv_grid = TokenGrid(2, 2) if what == "kv_grid" else grid
    supply = inputs_of(module, grid, kv_grid=kv_grid)
    if what == "padding":
        supply["padding"] = torch.arange(16).expand(BATCH, -1) > 14
    assert_refused(name, lambda: module(**supply, grid=grid, kv_grid=kv_grid), what)
    assert_refused(name, lambda: module.weights(**but_values(supply), grid=grid, kv_grid=kv_grid), what)


@every_way
def test_no_padding_is_as_padding_that_is_nowhere(name, rope):
    module = build(name, SEQUENCE)
    supply = inputs_of(module, SEQUENCE, rope=rope)
    y = module(**supply, grid=SEQUENCE, kv_grid=SEQUENCE)
    supply["padding"] = torch.zeros(BATCH, SEQUENCE.num_tokens, dtype=torch.bool)
    torch.testing.assert_close(module(**supply, grid=SEQUENCE, kv_grid=SEQUENCE), y, rtol=1e-12, atol=1e-12)


@every_mechanism
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_has_sums_over_long_padded_sequences_too(name, dtype):
    """Without padding means are PyTorch's, which sum in fp32; with it those of 200 tokens left what fp16 can hold."""
    module, grid = build(name, SEQUENCE).to(dtype), TokenGrid(1, 200)
    supply = inputs_of(module, grid)
    # all have something in common, as tokens of a channel with a bias have
    supply = {key: None if t is None else (t + 400 * (key == "x")).to(dtype) for key, t in supply.items()}
    supply["padding"] = torch.zeros(BATCH, grid.num_tokens, dtype=torch.bool)
    half = module(**supply, grid=grid, kv_grid=grid).double()
    exact = {key: t if t is None or t.dtype == torch.bool else t.double() for key, t in supply.items()}
    wanted = module.double()(**exact, grid=grid, kv_grid=grid)
    assert (half - wanted).norm() < 8 * torch.finfo(dtype).eps * wanted.norm()


@pytest.mark.parametrize("name", ["softmax", "linear", "inline", "mala", "rala", "nala", "polapp", "mlla", "ttt"])
def test_without_position_tables_a_padded_sequence_is_the_short_one(name):
    long, short = TokenGrid(1, 23), TokenGrid(1, 15)
    module = build(name, long)
    supply = inputs_of(module, long)
    cut = {word: t if t is None else t.narrow(1 if word == "x" else 2, 0, 15) for word, t in supply.items()}
    supply["padding"] = torch.arange(23).ge(15).expand(BATCH, -1)
    y = module(**supply, grid=long, kv_grid=long)[:, :, :15]
    torch.testing.assert_close(y, module(**cut, grid=short, kv_grid=short), rtol=1e-12, atol=1e-12)


@every_way
def test_images_do_not_see_each_other(name, rope):
    grid = without_refused_prefix(name, TokenGrid(4, 6, 1))
    module = build(name, grid)
    supply, other = (inputs_of(module, grid, rope=rope, seed=seed) for seed in (0, 5))
    mixed = {w: torch.stack([t[0], other[w][1]]) if isinstance(t, Tensor) else t for w, t in supply.items()}
    y, changed = module(**supply, grid=grid, kv_grid=grid), module(**mixed, grid=grid, kv_grid=grid)
    torch.testing.assert_close(changed[0], y[0], rtol=1e-12, atol=1e-12)
    assert (changed[1] != y[1]).any()


@every_way
def test_of_no_image_there_is_no_answer_and_no_gradient(name, rope):
    grid = without_refused_prefix(name, TokenGrid(4, 5, 1))
    layer = SelfAttention(DIM, HEADS, ATTENTION[name], grid=grid)
    x = torch.randn(0, grid.num_tokens, DIM, requires_grad=True)
    rotation = None if rope is None else rotation_of(layer.inner, grid, rope)
    y = layer(x, grid=grid, rotation=rotation)
    assert y.shape == x.shape
    y.sum().backward()
    assert not [key for key, p in layer.named_parameters() if p.grad is not None and p.grad.count_nonzero()]


@every_way
def test_gradients_agree_with_finite_differences(name, rope):
    grid = without_refused_prefix(name, TokenGrid(2, 3, 1))
    module = build(name, grid)
    supply = each(inputs_of(module, grid, rope=rope), lambda t: t[:1].contiguous())
    words = [word for word, t in supply.items() if isinstance(t, Tensor)]
    tensors = [supply[word].requires_grad_() for word in words] + list(module.parameters())

    def function(*tensors):
        given = supply | dict(zip(words, tensors, strict=False))
        return module(**given, grid=grid, kv_grid=grid)

    assert torch.autograd.gradcheck(function, tensors, fast_mode=True, atol=1e-6)


@every_mechanism
def test_every_parameter_gets_a_gradient(name):
    for grid in (without_refused_prefix(name, TokenGrid(5, 4, 1)), SEQUENCE):
        layer = SelfAttention(DIM, HEADS, ATTENTION[name], grid=grid)
        layer(torch.randn(BATCH, grid.num_tokens, DIM), grid=grid).square().sum().backward()
        without = [key for key, parameter in layer.named_parameters() if parameter.grad is None]
        assert not without


@every_way
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_half_precision_is_finite_and_as_good_as_fp32_accumulation(name, rope, dtype, scale):
    grid = without_refused_prefix(name, TokenGrid(14, 14, 1))
    module = build(name, grid)
    # turned products over a divisor that does not turn are of any size, where features are exponentials
    scale = scale if rope is None else scale**0.5
    # amplitude `scale` at most: normal numbers would reach 4 times that
    drawn = inputs_of(module, grid, rope=rope)
    supply = each(drawn, lambda t: (t.clamp(-4, 4) / 4 * scale).to(dtype))
    exact = each(supply, torch.Tensor.double)
    if rope is not None:
        supply["rotation"] = rotation_of(module, grid, rope, dtype=dtype)
    reference = module.to(dtype).double()(**exact, grid=grid, kv_grid=grid)
    half = module.to(dtype)(**supply, grid=grid, kv_grid=grid)
    # what is no mean of values, and gates, can make what the type has no numbers for, with the gate and in front of it
    opened = exact | {"g": torch.ones_like(exact["g"])} if "g" in exact else exact
    whole = module.double()(**opened, grid=grid, kv_grid=grid)
    fits = torch.maximum(reference.abs(), whole.abs()) < 0.5 * torch.finfo(dtype).max
    module.to(dtype)
    assert half.dtype == dtype and half[fits].isfinite().all() and fits.float().mean() > 0.9
    # the best that half precision can do: exact sums of tensors that were rounded once when they passed between steps
    step = torch.finfo(dtype).eps
    noise = each(exact, lambda t: t * (1 + step * (2 * torch.rand_like(t) - 1)))
    unavoidable = (module.double()(**noise, grid=grid, kv_grid=grid) - reference)[fits].norm()
    assert (half.double() - reference)[fits].norm() <= 2 * max(unavoidable, step * reference[fits].norm())


@every_mechanism
def test_autocast_gives_the_same_as_full_precision_up_to_rounding(name):
    grid = without_refused_prefix(name, TokenGrid(8, 8, 1))
    layer = SelfAttention(DIM, HEADS, ATTENTION[name], grid=grid)
    x = torch.randn(BATCH, grid.num_tokens, DIM)
    full = layer(x, grid=grid)
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(x, grid=grid)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), full, rtol=0.1, atol=0.05)


# compiling takes seconds: one mechanism stands for all in the fast tests
compiled = pytest.mark.parametrize(
    "name", [name if name == "linear" else pytest.param(name, marks=pytest.mark.slow) for name in ATTENTION]
)


@pytest.mark.slow
@pytest.mark.thinned(4)
@compiled
def test_the_layer_compiles_without_a_graph_break(name):
    grid = without_refused_prefix(name, TokenGrid(5, 6, 1))
    layer = SelfAttention(DIM, HEADS, ATTENTION[name], grid=grid)
    x = torch.randn(BATCH, grid.num_tokens, DIM)
    torch.compiler.reset()  # what other tests compiled would decide what is compiled here
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, grid=grid), layer(x, grid=grid), rtol=1e-4, atol=1e-5)


@pytest.mark.thinned(4)
@compiled
def test_the_layer_exports_for_any_batch(name):
    grid = without_refused_prefix(name, TokenGrid(5, 6, 1))
    layer = SelfAttention(DIM, HEADS, ATTENTION[name], grid=grid).eval()

    class OnGrid(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x, grid=grid)

    batch = torch.export.Dim("batch", min=1, max=64)
    x = torch.randn(3, grid.num_tokens, DIM)
    program = torch.export.export(OnGrid(), (x,), dynamic_shapes={"x": {0: batch}})
    x = torch.randn(5, grid.num_tokens, DIM)
    torch.testing.assert_close(program.module()(x), layer(x, grid=grid), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@every_mechanism
def test_cost_grows_with_the_number_of_tokens_as_it_says(name):
    def products(side):
        grid = TokenGrid(side, side)
        # shapes are enough to count what would take a minute
        device = "meta" if traits_of(ATTENTION[name]).quadratic else "cpu"
        with torch.device(device):
            module = ATTENTION[name](DIM, HEADS, grid=grid, kv_grid=grid)
        supply = {w: t if t is None else t.float().to(device) for w, t in inputs_of(module, grid).items()}
        # older torch counts nothing for the fused kernel on the CPU
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            module(**supply, grid=grid, kv_grid=grid)
        return counter.get_total_flops()

    growth, traits = products(112) / products(56), traits_of(ATTENTION[name])
    if traits.quadratic:
        assert growth > 15
    else:
        # a logarithm of n, where there is one, is 1.17 times as large
        assert growth < 4.4 * {"": 1, "n log n": math.log(112**2) / math.log(56**2)}[traits.cost]


@every_mechanism
def test_construction_on_the_meta_device_makes_no_tensors(name):
    with torch.device("meta"):
        module = ATTENTION[name](DIM, HEADS, grid=TokenGrid(4, 4), kv_grid=TokenGrid(4, 4))
    assert all(tensor.is_meta for tensor in module.state_dict().values())


@every_mechanism
def test_heads_that_do_not_divide_the_width_are_refused_with_both_numbers(name):
    with pytest.raises(SubquadError, match=r"5 heads do not divide a width of 16"):
        ATTENTION[name](16, 5, grid=TokenGrid(4, 4), kv_grid=TokenGrid(4, 4))


@every_mechanism
def test_tokens_of_another_number_of_heads_are_taken_or_refused_in_one_line(name):
    grid = GRIDS[0]
    module = build(name, grid)
    for heads in (1, 2, 3, 4):
        tokens = inputs_of(module, grid)
        tokens |= {
            key: value[:, :1].expand(-1, heads, -1, -1)
            for key, value in tokens.items()
            if key in ("q", "k", "v", "g") and value is not None
        }
        try:
            assert module(**tokens, grid=grid, kv_grid=grid).shape[1] == heads
        except SubquadError as error:
            assert "\n" not in str(error)


@every_mechanism
def test_state_saved_is_state_loaded(name):
    grid = without_refused_prefix(name, TokenGrid(4, 5, 1))
    module, other = build(name, grid), build(name, grid)
    other.load_state_dict(module.state_dict())
    supply = inputs_of(module, grid)
    assert torch.equal(module(**supply, grid=grid, kv_grid=grid), other(**supply, grid=grid, kv_grid=grid))


def exchanged(part):
    """As accelerate does, and others that put something into a module's forward."""
    part.forward = lambda *given: 2 * type(part).forward(part, *given)


HEARD = {"hook": lambda part: part.register_forward_hook(lambda part, given, y: 2 * y), "forward": exchanged}


@every_mechanism
@pytest.mark.parametrize("how", HEARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("grid", [TokenGrid(5, 5), TokenGrid(3, 4, 1)], ids=str)
def test_what_listens_to_layers_of_pytorchs_within_a_mechanism_is_heard(name, how, dtype, grid):
    grid = without_refused_prefix(name, grid)
    whole = build(name, grid).to(dtype)
    supply = {word: given if given is None else given.to(dtype) for word, given in inputs_of(whole, grid).items()}
    for path, kind in whole.named_modules():
        if not type(kind).__module__.startswith("torch.nn") or not list(kind.parameters(recurse=False)):
            continue
        changed, heard = copy.deepcopy(whole), copy.deepcopy(whole)
        with torch.no_grad():
            for parameter in changed.get_submodule(path).parameters():
                parameter *= 2
        HEARD[how](heard.get_submodule(path))
        with torch.no_grad():
            expected = changed(**supply, grid=grid, kv_grid=grid)
            torch.testing.assert_close(heard(**supply, grid=grid, kv_grid=grid), expected, msg=path)


@every_mechanism
@pytest.mark.parametrize("grid", [TokenGrid(5, 5), TokenGrid(3, 4, 1)], ids=str)
@torch.no_grad()
def test_parameters_of_parts_may_be_there_only_while_the_part_is_called(name, grid):
    grid = without_refused_prefix(name, grid)
    module = build(name, grid)
    supply = inputs_of(module, grid)
    calls = [partial(module, **supply)]
    if not traits_of(module).no_weights:
        calls.append(partial(module.weights, **but_values(supply)))
    expected = [call(grid=grid, kv_grid=grid) for call in calls]
    for part in module.modules():
        if part is not module and list(part.parameters(recurse=False)):
            lent(part)
    for call, wanted in zip(calls, expected, strict=True):
        torch.testing.assert_close(call(grid=grid, kv_grid=grid), wanted)
