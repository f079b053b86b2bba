"""One thread and one seed for every test."""

import gc
import math
import os
import resource
import zlib
from collections import defaultdict

import pytest
import torch

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# twenty thousand cases are made of millions of objects, none of which goes: each look through them finds nothing
gc.set_threshold(100_000, 50, 50)


def pytest_addoption(parser):
    parser.addoption("--one-in", type=int, default=1, help="run one in so many of the cases of every test")
    parser.addoption("--exhaustive", action="store_true", help="all cases of tests that are thinned")


def pytest_collection_modifyitems(config, items):
    """Of the cases of a test one in `--one-in` runs, of slow ones that are thinned one in so many of those.

    Which ones is drawn by their names, always the same: cases are products, and of every fourth one of a product some
    factors would never be there. Cases that are asked for by name are run whatever they are.
    """
    if config.getoption("--exhaustive") or any("::" in argument for argument in config.args):
        return
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("whole"):
            continue
        thinned = item.get_closest_marker("slow") and item.get_closest_marker("thinned")
        one_in = config.getoption("--one-in") * (thinned.args[0] if thinned else 1)
        cases[item.nodeid.partition("[")[0], one_in].append(item)
    left = set()
    for (_, one_in), alike in cases.items():
        drawn = sorted(alike, key=lambda item: zlib.crc32(item.nodeid.encode()))
        left.update(drawn[math.ceil(len(drawn) / one_in) :])
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]


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
