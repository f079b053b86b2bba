import random

import numpy as np
import torch

from subquad.training.order import _IMAGE, EpochView, seed_all, seeded


def draw():
    return random.random(), float(np.random.rand()), torch.rand(()).item()  # noqa: NPY002


class Noisy:
    """Each item is its number and three random numbers."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index, *draw()


def items(seed, epoch, places=range(8)):
    view = EpochView(Noisy(), 8, seed)
    view.start_epoch(epoch)
    return [view[place] for place in places]


def test_an_epoch_is_the_same_whenever_it_is_seen():
    assert items(1, 5) == items(1, 5)


def test_epochs_and_seeds_differ():
    assert items(1, 5) != items(1, 6)
    assert items(1, 5) != items(2, 5)


def test_the_random_numbers_of_an_image_are_its_own_wherever_it_stands():
    for index, *drawn in items(1, 5):
        with seeded(1, 5, index, _IMAGE):
            assert draw() == tuple(drawn)


def test_the_order_follows_from_the_seed():
    assert [item[0] for item in items(1, 5)] != [item[0] for item in items(2, 5)]


def test_an_image_is_the_same_whichever_process_loads_it():
    together = items(1, 5)
    assert items(1, 5, range(1, 8, 2)) == together[1::2]


def test_an_epoch_shows_different_images_and_leaves_some_out():
    numbers = [item[0] for item in items(1, 5)]
    assert len(set(numbers)) == 8
    assert {item[0] for epoch in range(20) for item in items(1, epoch)} == set(range(10))


def test_loading_does_not_disturb_the_other_random_numbers():
    seed_all(3)
    undisturbed = draw()
    seed_all(3)
    with seeded(7):
        draw()
    assert draw() == undisturbed
