"""One thread and one seed for every test."""

import gc
import os
import resource
from collections import Counter

import pytest
import torch

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="all cases of tests that are thinned")


def pytest_collection_modifyitems(config, items):
    """Of the slow cases of a test that is thinned, one in so many stands for the others, evenly over all of them.

    Cases that are asked for by name are run whatever they are.
    """
    if config.getoption("--exhaustive") or any("::" in argument for argument in config.args):
        return
    seen, left = Counter(), []
    for item in items:
        thinned = item.get_closest_marker("thinned")
        if thinned is None or item.get_closest_marker("slow") is None:
            continue
        test = item.nodeid.partition("[")[0]
        if seen[test] % thinned.args[0]:
            left.append(item)
        seen[test] += 1
    config.hook.pytest_deselected(items=left)
    gone = set(left)
    items[:] = [item for item in items if item not in gone]


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
