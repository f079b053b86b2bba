"""A recipe that trains in a second: one small block on a few digits."""

import pytest

from subquad.training import Recipe


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
