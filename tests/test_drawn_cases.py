"""Which cases `--one-in` draws: some of every test, always the same ones, and what is marked otherwise."""

import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

CONFTEST = runpy.run_path(str(Path(__file__).with_name("conftest.py")))


class Case:
    def __init__(self, nodeid, **marks):
        self.nodeid = nodeid
        self.get_closest_marker = {name: SimpleNamespace(args=args) for name, args in marks.items()}.get


def drawn(items, one_in=1, exhaustive=False, arguments=("tests",)):
    """The names of what is run, and of what is left."""
    options, left, kept = {"--one-in": one_in, "--exhaustive": exhaustive}, [], list(items)
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    config = SimpleNamespace(getoption=options.get, args=list(arguments), hook=hook)
    CONFTEST["pytest_collection_modifyitems"](config, kept)
    return [item.nodeid for item in kept], [item.nodeid for item in left]


@pytest.mark.parametrize("one_in", [1, 3, 10])
def test_some_of_every_test_are_drawn_and_always_the_same(one_in):
    items = [Case(f"a.py::many[{number}]") for number in range(20)] + [Case("a.py::one"), Case("b.py::many[0]")]
    run, left = drawn(items, one_in)
    assert [name.startswith("a.py::many") for name in run].count(True) == math.ceil(20 / one_in)
    assert run[-2:] == ["a.py::one", "b.py::many[0]"] and sorted(run + left) == sorted(item.nodeid for item in items)
    assert set(drawn(items[::-1], one_in)[0]) == set(run)


def test_factors_of_a_product_are_all_there():
    items = [Case(f"a.py::product[{first}-{second}]") for first in range(8) for second in range(4)]
    run, _ = drawn(items, 4)
    # of every fourth one there would be one second factor alone
    assert len({name.rpartition("-")[2] for name in run}) > 2


def test_marks_and_names_say_otherwise():
    whole = [Case(f"a.py::whole[{number}]", whole=()) for number in range(6)]
    thinned = [Case(f"a.py::thinned[{number}]", slow=(), thinned=(3,)) for number in range(12)]
    quick = [Case(f"a.py::quick[{number}]", thinned=(3,)) for number in range(12)]
    run, _ = drawn([*whole, *thinned, *quick], 2)
    counts = [sum(name.startswith(f"a.py::{test}") for name in run) for test in ("whole", "thinned", "quick")]
    assert counts == [6, 2, 6]
    assert len(drawn([*whole, *thinned], 2, exhaustive=True)[0]) == 18
    assert len(drawn(thinned, 2, arguments=["a.py::thinned[3]"])[0]) == 12
