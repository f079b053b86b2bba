"""A run for the tests of run folders, trained once a file."""

import shutil

import pytest
from run_parts import draw, short

from subquad.training import train


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return draw(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture(scope="module")
def run(pictures, tmp_path_factory):
    """A finished run, to be copied."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(short(pictures), folder)
    return folder


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")
