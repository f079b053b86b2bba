"""Data that are generated: the same from the same seed, made once and kept, in three parts."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from subquad.data.archives import data_home, locked
from subquad.errors import SubquadError, reason_without_path, unknown_name
from subquad.writing import replacing

Arrays = dict[str, NDArray[Any]]


MOST_BYTES = 2**35
"""Of the arrays of a set: 32 GiB, which hold the published ones many times over."""


def kept(name: str, make: Callable[[], Arrays], *, count: int) -> Arrays:
    """The arrays of this name in the data folder, `count` rows each; made where they are not there, or not whole."""
    path = data_home() / f"{name}.npz"
    with locked(path):
        arrays = _whole_arrays(path, count)
        if arrays is None:
            arrays = make()
            try:
                with replacing(path) as aside, aside.open("wb") as file:
                    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
            except OSError as error:
                raise SubquadError(f"can't write {path}: {reason_without_path(error)}") from None
    return arrays


def _whole_arrays(path: Path, count: int) -> Arrays | None:
    """What is in a file; None where there is none, or one that is damaged."""
    try:
        # reading to the end has zip's checksums compared
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = dict(file)
    except FileNotFoundError:
        return None
    except Exception:
        # on damaged bytes numpy and zipfile raise anything, down to MemoryError
        return None
    return arrays if arrays and all(array.ndim and len(array) == count for array in arrays.values()) else None


def check_size(what: str, count: int, size: int) -> None:
    """Refuse `count` things of `size` bytes that are too much together."""
    if count * size > MOST_BYTES:
        raise SubquadError(
            f"{count} {what} of {size} bytes each are {count * size / 2**30:.0f} GiB, of {MOST_BYTES >> 30} at most: "
            "ask for fewer or smaller ones"
        )


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


def drawn_part(
    name: str, draw: Draw, part: slice, *, seed: int, count: int, most: int | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The images and labels at the places `part` of `count`, which are drawn once and kept in the data folder.

    Where less than half of them is asked for, no more than that is drawn: the images are the same.

    Args:
        name: of the whole, in the data folder.
        draw: draws a chunk.
        part: consecutive places.
        seed: of the drawing.
        count: of all parts together.
        most: only the beginning of the part is wanted, so many and what is left of their chunk.
    """
    first, end = part.start, part.stop
    if most is not None:
        # by whole chunks, so that a few still have each class
        end = min(end, first + -(-most // CHUNK) * CHUNK)
    # another part may have had all drawn
    whole = _whole_arrays(data_home() / f"{name}.npz", count)
    if whole is None and 2 * (end - first) < count:
        found = kept(f"{name}-{first}-{end}", lambda: draw_many(draw, seed, count, first, end), count=end - first)
    else:
        whole = whole or kept(name, lambda: draw_many(draw, seed, count), count=count)
        found = {key: values[first:end] for key, values in whole.items()}
    return found["images"], found["labels"]


def draw_many(draw: Draw, seed: int, count: int, first: int = 0, end: int | None = None) -> Arrays:
    """Of the first `count` images and labels from a seed those from `first` to `end`, a chunk at a time."""
    end = count if end is None else end
    begin = first // CHUNK * CHUNK
    chunks = [
        draw(seed, start // CHUNK, min(CHUNK, count - start))
        for start in tqdm(range(begin, end, CHUNK), desc="drawing", unit=f"×{CHUNK} images", leave=False, disable=None)
    ]
    images, labels = (np.concatenate(parts)[first - begin : end - begin] for parts in zip(*chunks, strict=True))
    return {"images": images, "labels": labels}
