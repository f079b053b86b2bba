"""Batches: shards without repeats, an order that a seed fixes."""

import os

import pytest
import torch
from torch.utils.data import Dataset

from subquad.data import create_loader
from subquad.errors import SubquadError


class Numbers(Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        return torch.full((3, 2, 2), float(index)), index


def seen(**settings):
    return [label for _, labels in create_loader(Numbers(), batch_size=3, **settings) for label in labels.tolist()]


@pytest.mark.parametrize("world_size", [1, 2, 3, 16])
def test_the_shards_hold_every_image_once(world_size):
    shards = [seen(rank=rank, world_size=world_size) for rank in range(world_size)]
    assert sorted(label for shard in shards for label in shard) == list(range(11))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_seed_fixes_the_order_whatever_the_number_of_processes(workers):
    order = seen(shuffle=True, generator=torch.Generator().manual_seed(3), workers=workers)
    assert order == seen(shuffle=True, generator=torch.Generator().manual_seed(3)) != list(range(11))
    assert sorted(order) == list(range(11))


def test_the_last_batch_may_be_dropped():
    assert seen(drop_last=True) == list(range(9))


def test_a_rank_outside_the_processes_is_refused():
    with pytest.raises(SubquadError, match="rank 2 is not one of 2 processes"):
        seen(rank=2, world_size=2)


def test_no_more_processes_load_than_there_are_cores(recwarn):
    assert create_loader(Numbers(), batch_size=2, workers=1000).num_workers <= os.cpu_count()
    assert not recwarn
