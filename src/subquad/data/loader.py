"""Batches: broken images left out, shards without repeats."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SequentialSampler, Subset, default_collate

from subquad.data.dataset import BrokenImageError, PictureDataset
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

    A batch of nothing but broken images has length 0; where there are no others at all, it is a `BrokenImageError`.
    With `world_size` processes each gets its own images of one evaluation, none twice; the numbers of images may differ
    by one. Of `workers` there are no more than cores, as recipes are made for larger machines.
    """
    if not 0 <= rank < world_size:
        raise SubquadError(f"rank {rank} is not one of {world_size} processes")
    return DataLoader(
        dataset if world_size == 1 else Subset(dataset, range(rank, len(dataset), world_size)),  # type: ignore[arg-type]
        batch_size=batch_size,
        num_workers=min(workers, _cores()),
        shuffle=shuffle,
        drop_last=drop_last,
        generator=generator,
        pin_memory=pin_memory,
        collate_fn=_Collate(dataset, collate),
    )


def file_in(loader: Any, batch: int, place: int) -> Path | None:
    """The file of an item of a batch, broken ones not counted; None where the loader's order or files are not known."""
    dataset: Any = getattr(loader, "dataset", None)
    source = _source_of(dataset)
    if not isinstance(source, PictureDataset) or not isinstance(loader.sampler, SequentialSampler):
        return None
    places: Sequence[int] = range(len(dataset))[batch * loader.batch_size :][: loader.batch_size]
    while isinstance(dataset, Subset):
        places, dataset = [dataset.indices[index] for index in places], dataset.dataset
    if dataset is not source:
        return None
    return Path(source.path([index for index in places if not source.is_broken(index)][place]))


def _cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Collate:
    """Make a batch of the items that are there; where none is, see that this is not so of all."""

    def __init__(self, dataset: Dataset, collate: Callable[[list[Any]], Any] | None):
        self._dataset: Any = dataset
        self._collate = collate or self._stack

    def __call__(self, items: list[Any]) -> Any:
        if all(item is None for item in items) and isinstance(source := _source_of(self._dataset), PictureDataset):
            source.check_any_whole()
        return self._collate(items)

    def _stack(self, pairs: list[tuple[Tensor, int] | None]) -> tuple[Tensor, Tensor]:
        """Stack pairs; of nothing but broken ones, none of the shape that whole ones have."""
        whole = [pair for pair in pairs if pair is not None]
        images, labels = default_collate(whole or [self._any_pair()])
        return images[: len(whole)], labels[: len(whole)]

    def _any_pair(self) -> tuple[Tensor, int]:
        """Find a pair that shows the shape of those that are missing."""
        # a view has random numbers of its own, and perhaps nothing but broken images
        for dataset in (self._dataset, _source_of(self._dataset)):
            for index in range(len(dataset)):
                if (pair := dataset[index]) is not None:
                    return pair
        raise BrokenImageError(f"all {len(self._dataset)} images are broken")


def _source_of(dataset: Any) -> Any:
    """Look through views to the data set that knows which of its images are broken."""
    while not isinstance(dataset, PictureDataset) and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return dataset
