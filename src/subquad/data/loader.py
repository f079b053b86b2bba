"""Batches: broken images left out, shards without repeats."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from subquad.data.dataset import BrokenImageError
from subquad.errors import SubquadError


def create_loader(
    dataset: Dataset,
    *,
    batch_size: int,
    workers: int = 0,
    shuffle: bool = False,
    drop_last: bool = False,
    generator: torch.Generator | None = None,
    pin_memory: bool = False,
    rank: int = 0,
    world_size: int = 1,
    collate: Callable[[list[Any]], Any] | None = None,
) -> DataLoader:
    """Batches (images, labels) of a data set whose broken images are None; or what `collate` makes of its items.

    A batch of nothing but broken images has length 0. With `world_size` processes each gets its own images of one
    evaluation, none twice; the numbers of images may differ by one.
    """
    if not 0 <= rank < world_size:
        raise SubquadError(f"rank {rank} is not one of {world_size} processes")
    return DataLoader(
        dataset if world_size == 1 else Subset(dataset, range(rank, len(dataset), world_size)),  # type: ignore[arg-type]
        batch_size=batch_size,
        num_workers=workers,
        shuffle=shuffle,
        drop_last=drop_last,
        generator=generator,
        pin_memory=pin_memory,
        collate_fn=collate or _Collate(dataset),
    )


class _Collate:
    """Stack the pairs of a batch that are there."""

    def __init__(self, dataset: Dataset):
        self._dataset: Any = dataset

    def __call__(self, pairs: list[tuple[Tensor, int] | None]) -> tuple[Tensor, Tensor]:
        whole = [pair for pair in pairs if pair is not None]
        images, labels = default_collate(whole or [self._any_pair()])
        return images[: len(whole)], labels[: len(whole)]

    def _any_pair(self) -> tuple[Tensor, int]:
        """A pair that shows the shape of those that are missing."""
        pairs = (self._dataset[index] for index in range(len(self._dataset)))
        pair = next((pair for pair in pairs if pair is not None), None)
        if pair is None:
            raise BrokenImageError(f"all {len(self._dataset)} images are broken")
        return pair
