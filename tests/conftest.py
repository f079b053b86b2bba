"""One thread and one seed for every test."""

import os

import pytest
import torch

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
