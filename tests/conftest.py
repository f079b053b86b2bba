"""One thread and one seed for every test."""

import gc
import os

import pytest
import torch

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish(session):
    """Let garbage collections pass over what was imported: a training collects twice, half a second each otherwise."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session):
    gc.unfreeze()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
