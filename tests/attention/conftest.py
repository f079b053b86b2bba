"""A place for packages that are there for one test."""

import sys

import pytest

from subquad import ATTENTION


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """What is registered and found in a test is forgotten after it; a folder to install packages in."""
    before = set(sys.modules)
    monkeypatch.setattr(ATTENTION, "_entries", dict(ATTENTION._entries))
    monkeypatch.setattr(ATTENTION, "_found", None)
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield tmp_path / "site"
    for name in set(sys.modules) - before:
        if name.startswith("elsewhere"):
            del sys.modules[name]
