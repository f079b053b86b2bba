"""What is seen when: the order of the images and every random number follow from the seed, the epoch and the image.

So a resumed run sees what the unbroken one would have seen, and two processes see together what one process with twice
the batch sees, whatever the number of loader processes.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from subquad.errors import SubquadError

# what random numbers are for: the last part of their key, so that no two uses share a stream
WEIGHTS, STEPS, _ORDER, _IMAGE = range(1, 5)


def seed_all(*key: int) -> None:
    """Seed python, numpy and torch with a number made of all of `key`."""
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (timm's augmentation draws from the global state)
    torch.manual_seed(seed)


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Random numbers from `key` inside the block; outside they go on as if it had not been."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])


def count_updates(images: int, total_batch: int, wanted: int | None, examples: str = "images") -> int:
    """Updates of an epoch: as many as the images have, or as are `wanted`.

    Raises:
        SubquadError: there are not so many images.
    """
    whole = images // total_batch
    if not whole:
        raise SubquadError(
            f"{images} training {examples} are less than one batch of {total_batch}: take a smaller --batch-size"
        )
    if wanted is not None and not 1 <= wanted <= whole:
        raise SubquadError(
            f"updates_per_epoch goes from 1 to {whole}, as many as {images} training {examples} have, got {wanted}"
        )
    return whole if wanted is None else wanted


class EpochView(Dataset):
    """The `length` images of a dataset that an epoch trains on, shuffled, each augmented by its own random numbers.

    `length` is a whole number of updates; the images that are left over are others in each epoch.
    """

    def __init__(self, dataset: Any, length: int, seed: int):
        self.dataset = dataset
        self._length = length
        self._seed = seed
        # shared, so that loader processes which outlive an epoch see the next one's order
        self._epoch = torch.zeros((), dtype=torch.long).share_memory_()
        self._order = torch.zeros(len(dataset), dtype=torch.long).share_memory_()

    def start_epoch(self, epoch: int) -> None:
        """Shuffle for `epoch`."""
        self._epoch.fill_(epoch)
        with seeded(self._seed, epoch, _ORDER):
            self._order.copy_(torch.randperm(len(self.dataset)))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> tuple[Tensor, int] | None:
        index = int(self._order[place])
        with seeded(self._seed, int(self._epoch), index, _IMAGE):
            return self.dataset[index]
