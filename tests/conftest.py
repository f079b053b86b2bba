"""One thread and one seed for every test."""

import gc
import os
import resource

import pytest
import torch

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish(session):
    """Let garbage collections pass over what was imported: a training collects twice, half a second each otherwise."""
    passed_over()


def passed_over():
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def light_collections():
    """What the tests of the files before have imported and left in caches, too: a collection here saves many."""
    passed_over()


def pytest_sessionfinish(session):
    gc.unfreeze()


@pytest.fixture(autouse=True)
def seed():
    # without an accelerator torch.manual_seed writes down a trace for each kind there could be: milliseconds a test
    (torch if torch.accelerator.is_available() else torch.default_generator).manual_seed(0)


@pytest.fixture
def small_disk():
    """Files may not grow beyond some size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
