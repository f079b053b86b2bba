"""What a package index and a citation manager read of the library is true."""

import re
import sys
from pathlib import Path

import pytest
import yaml

import subquad
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
