"""Every operation and mechanism with shapes that do not fit, generated from what it declares: refused in one line."""

import inspect
import math

import pytest
import torch
from mechanisms import build, inputs_of
from torch.testing import assert_close

from subquad import ATTENTION, SubquadError, TokenGrid, kernels, ops
from subquad.attention import traits_of
from subquad.kernels import use_backend
from subquad.ops import OPERATIONS

GRID = TokenGrid(3, 4)
LETTERS = {"b": 2, "h": 3, "n": 12, "m": 10, "d": 8, "e": 8, "a": 4, "c": 24, "k": 3, "i": 2, "j": 2, "x": 5, "y": 6}
LETTERS |= {"f": 24, "w": 3}  # c = h·d channels, and a filter for each of them
LEADING = (2, 3)

# what an operation wants besides its tensors, and the letters that this decides on
SETTINGS = {
    "add_local": ({"grid": GRID, "kv_grid": GRID}, {"m": 12}),
    "circulant_attention": ({"grid": GRID}, {}),
    "circulant_weights": ({"grid": GRID}, {}),
    "convolve_windows": ({"grid": GRID}, {}),
    "focused_attention": ({"power": 3.0}, {}),
    "focused_weights": ({"power": 3.0}, {}),
    "soft_attention": ({"inverse": "cholesky"}, {}),
    "soft_weights": ({"inverse": "cholesky"}, {}),
    "ttt_filter": ({"grid": GRID, "kv_grid": GRID}, {"m": 12}),
    "mhla_attention": ({"grid": GRID, "kv_grid": GRID, "pieces": (2, 2)}, {"m": 12, "i": 4, "j": 4}),
    "mhla_weights": ({"grid": GRID, "kv_grid": GRID, "pieces": (2, 2)}, {"m": 12, "i": 4, "j": 4}),
    "pool_tokens": ({"grid": GRID, "bins": TokenGrid(2, 2)}, {}),
}
MASKS = {"padding", "query_padding", "idle", "forbidden"}


def letters_of(name):
    return LETTERS | SETTINGS.get(name, ({}, {}))[1]


def length(axis, letters):
    axis = axis.lstrip("?")
    if "+" in axis:
        name, more = axis.split("+")
        return letters[name] + int(more)
    return (
        int(axis)
        if axis.isdigit()
        else math.prod(int(factor) if factor.isdigit() else letters[factor] for factor in axis.split("*"))
    )


def right_shapes(shapes, letters):
    """A fitting shape for each tensor, of its first form."""
    forms = {name: text.split("|")[0].split() for name, text in shapes.texts.items()}
    return {
        name: sum((LEADING if axis == "..." else (length(axis, letters),) for axis in form), ())
        for name, form in forms.items()
    }


def wrong_shapes(shape):
    """Shapes near a right one."""
    for axis, size in enumerate(shape):
        for other in (1, size - 1, size + 1, 50 * size):
            if other != size and other > 0:
                yield (*shape[:axis], other, *shape[axis + 1 :])
    yield shape[1:]
    yield (1, *shape)
    if len(shape) > 1:
        yield (*shape[:-2], shape[-1], shape[-2])


def fits(shapes, given, known):
    """Whether shapes fit a declaration: some choice of forms gives every letter one number."""
    choices = [{**known}]
    for name, shape in given.items():
        remaining = []
        for form in (text.split() for text in shapes.texts[name].split("|")):
            for letters in choices:
                bound = agree(form, shape, dict(letters))
                if bound is not None:
                    remaining.append(bound)
        choices = remaining
    return bool(choices)


def agree(form, shape, letters):
    if form[0] == "...":
        split = len(shape) - len(form) + 1
        if split < 0 or letters.setdefault("...", shape[:split]) != shape[:split]:
            return None
        form, shape = form[1:], shape[split:]
    if len(form) != len(shape):
        return None
    for axis, size in zip(form, shape, strict=True):
        if axis.startswith("?") and size == 1:
            continue
        name = axis.lstrip("?")
        wanted = length(name, letters) if name.isdigit() or "*" in name else letters.setdefault(name, size)
        if wanted != size:
            return None
    return letters


def tensor(name, shape, dtype=torch.float32):
    """Numbers that every operation can work on; large ones take no memory."""
    if name in MASKS:
        return torch.zeros(shape, dtype=torch.bool)
    if name == "gram":
        return torch.eye(shape[-1], dtype=dtype).expand(shape) if shape[-2:-1] == shape[-1:] else torch.ones(shape)
    generator = torch.Generator().manual_seed(len(name))
    return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)


def call(name, given, **more):
    function, settings = getattr(ops, name), SETTINGS.get(name, ({}, {}))[0]
    order = [parameter for parameter in inspect.signature(function).parameters if parameter in given]
    tensors = {key: tensor(key, given[key]) for key in order}
    return function(**tensors, **settings, **more)


CASES = [
    pytest.param(name, argument, id=f"{name}-{argument}")
    for name, shapes in OPERATIONS.items()
    for argument in shapes.texts
]


def test_every_public_operation_says_its_shapes():
    public = {name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))}
    assert public == OPERATIONS.keys()
    for name, shapes in OPERATIONS.items():
        assert shapes.texts.keys() <= inspect.signature(getattr(ops, name)).parameters.keys()


@pytest.mark.parametrize("name", OPERATIONS)
def test_right_shapes_are_right_with_every_optional_tensor_and_without(name):
    shapes, letters = OPERATIONS[name], letters_of(name)
    given = right_shapes(shapes, letters)
    assert fits(shapes, given, {})
    with use_backend("eager"):
        expected = call(name, given)
    assert_close(call(name, given), expected, rtol=1e-4, atol=1e-5)
    parameters = inspect.signature(getattr(ops, name)).parameters
    needed = {key: shape for key, shape in given.items() if parameters[key].default is inspect.Parameter.empty}
    with use_backend("eager"):
        expected = call(name, needed)
    assert_close(call(name, needed), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_wrong_shapes_are_refused_in_one_line_by_all_backends_alike(name, argument):
    shapes, letters = OPERATIONS[name], letters_of(name)
    given = right_shapes(shapes, letters)
    known = {"n": 12} if "grid" in SETTINGS.get(name, ({}, {}))[0] else {}
    known |= SETTINGS.get(name, ({}, {}))[1]
    refused = 0
    for wrong in wrong_shapes(given[argument]):
        tried = given | {argument: wrong}
        if fits(shapes, tried, known):
            with use_backend("eager"):
                expected = call(name, tried)
            assert_close(call(name, tried), expected, rtol=1e-4, atol=1e-5)
            continue
        complaints = set()
        for backend in ("auto", "eager"):
            with use_backend(backend), pytest.raises(SubquadError) as caught:
                call(name, tried)
            complaints.add(str(caught.value))
        (complaint,) = complaints
        assert "\n" not in complaint and str(wrong) in complaint
        refused += 1
    assert refused


OF_TABLES = {"s": 2, "y": 2, "x": 5, "p": 2, "t": 2, "i": 2, "j": 5, "u": 2}
"""Letters of biases of tables: 2 rows and 5 columns behind 2 tokens of the prefix."""
BINS = {"shape": GRID.shape, "bins": (2, 2)}
BY_THEMSELVES = {
    "convolve_windows": {"height": GRID.height, "width": GRID.width},
    "pool": BINS,
    "pool_gradient": BINS,
    "mlp": {"activation": "gelu"},
    "norm_projection": {"activation": "nothing"},
    "map_filter": {"activation": "gelu"},
    "map_products": {"size": 3},
    "map_products_gradient": {"size": 3},
    "agent_mixer": {"shape": (2, 5), "bins": (2, 2), "filters": "channel"},
    "pola_mixer": {"filters": "channel"},
    "focused_mixer": {"filters": "channel"},
    "polapp_mixer": {"filters": "channel"},
    "mhla_mixer": {"filters": "channel", "pieces": (2, 2)},
    "soft_mixer": {"shape": (2, 5), "filters": "channel"},
}
"""What operators want besides their tensors, where any number would not do."""
TAPS = {"map_products_gradient": {"t": 9}, "patch_tokens": {"t": 1 * 3 + 12}}
TAPS |= {"ttt_mixer": {"g": 3 + 1, "c": 8}, "mhla_mixer": {"i": 2 * 2}}
"""Letters that these numbers decide on."""


@pytest.mark.parametrize("name", kernels.OPERATORS)
def test_no_operator_runs_on_wrong_shapes_though_called_by_itself(name):
    """Behind the checks of the operations stand those of the kernels: what does not fit ends in an exception."""
    operator = kernels.OPERATORS[name]
    shapes = operator.shapes
    if "native" not in operator.implementations or kernels.unavailable("native"):
        pytest.skip("no kernel for this machine")
    letters = LETTERS | {"m": 12} | OF_TABLES | TAPS.get(name, {})
    right = right_shapes(shapes, letters)
    if name == "local_branch":
        right["g"] = right["y"]
    arguments = operator.packet.default._schema.arguments[:-1]
    numbers = {"float": 1.0, "int": 2, "str": "relu", "bool": True, "List[int]": [3, 4]}

    def run(given):
        wanted = {argument.name: numbers.get(str(argument.type)) for argument in arguments}
        wanted |= BY_THEMSELVES.get(name, {}) | {key: tensor(key, shape) for key, shape in given.items()}
        return operator(*wanted.values(), "native")

    run(right)
    on_a_map = any(str(argument.type) == "List[int]" or argument.name == "height" for argument in arguments)
    for key, shape in right.items():
        for wrong in wrong_shapes(shape):
            tried = right | {key: wrong}
            # tokens in front of a map are its prefix
            are_tokens = {"b", "n"} <= set(shapes.texts[key].split())
            short = on_a_map and are_tokens and wrong[-2] < GRID.num_places
            legal = fits(shapes, tried, {"a": 4}) and not short
            # kernels see lengths, not their order
            if math.prod(wrong) != math.prod(shape) and not legal:
                with pytest.raises((SubquadError, ValueError, RuntimeError, IndexError)):
                    run(tried)


WRONG_GRIDS = [TokenGrid(3, 5), TokenGrid(15, 15), TokenGrid(13, 15), TokenGrid(3, 4, 1), TokenGrid(1, 11)]


@pytest.mark.parametrize("name", ATTENTION)
def test_every_mechanism_refuses_tokens_that_do_not_fill_their_grid(name):
    module = build(name, GRID).float()
    supply = {key: None if x is None else x.float() for key, x in inputs_of(module, GRID).items()}
    but_values = {key: x for key, x in supply.items() if key != "v"}
    module(**supply, grid=GRID, kv_grid=GRID)
    for backend in ("auto", "eager"):
        for wrong in WRONG_GRIDS:
            for grids in ((wrong, GRID), (wrong, wrong), (GRID, wrong)):
                grid, kv_grid = grids
                if "k" not in module.inputs and grid == GRID:
                    continue
                with use_backend(backend), torch.no_grad():
                    with pytest.raises(SubquadError, match=r"^\d+ tokens|^built for"):
                        module(**supply, grid=grid, kv_grid=kv_grid)
                    if traits_of(module).no_weights:
                        continue
                    with pytest.raises(SubquadError, match=r"^\d+ tokens|^built for"):
                        module.weights(**but_values, grid=grid, kv_grid=kv_grid)


@pytest.mark.parametrize("name", ATTENTION)
def test_every_mechanism_refuses_inputs_of_other_images_heads_or_channels(name):
    module = build(name, GRID).float()
    supply = {key: None if x is None else x.float() for key, x in inputs_of(module, GRID).items()}
    for key in (key for key, x in supply.items() if x is not None):
        for wrong in (supply[key][:1], supply[key][:, :1], supply[key][..., :1], supply[key][:, :, :-1]):
            for backend in ("auto", "eager"):
                with use_backend(backend), torch.no_grad(), pytest.raises((SubquadError, RuntimeError, ValueError)):
                    module(**supply | {key: wrong}, grid=GRID, kv_grid=GRID)


WRONG_PADDING = {
    "of fewer tokens": lambda padding: padding[:, :-1],
    "of one image": lambda padding: padding[:1],
    "of one token": lambda padding: padding[:, :1],
    "of no images": lambda padding: padding[0],
    "of pairs": lambda padding: padding[:, None] | padding[:, :, None],
    "ones where tokens are, as transformers has it": lambda padding: (~padding).long(),
    "numbers": lambda padding: padding.float(),
}


@pytest.mark.parametrize("wrong", WRONG_PADDING)
@pytest.mark.parametrize("name", [name for name in ATTENTION if "padding" not in traits_of(ATTENTION[name]).refuses])
def test_every_mechanism_refuses_padding_that_is_not_true_or_false_of_each_key(name, wrong):
    grid = TokenGrid(1, 12)
    module = build(name, grid).float()
    supply = {key: None if x is None else x.float() for key, x in inputs_of(module, grid).items()}
    padding = torch.zeros(len(supply["q"]), 12, dtype=torch.bool)
    padding[:, 9:] = True
    module(**supply | {"padding": padding}, grid=grid, kv_grid=grid)
    for backend in ("auto", "eager"):
        with use_backend(backend), pytest.raises(SubquadError, match="padding") as caught:
            module(**supply | {"padding": WRONG_PADDING[wrong](padding)}, grid=grid, kv_grid=grid)
        assert "\n" not in str(caught.value)


def test_what_crashed_or_answered_is_refused():
    one = torch.randn(1, 1, 4, 16)
    calls = [
        lambda: ops.linear_attention(one, torch.zeros(()).expand(1, 1, 3_000_000, 16), one),
        lambda: ops.add_local(
            one.repeat(1, 1, 4, 1),
            one.repeat(1, 1, 4, 1),
            torch.randn(16, 3, 3),
            grid=TokenGrid(900, 900),
            kv_grid=TokenGrid(900, 900),
        ),
        lambda: ops.add_local(one, one, torch.randn(16, 2, 2), grid=TokenGrid(2, 2), kv_grid=TokenGrid(2, 2)),
    ]
    for refused in calls:
        with pytest.raises(SubquadError) as caught:
            refused()
        assert "\n" not in str(caught.value)


def test_an_expanded_tensor_is_not_written_to():
    y, v = torch.randn(1, 1, 1, 16).expand(2, 3, 4, 16), torch.randn(2, 3, 4, 16)
    weight, grid = torch.randn(48, 3, 3), TokenGrid(2, 2)
    before = y.clone()
    expected = ops.add_local(y, v, weight, grid=grid, kv_grid=grid, backend="eager")
    with torch.no_grad():
        assert_close(ops.add_local(y, v, weight, grid=grid, kv_grid=grid), expected)
    assert torch.equal(y, before)
