"""Data that are generated: the same from the same seed, made once and kept, in three parts."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from tqdm import tqdm

from subquad.data.archives import data_home
from subquad.errors import SubquadError, unknown_name
from subquad.writing import replacing

Arrays = dict[str, NDArray[Any]]


def kept(name: str, make: Callable[[], Arrays]) -> Arrays:
    """The arrays of this name in the data folder, made if they are not there."""
    path = data_home() / f"{name}.npz"
    with FileLock(f"{path}.lock"):
        if not path.is_file():
            made = make()
            with replacing(path) as aside, aside.open("wb") as file:
                np.savez_compressed(file, **made)  # type: ignore[arg-type]
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def part_of(split: str, shares: Mapping[str, float], count: int) -> slice:
    """The places of a split among `count`, whose splits follow each other."""
    if split not in shares:
        raise unknown_name("split", split, shares)
    names = list(shares)
    first = round(count * sum(shares[name] for name in names[: names.index(split)]))
    size = round(count * shares[split])
    if not size:
        raise SubquadError(
            f"a count of {count} leaves none for {split}: ask for {round(1 / min(shares.values()))} or more"
        )
    return slice(first, first + size)


CHUNK = 512
"""Images that are drawn together: they follow from the seed and the number of their chunk."""

Draw = Callable[[int, int, int], tuple[NDArray[np.uint8], NDArray[np.int64]]]
"""From a seed, the number of a chunk and how many: images (n, height, width) and their labels (n,)."""


def draw_many(draw: Draw, seed: int, count: int) -> Arrays:
    """The first `count` images and labels from a seed, a chunk at a time."""
    chunks = [
        draw(seed, start // CHUNK, min(CHUNK, count - start))
        for start in tqdm(range(0, count, CHUNK), desc="drawing", unit=f"×{CHUNK} images", leave=False, disable=None)
    ]
    images, labels = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    return {"images": images, "labels": labels}
