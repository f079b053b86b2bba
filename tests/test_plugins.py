"""What installed packages add to the tables: names at once, code when asked for, and one line of what is wrong."""

import re
import sys

import pytest

import subquad.conversion
import subquad.exports
import subquad.tasks  # which, with the others, make their tables
from subquad import SubquadError
from subquad.cli import main
from subquad.kernels import BACKENDS, use_backend
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
from subquad.conversion.timm_attention import TimmAttention


class Thing(TimmAttention):
    replaces = ("elsewhere.Layer",)


class Layer:
    pass
"""


def test_a_family_of_a_plug_in_is_found_by_the_module_of_foreign_layers(site):
    from subquad.conversion.families import converted_class

    install(site, "subquad.families", FAMILY, name="elsewhere")
    import elsewhere

    assert converted_class(elsewhere.Layer()) is elsewhere.Thing


def test_a_format_of_a_plug_in_is_known_to_the_exporter(site):
    from subquad.exports import exporter_named

    install(site, "subquad.exporters", "from subquad.exports.formats import OURS\n\nThing = OURS['pt2']\n")
    assert exporter_named(NAME).suffix == ".pt2"
