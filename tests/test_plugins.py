"""What installed packages add to the tables: names at once, code when asked for, and one line of what is wrong."""

import re
import sys

import pytest

import subquad.conversion
import subquad.exports
import subquad.tasks  # which, with the others, make their tables
from subquad import SubquadError
from subquad.cli import main
from subquad.kernels import BACKENDS, register_backend, use_backend
from subquad.plugins import TABLES

NAME = "elsewhere_thing"
GROUPS = sorted(TABLES)


@pytest.fixture
def site(monkeypatch, tmp_path):
    """A folder of packages; what is found in it is forgotten."""
    for table in TABLES.values():
        monkeypatch.setattr(table, "_entries", dict(table._entries))
        monkeypatch.setattr(table, "_found", None)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("elsewhere")]:
        del sys.modules[name]


def install(site, group, source, *, name=NAME, package="elsewhere"):
    (site / f"{package}.py").write_text(source)
    facts = site / f"{package}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[{group}]\n{name} = {package}:Thing\n")


def test_every_table_has_a_group_of_its_own():
    assert {f"subquad.{what}" for what in ("attention", "tasks", "backends", "families", "exporters")} == set(GROUPS)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit('no more')", "SystemExit: no more"),
        ("assert False", "can't be used: AssertionError"),
        ("", "AttributeError: module 'elsewhere' has no attribute 'Thing'"),
        ("Thing = 3", "got 3"),
    ],
)
def test_a_broken_plug_in_is_known_at_once_and_its_fault_said_when_it_is_asked_for(group, source, reason, site):
    table = TABLES[group]
    before = list(table.usable())
    install(site, group, source)
    table._found = None
    assert (
        NAME in table and list(table)[-1] == NAME and len(table) == len(before) + 1 and "elsewhere" not in sys.modules
    )
    assert list(table.usable()) == before and NAME not in table.loaded
    for _ in range(2):
        with pytest.raises(SubquadError, match=re.escape(reason)) as error:
            table[NAME]
        assert str(error.value).startswith("the plug-in elsewhere:Thing of elsewhere 1.0 can't be used: ")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("group", GROUPS)
def test_a_name_that_two_have_is_refused_for_both_and_nothing_else(group, site):
    table = TABLES[group]
    names = list(table)
    install(site, group, "Thing = 3")
    install(site, group, "Thing = 3", package="elsewhere_too")
    if names:
        install(site, group, "Thing = 3", name=names[0], package="elsewhere_three")
    table._found = None
    with pytest.raises(SubquadError, match=r"'elsewhere_thing' is both the plug-in .* and the plug-in .*: uninstall"):
        table[NAME]
    if names:
        with pytest.raises(SubquadError, match=f"'{names[0]}' is both the plug-in .* and .*: uninstall one of them"):
            table[names[0]]
    assert len(list(table.usable())) == max(len(names) - 1, 0)


@pytest.mark.parametrize("group", GROUPS)
def test_an_entry_is_registered_once(group, site):
    table = TABLES[group]
    for name in table:
        entry = table[name]
        table.register(name, entry)
        assert table.name_of(entry) == name
    with pytest.raises(SubquadError, match="got 3"):
        table.register(NAME, 3)


BACKEND = """
import torch
from subquad.kernels import Backend, register_backend

Thing = Backend("elsewhere_thing", "another", devices=("cpu",), dtypes=(torch.float32,), missing=lambda: "not here")
register_backend(Thing)
"""


def test_a_backend_of_a_plug_in_is_asked_for_by_name_and_listed(site, monkeypatch, capsys):
    for table in ("KERNELS", "BACKENDS"):
        here = getattr(subquad.kernels.backends, table)
        monkeypatch.setattr(subquad.kernels.backends, table, dict(here))
    monkeypatch.setattr("subquad.models.listing.BACKENDS", subquad.kernels.backends.BACKENDS)
    install(site, "subquad.backends", BACKEND)
    install(site, "subquad.backends", "1 / 0", name="broken", package="elsewhere_broken")
    assert main(["list", "backends"]) == 0
    listed = capsys.readouterr().out
    assert "not here" in listed and "elsewhere_broken:Thing" in listed
    with use_backend(NAME):
        assert subquad.kernels.unavailable(NAME) == "not here"
    with (
        pytest.raises(SubquadError, match="unknown backend 'elsewhere_thin': did you mean elsewhere_thing"),
        use_backend(NAME[:-1]),
    ):
        pass
    assert NAME not in BACKENDS


FAMILY = """
from subquad.conversion.families.timm_attention import TimmAttention


class Thing(TimmAttention):
    replaces = ("elsewhere.Layer", "elsewhere.Outer.Layer")


class Layer:
    pass
"""


def test_a_family_of_a_plug_in_is_found_by_the_module_of_foreign_layers(site):
    from subquad.conversion.families import converted_class

    install(site, "subquad.families", FAMILY, name="elsewhere")
    import elsewhere

    assert converted_class(elsewhere.Layer()) is elsewhere.Thing


def test_a_family_of_a_plug_in_adds_to_ours_of_its_module(site):
    """With one class of a module of timm's, the others of it were not known any more."""
    from timm.models.eva import EvaAttention
    from torch import nn

    from subquad.conversion.families import converted_class

    ours = converted_class(EvaAttention(8, 2, norm_layer=nn.LayerNorm))
    install(site, "subquad.families", FAMILY.replace("elsewhere.", "timm.models.eva."), name="timm.models.eva")
    TABLES["subquad.families"]._found = None
    assert "timm.models.eva" in TABLES["subquad.families"]
    assert converted_class(EvaAttention(8, 2, norm_layer=nn.LayerNorm)) is ours is not None


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("elsewhere.Layer", "another.Layer", "Thing replaces another.Layer, and its entry point is called elsewhere"),
        (
            '("elsewhere.Layer", "elsewhere.Outer.Layer")',
            '"elsewhere.Layer"',
            "a tuple of full names of classes",
        ),
        ('("elsewhere.Layer", "elsewhere.Outer.Layer")', '("Layer",)', "a tuple of full names of classes"),
        ("TimmAttention)", "TimmAttention.__mro__[1])", "Thing can't be a family: it has no method sizes, forward"),
    ],
)
def test_a_family_that_could_stand_for_no_layer_is_refused(old, new, reason, site):
    """It was taken, and nothing was converted."""
    install(site, "subquad.families", FAMILY.replace(old, new), name="elsewhere")
    with pytest.raises(SubquadError, match=reason):
        TABLES["subquad.families"]["elsewhere"]


def test_a_backend_that_is_none_is_refused():
    with pytest.raises(SubquadError, match=r"a backend is a subquad\.kernels\.Backend, got 3"):
        register_backend(3)


def test_a_format_of_a_plug_in_is_known_to_the_exporter(site):
    from subquad.exports import exporter_named

    install(site, "subquad.exporters", "from subquad.exports.formats import OURS\n\nThing = OURS['pt2']\n")
    assert exporter_named(NAME).suffix == ".pt2"


RAISING = """
from torch import nn


class Thing(nn.Module):
    inputs = ("q", "v", "padding")

    def __init__(self, dim, num_heads, *, grid, kv_grid):
        super().__init__()

    def forward(self, q, v, padding=None, *, grid, kv_grid):
        {fault}

    def weights(self, q, padding=None, *, grid, kv_grid):
        raise NotImplementedError
"""


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("{}['a']", "KeyError: 'a': "),
        ("v.unflatten(2, (3, 5))", "RuntimeError: unflatten"),
        ("raise NotImplementedError", "subquad: NotImplementedError: "),
    ],
)
def test_a_fault_of_a_plug_in_is_not_called_one_of_ours(fault, words, site, capsys):
    """Also where PyTorch raised what the plug-in caused; with the status of what others cause."""
    install(site, "subquad.attention", RAISING.replace("{fault}", fault))
    assert (
        main(["bench", "--attention", NAME, "--tokens", "4", "--dim", "8", "--num-heads", "1", "--repeats", "1"]) == 2
    )
    said = capsys.readouterr().err
    assert words in said
    assert said.endswith("this is a fault of elsewhere 1.0, a plug-in; --debug shows where it happened\n")


GATED = """
from torch import nn

from subquad import Traits


class Thing(nn.Module):
    inputs = ("q", "v", "g", "padding")
    traits = Traits(extra_heads=1)

    def __init__(self, dim, num_heads, *, grid, kv_grid):
        super().__init__()

    def forward(self, q, v, g, padding=None, *, grid, kv_grid):
        return v

    def weights(self, q, g, padding=None, *, grid, kv_grid):
        raise NotImplementedError
"""
"""A mechanism that stands in no trained layer's place: it has a gate, and heads of its own."""


@pytest.mark.parametrize(
    ("source", "reason"), [("1 / 0", "ZeroDivisionError"), (GATED, "can't stand in the place of a trained layer")]
)
def test_advice_on_all_mechanisms_leaves_out_a_plug_in_that_can_not_be_had(source, reason, site, monkeypatch):
    """It ended the whole command, which had not named it."""
    table = TABLES["subquad.attention"]
    monkeypatch.setattr(table, "_entries", {name: table[name] for name in ("softmax", "linear")})
    install(site, "subquad.attention", source)
    table._found = None
    said = []
    sizes = {"img_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    advice = subquad.conversion.advise(
        lambda px: subquad.create_model("deit_micro", **sizes), [(8, 8)], repeats=1, log=said.append
    )
    assert [row.attention for row in advice.rows] == ["", "nothing", "linear"]
    (line,) = (line for line in said if "left out" in line)
    assert line.startswith(f"{NAME} is left out: ") and reason in line
    with pytest.raises(SubquadError, match=reason):
        subquad.conversion.advise(lambda px: subquad.create_model("deit_micro", **sizes), [(8, 8)], [NAME])


def test_all_mechanisms_are_trained_and_timed_but_a_plug_in_that_can_not_be_had(site, monkeypatch, capsys):
    from subquad.tasks import TASKS
    from subquad.training import fitting_mechanisms

    table, others = TABLES["subquad.attention"], ("softmax", "linear", "circulant")
    monkeypatch.setattr(table, "_entries", {name: table[name] for name in others})
    install(site, "subquad.attention", "1 / 0")
    table._found = None
    said = []
    recipe = TASKS["classify"].recipe_class(model="deit_micro")
    assert fitting_mechanisms(recipe, said.append) == ["softmax", "linear"]
    assert any(line.startswith(f"{NAME} is left out: ") and "ZeroDivisionError" in line for line in said)
    assert main(["bench", "--tokens", "4", "--dim", "8", "--num-heads", "1", "--repeats", "1"]) == 0
    assert f"{NAME} is left out: " in capsys.readouterr().out
    monkeypatch.setattr("subquad.api.measure_blocks", lambda names, sizes, **settings: names)
    assert subquad.bench(log=said.append) == list(others) and said[-1].startswith(f"{NAME} is left out: ")


def test_formats_go_on_beside_a_plug_in_that_can_not_be_had(site, tmp_path):
    from subquad.exports.engine_times import installed_formats
    from subquad.exports.exporting import check_dtype, check_int8

    usual = installed_formats()
    install(site, "subquad.exporters", "1 / 0")
    TABLES["subquad.exporters"]._found = None
    assert installed_formats() == usual
    with pytest.raises(SubquadError, match=r"onnx is not written in bf16, .*: pt2, openvino, aoti can be"):
        check_dtype("bf16", "onnx")
    with pytest.raises(SubquadError, match="onnx is not written with int8 weights: pt2, aoti can be"):
        check_int8("weights", "onnx")
    (tmp_path / "a.pt2").write_text("nothing")
    with pytest.raises(SubquadError, match=r"a\.pt2 can't be opened as pt2 or aoti"):
        subquad.exports.open_exported(tmp_path / "a.pt2")
    (tmp_path / "a.txt").write_text("nothing")
    with pytest.raises(SubquadError, match=r"what was exported ends in \.onnx, \.pt2, \.xml, got a\.txt"):
        subquad.exports.open_exported(tmp_path / "a.txt")
