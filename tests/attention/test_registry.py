"""Mechanisms from outside: registered, or installed as a plug-in; what is wrong with one is said in one line."""

import inspect
import sys
from contextlib import nullcontext

import pytest
import torch
from outside import SOURCE, install
from torch import nn

import subquad
from subquad import ATTENTION, SubquadError, TokenGrid, Traits, register_attention
from subquad.attention import traits_of
from subquad.attention.contract import VOCABULARY, check_mechanism, of_another_forward
from subquad.attention.sweeps import streaming_of
from subquad.attention.traits import HOST_NAMES
from subquad.cli import main
from subquad.models import HOSTS


def mean_attention():
    room = {"__name__": "elsewhere"}
    exec(SOURCE, room)
    return room["MeanAttention"]


@pytest.mark.parametrize("name", ATTENTION)
def test_our_own_would_be_registered(name):
    check_mechanism(name, ATTENTION[name])
    assert isinstance(traits_of(ATTENTION[name]), Traits)


def test_a_class_is_registered_once_under_a_name_of_its_own(clean):
    cls = mean_attention()
    register_attention("mean", cls)
    register_attention("mean", cls)
    assert ATTENTION["mean"] is cls and list(ATTENTION)[-1] == "mean" and ATTENTION.name_of(cls) == "mean"
    model = subquad.create_model("deit_micro", attention="softmax+mean+mean", num_classes=3)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    with pytest.raises(SubquadError, match=r"there is an attention 'mean' already, elsewhere.MeanAttention: take anot"):
        register_attention("mean", mean_attention())
    with pytest.raises(SubquadError, match=r"there is an attention 'softmax' already, subquad\.attention\.softmax"):
        register_attention("softmax", cls)


def test_a_cell_of_a_notebook_may_be_run_again(clean):
    def cell(qualname="MeanAttention"):
        cls = mean_attention()
        cls.__module__, cls.__qualname__ = "__main__", qualname
        register_attention("mean", cls)
        return cls

    cell()
    assert cell() is ATTENTION["mean"]
    for another in ("Other", "made.<locals>.MeanAttention"):
        with pytest.raises(SubquadError, match=r"there is an attention 'mean' already, __main__\.MeanAttention"):
            cell(another)


def broken(**attributes):
    return type("Broken", (mean_attention(),), attributes)


def no_grid(self, dim, num_heads, grid, kv_grid, window, size=3): ...


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("Mean", mean_attention, "of small letters, digits and _"),
        ("a+b", mean_attention, "of small letters, digits and _"),
        ("mean", lambda: 3, r"derived from torch\.nn\.Module, got 3"),
        (
            "mean",
            lambda: nn.Linear,
            "Linear can't be attention 'mean': inputs is .*; it has no method weights",
        ),
        ("mean", lambda: broken(inputs=("v", "q", "padding")), "in this order, got .*'v', 'q'"),
        ("mean", lambda: broken(inputs=["q", "v", "padding"]), "inputs is a tuple"),
        (
            "mean",
            lambda: broken(inputs=("q", "v")),
            "inputs lacks padding, which is handed to one that refuses it, too; forward takes .self, q, v, ., grid",
        ),
        ("mean", lambda: broken(weights=None), "it has no method weights"),
        (
            "mean",
            lambda: broken(forward=lambda self, q, v, padding, grid, kv_grid: q),
            "forward takes .self, q, v, pad",
        ),
        ("mean", lambda: broken(__init__=no_grid), "__init__ takes"),
        ("mean", lambda: broken(__init__=lambda self, dim, num_heads, *, grid, kv_grid, size: None), "not so of size"),
        (
            "mean",
            lambda: broken(__init__=lambda self, dim, num_heads, *, grid, kv_grid, **more: None),
            "not so of more",
        ),
        ("mean", lambda: broken(streaming=True), r"streaming, where it has one, .* \(self, grid\), got True"),
        ("mean", lambda: broken(streaming=lambda self: None), r"streaming, where it has one, .* \(self, grid\)"),
        ("mean", lambda: broken(differs_on=lambda self: ""), r"differs_on, where it has one, .* \(self, grid\)"),
        ("mean", lambda: broken(traits={"quadratic": True}), "traits is a subquad"),
        ("mean", lambda: broken(traits=Traits(in_hosts={"pvt": {"size": 3}})), "traits set size in pvt, which __init"),
    ],
)
def test_what_a_class_lacks_is_said_in_one_line(name, make, message, clean):
    with pytest.raises(SubquadError, match=message) as error:
        register_attention(name, make())
    assert "\n" not in str(error.value) and name not in ATTENTION


@pytest.mark.parametrize(
    ("traits", "message"),
    [
        ({"quadratic": "yes"}, "quadratic is True or False, got 'yes'"),
        ({"key_removal": "cut"}, "key_removal is a function or None, got 'cut'"),
        ({"in_hosts": {"swin": 3}}, "in_hosts is settings by the names of hosts"),
        ({"gate": "silu"}, "gate is a function or None, got 'silu'"),
        ({"open_gate": "wide"}, "open_gate is a number, got 'wide'"),
        ({"colour": "red"}, "colour is written as \"#d55e00\", got 'red'"),
    ],
)
def test_traits_say_what_they_can_be(traits, message):
    with pytest.raises(SubquadError, match=message):
        Traits(**traits)


def test_settings_in_a_host_that_there_is_not_are_refused_where_they_are_said():
    """They were refused with the first network of the mechanism, in whatever host."""
    assert set(HOST_NAMES) == set(HOSTS)
    with pytest.raises(SubquadError, match="unknown host in a mechanism's in_hosts: 'pvtv2': did you mean pvt_v2"):
        Traits(in_hosts={"pvtv2": {}})


def test_a_setting_of_a_mechanism_without_settings_is_answered_with_that(clean):
    register_attention("mean", mean_attention())
    with pytest.raises(SubquadError, match="unknown setting of mean attention 'size': there are none"):
        subquad.create_model("deit_micro", attention="mean:size=3")


def test_streaming_that_gives_something_else_is_said_so(clean):
    register_attention("mean", broken(streaming=lambda self, grid: 3))
    model = subquad.create_model("deit_micro", attention="mean", num_classes=3)
    with pytest.raises(SubquadError, match=r"Broken\.streaming is to give a Streaming of .*, got 3"):
        streaming_of(model.blocks[0].attn.inner, TokenGrid(2, 2, 1))


@pytest.mark.parametrize("name", [name for name, cls in ATTENTION.items() if hasattr(cls, "streaming")])
def test_what_is_derived_from_another_says_its_weights_and_its_streaming_itself(name, clean):
    parent = ATTENTION[name]

    def doubled(self, *tokens, grid, kv_grid):
        return 2 * parent.forward(self, *tokens, grid=grid, kv_grid=kv_grid)

    doubled.__signature__ = inspect.signature(parent.forward)
    alone = type("Doubled", (parent,), {"forward": doubled})
    with nullcontext() if traits_of(parent).no_weights else pytest.raises(SubquadError, match="its weights are: give"):
        check_mechanism("doubled", alone)
    register_attention("doubled", type("Doubled", (alone,), {"weights": parent.weights}))
    model = subquad.create_model("deit_micro", attention="doubled", num_classes=3)
    inner = model.blocks[0].attn.inner
    with pytest.raises(SubquadError, match=rf"can't be streamed: its forward is not {parent.__name__}'s, and its"):
        streaming_of(inner, inner.grid if hasattr(inner, "grid") else TokenGrid(2, 2, 1))
    # who says it anew vouches for it, and who changes something else need not
    inner.__class__ = type("Vouched", (type(inner),), {"streaming": parent.streaming})
    other = type("Other", (parent,), {"extra_repr": lambda self: ""})
    assert of_another_forward(type(inner), "streaming") is None
    assert of_another_forward(other, "streaming") is of_another_forward(other, "weights") is None


def test_an_installed_plug_in_is_found_and_imported_when_it_is_asked_for(clean, capsys):
    install(clean)
    assert "mean" in ATTENTION and list(ATTENTION)[-1] == "mean" and "elsewhere" not in sys.modules
    assert subquad.create_model("deit_micro", device="meta") is not None and "elsewhere" not in sys.modules
    model = subquad.create_model("deit_micro", attention="mean", num_classes=3)
    assert "elsewhere" in sys.modules and type(model.blocks[0].attn.inner) is ATTENTION["mean"]
    register_attention("mean", ATTENTION["mean"])
    assert main(["list", "mechanisms", "--filter", "mean"]) == 0
    assert "q v padding" in capsys.readouterr().out
    sizes = ["--tokens", "16", "--dim", "16", "--num-heads", "2", "--repeats", "1"]
    assert main(["bench", "--attention", "mean", "softmax", *sizes]) == 0
    assert main(["bench", "--attention", "mean", "--ops", "--backward", *sizes]) == 0
    assert "mean" in capsys.readouterr().out


def test_a_plug_in_may_register_itself(clean):
    install(clean, source=f"{SOURCE}\n\nimport subquad\n\nsubquad.register_attention('mean', MeanAttention)\n")
    assert ATTENTION["mean"] is ATTENTION["mean"] is sys.modules["elsewhere"].MeanAttention


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("x = (", "SyntaxError: "),
        ("MeanAttention = 3", "attention 'mean' is to be a class"),
        ("x = 3", "AttributeError: "),
    ],
)
def test_a_broken_plug_in_is_one_line_that_names_it_and_spoils_nothing_else(source, message, clean, capsys):
    install(clean, source=source)
    assert main(["train", "--attention", "mean", "--data", "digits", "--output", str(clean.parent / "runs")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("subquad: the plug-in elsewhere:MeanAttention of elsewhere 1.0 can't be used: ")
    assert message in said and said.count("\n") == 1
    assert main(["list", "mechanisms"]) == 0
    listed = capsys.readouterr().out
    assert "can't be used" in listed and "PolaFormer" in listed
    ATTENTION["softmax"](16, 2, grid=TokenGrid(2, 2), kv_grid=TokenGrid(2, 2))


def test_a_package_whose_entry_points_are_damaged_hides_no_other(clean):
    install(clean)
    damaged = install(clean, package="elsewhere_damaged") / "elsewhere_damaged-1.0.dist-info" / "entry_points.txt"
    damaged.write_text("[subquad.attention]\nnonsense\n")
    assert ATTENTION["mean"].__module__ == "elsewhere" and ATTENTION["softmax"] is not None


def test_a_name_that_two_have_is_refused_when_it_is_asked_for(clean):
    install(clean, "softmax")
    install(clean, "mean", package="elsewhere_too")
    install(clean, "mean", package="elsewhere_three")
    with pytest.raises(SubquadError, match=r"'softmax' is both the plug-in .* and subquad\.attention\.soft"):
        subquad.create_model("deit_micro", attention="softmax")
    with pytest.raises(SubquadError, match=r"'mean' is both the plug-in .* and the plug-in .*: uninstall one"):
        subquad.create_model("deit_micro", attention="mean")
    with pytest.raises(SubquadError, match="there is an attention 'mean' already, the plug-in"):
        register_attention("mean", type("Other", (mean_attention(),), {"__module__": "mine"}))
    assert subquad.create_model("deit_micro", attention="pola", device="meta") is not None


def test_the_vocabulary_is_that_of_the_docstring():
    import inspect

    import subquad.attention

    assert all(f"\n    {word} " in inspect.getsource(subquad.attention) for word in VOCABULARY if word not in "qkv")
