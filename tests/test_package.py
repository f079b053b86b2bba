"""What a package index and a citation manager read of the library is true."""

import ast
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import subquad
from subquad import SubquadError
from subquad.attention import ATTENTION

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_one_version_and_one_licence_everywhere():
    assert PROJECT["version"] == subquad.__version__ == CITATION["version"]
    assert PROJECT["license"] == CITATION["license"] == "Apache-2.0"
    assert all((ROOT / file).read_text().lstrip().startswith("Apache License") for file in PROJECT["license-files"])


def test_every_mechanism_of_a_paper_is_cited():
    cited = {word for reference in CITATION["references"] for word in re.findall(r"\w+", reference["notes"])}
    assert ATTENTION.keys() - {"softmax"} <= cited


@pytest.mark.slow
def test_modules_are_there_when_they_are_asked_for():
    rooms = sorted({path.stem for path in (ROOT / "src" / "subquad").iterdir() if path.suffix in ("", ".py")})
    names = [name for name in rooms if not name.startswith("_") and name not in subquad.__all__]
    code = f"import subquad\nfor name in {names}: assert getattr(subquad, name).__name__ == f'subquad.{{name}}', name"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert not hasattr(subquad, "nowhere")


def required(function):
    """The arguments that a function can't do without."""
    of_any = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [one for one in parameters if one.default is one.empty and one.kind not in of_any]


FUNCTIONS = {name: getattr(subquad, name) for name in subquad.__all__ if inspect.isfunction(getattr(subquad, name))}


@pytest.mark.parametrize("wrong", [None, object(), 1.5], ids=["nothing", "an object", "a number"])
@pytest.mark.parametrize("name", [name for name, function in FUNCTIONS.items() if required(function)])
def test_arguments_of_another_kind_are_one_line(name, wrong):
    function = FUNCTIONS[name]
    named = {one.name: wrong for one in required(function) if one.kind is one.KEYWORD_ONLY}
    with pytest.raises(SubquadError) as caught:
        function(*(wrong for one in required(function) if one.name not in named), **named)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: subquad.predict("nowhere", None),
            "files must be a path or text or a list of paths or texts, got None",
        ),
        (lambda: subquad.report(["a", None], "a.html"), r"runs must be a path or .* got \['a', None\]"),
        (lambda: subquad.train(None, 3), "output must be a path or text, got 3"),
        (lambda: subquad.compare(None, "here", mechanisms="agent"), "mechanisms must be a list of texts, got 'agent'"),
        (lambda: subquad.advise(None, img_size=16), "source must be a path or text or a function, got None"),
        (lambda: subquad.chunk_mlps(None), "model must be of Module, got None"),
        (lambda: subquad.chunk_mlps(nn.Identity(), "all"), "most_tokens must be a whole number, got 'all'"),
        (lambda: subquad.save_weights(nn.Identity(), "a.safetensors", [1]), r"metadata must be a mapping, got \[1\]"),
        (lambda: subquad.save_weights(nn.Identity(), "a.safetensors", {"by": {1}}), r"metadata must be JSON, .* \{1\}"),
    ],
)
def test_what_an_argument_must_be_is_said(call, message):
    with pytest.raises(SubquadError, match=message):
        call()


def test_files_may_come_from_a_generator(tmp_path):
    with pytest.raises(SubquadError, match="no networks to analyze"):
        subquad.analyze(path for path in tmp_path.iterdir())


def of_networks():
    """The public functions that take a network."""
    for name in subquad.__all__:
        function = getattr(subquad, name)
        if inspect.isfunction(function):
            first = next(iter(typing.get_type_hints(function)), "return")
            hints = typing.get_type_hints(inspect.unwrap(function))
            yield from [(name, hints)] if first in ("model", "teacher") or "teacher" in hints else []


@pytest.mark.parametrize(("name", "hints"), list(of_networks()))
def test_who_is_given_a_network_back_is_told_its_class(name, hints):
    """A type checker would take `student.forward_features` for what may be a tensor, where it is told of a module."""
    back = hints["return"]
    assert back is not Any and back is not nn.Module
    if isinstance(back, typing.TypeVar):
        assert back.__bound__ is nn.Module and back in (hints.get("model"), hints.get("teacher"))


def test_type_checkers_know_what_mechanisms_give():
    (entry,) = typing.get_args(typing.get_type_hints(subquad.attention)["ATTENTION"])
    (mechanism,) = typing.get_args(entry)
    assert issubclass(mechanism, nn.Module)
    for method in (mechanism.__call__, mechanism.weights):
        assert typing.get_type_hints(method)["return"] is torch.Tensor
    assert not any(issubclass(cls, mechanism) for cls in ATTENTION.values())


def test_type_checkers_know_all_that_is_public():
    """They do not follow `__getattr__`: what is no import of theirs is of any type."""
    tree = ast.parse(Path(subquad.__file__).read_text())
    known = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(subquad.__all__) <= known
