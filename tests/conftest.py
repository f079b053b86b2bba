"""One thread and one seed for every test."""

import gc
import os
import sys

import pytest
import torch

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


IMPORTED = 200
"""So many modules more than at the last time, and garbage collections are to pass over them as well."""


def pytest_collection_finish(session):
    """Let garbage collections pass over what was imported: a training collects twice, half a second each otherwise."""
    passed_over(0)


def passed_over(before):
    """The number of modules that collections pass over, which was `before`."""
    if len(sys.modules) < before + IMPORTED:
        return before
    gc.collect()
    gc.freeze()
    return len(sys.modules)


@pytest.fixture(autouse=True)
def light_collections(request):
    """What tests import by and by, too."""
    session = request.session
    session.passed_over = passed_over(getattr(session, "passed_over", 0))


def pytest_sessionfinish(session):
    gc.unfreeze()


@pytest.fixture(autouse=True)
def seed():
    # without an accelerator torch.manual_seed writes down a trace for each kind there could be: milliseconds a test
    (torch if torch.accelerator.is_available() else torch.default_generator).manual_seed(0)
