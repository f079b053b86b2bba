"""Which images are held out: drawn by a fixed seed, every class in proportion, the same on every machine."""

from collections.abc import Sequence

import numpy as np

from subquad.errors import SubquadError

SEED = 0


def spread(labels: Sequence[int]) -> list[int]:
    """All places of `labels` in an order whose every beginning has the classes in proportion.

    The first images of all classes come first, so that a beginning as long as there are classes has each of them.
    """
    rng = np.random.default_rng(SEED)
    values = np.asarray(labels)
    rank = np.empty(len(values))
    for label in np.unique(values):
        places = rng.permutation(np.flatnonzero(values == label))
        rank[places] = np.arange(len(places)) / len(places)
    # where ranks are equal the classes take turns at random
    return np.lexsort((rng.random(len(values)), rank)).tolist()


def hold_out(labels: Sequence[int], count: int | None = None) -> tuple[list[int], list[int]]:
    """Places for training and for validation, both in rising order.

    Args:
        labels: the class of each image.
        count: images to hold out; by default a tenth of them, and at least one a class.
    """
    numbers = np.unique(np.asarray(labels), return_counts=True)[1]
    if numbers.min() < 2:
        raise SubquadError(
            f"{(numbers < 2).sum()} of {len(numbers)} classes have a single image, so that none can be held out for "
            f"validation: add images, or sort them into train/ and val/"
        )
    order = spread(labels)
    held = count or max(len(order) // 10, len(numbers))
    return sorted(order[held:]), sorted(order[:held])


def thin_out(labels: Sequence[int], count: int) -> list[int]:
    """`count` places in rising order, the classes in proportion; all of them if there are no more."""
    if count < 1:
        raise SubquadError(f"the largest number of images must be at least 1, got {count}")
    return sorted(spread(labels)[:count])
