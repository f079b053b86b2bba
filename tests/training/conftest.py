"""A recipe that trains in a second: one small block on a few digits."""

import pytest
import torch
from safetensors.torch import load_file

from subquad.tasks.classification import Recipe


@pytest.fixture
def tiny():
    return Recipe(
        img_size=(8, 8),
        patch_size=4,
        embed_dim=16,
        depth=1,
        num_heads=2,
        max_train_images=40,
        epochs=2,
        batch_size=8,
        lr=1e-3,
        warmup_epochs=1,
    )


@pytest.fixture
def same_weights():
    """Whether two weight files hold the same numbers, bit for bit."""

    def same(first, second):
        first, second = load_file(first), load_file(second)
        return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)

    return same
