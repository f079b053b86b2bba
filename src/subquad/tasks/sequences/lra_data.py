"""The tasks of the Long Range Arena (Tay et al. 2020, arXiv 2011.04006) as sequences of numbers, 0 for padding.

ListOps and Pathfinder are generated; Image is CIFAR-10 in grey, from its folder or archive; Text and Retrieval are read
from the archives where a user has them. Every symbol is above 0, black pixels too: padding hides nothing. Of Text a
tenth of the training set is held out to choose weights by, where published codes choose them on the test set.
"""

import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from subquad.data.archives import is_archive, not_there, unpack
from subquad.data.dataset import ImageDataset
from subquad.data.decoding import DataError
from subquad.data.opening import load_dataset
from subquad.data.sampling import hold_out, thin_out
from subquad.data.synthetic import listops, pathfinder
from subquad.data.synthetic.generation import kept
from subquad.data.walking import find_path, is_regular_file
from subquad.errors import SubquadError, reason_without_path, unknown_name

Read = Callable[[int], Sequence[NDArray[Any]]]
"""From a place: its sequence, or the two of a pair."""


@dataclass(frozen=True)
class Source:
    """Where sequences come from.

    Attributes:
        read: symbols from 1 on.
        labels: indices into `classes`.
        needed: tokens that none of them has more than, where what is cut off would leave labels that nothing tells.
    """

    read: Read
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    needed: int = 0

    def part(self, places: Sequence[int]) -> "Source":
        """Only those at `places`."""
        labels = self.labels[np.asarray(places, int)]
        return Source(lambda index: self.read(places[index]), labels, self.classes, self.needed)


class SequenceDataset(Dataset):
    """Pairs of a sequence of `max_length` numbers, cut or filled up with 0, and its label.

    Where two texts are compared an item's sequence is (2, max_length).
    """

    num_broken = 0

    def __init__(self, source: Source, name: str, max_length: int) -> None:
        self.classes, self.labels = source.classes, source.labels
        self.name, self.max_length = name, max_length
        self._read = source.read

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        sequences = self._read(index)
        tokens = np.zeros((len(sequences), self.max_length), np.int64)
        for row, symbols in zip(tokens, sequences, strict=True):
            cut = symbols[: self.max_length]
            row[: len(cut)] = cut
        return torch.from_numpy(tokens if len(tokens) > 1 else tokens[0]), int(self.labels[index])

    def broken_paths(self) -> list[str]:
        """Nothing is broken: files that can't be read end before this."""
        return []


def load_sequences(
    task: str,
    *,
    split: str,
    max_length: int,
    data_dir: Path | str | None = None,
    settings: Mapping[str, Any] | None = None,
    max_sequences: int | None = None,
) -> SequenceDataset:
    """The sequences of a task.

    Args:
        task: one of `SEQUENCES`.
        split: "train", "validation" or "test".
        max_length: tokens of a sequence at most; what is behind them of a text is cut off.
        data_dir: where CIFAR-10, IMDb or the pairs of AAN are.
        settings: of what is generated: `count`, `seed`, and for listops `shortest` and `longest`, for pathfinder those
            of `pathfinder.Setting`.
        max_sequences: keep so many at most, the classes in proportion; of those that are drawn, from the first ones.

    Raises:
        SubquadError: there are no such data; or expressions or pictures are longer than `max_length`.
    """
    if task not in SEQUENCES:
        raise unknown_name("task", task, SEQUENCES)
    if split not in ("train", "validation", "test"):
        raise unknown_name("split", split, ("train", "validation", "test"))
    what, settings = SEQUENCES[task], dict(settings or {})
    check_settings(task, settings)
    if what.needed is not None:
        if data_dir:
            raise SubquadError(f"{task} is generated and not read from {data_dir}: leave out data_dir")
        # generating can take minutes
        _check_length(task, what.needed(settings), max_length)
    if what.drawn:
        settings["most"] = max_sequences
    source = what.load(split, find_path(data_dir) if data_dir else None, **settings)
    _check_length(task, source.needed, max_length)
    if max_sequences is not None:
        source = source.part(thin_out(source.labels.tolist(), max_sequences))
    return SequenceDataset(source, task, max_length)


def check_settings(task: str, settings: Mapping[str, Any]) -> None:
    """Raise for the name of a setting that data of a task have not."""
    known = SEQUENCES[task].settings
    for name in settings:
        if not known:
            raise SubquadError(f"the data of {task} are read and have no settings, got {name}: leave out data_settings")
        if name not in known:
            raise unknown_name(f"setting of the data of {task}", name, known)


def _check_length(task: str, needed: int, max_length: int) -> None:
    """Raise where sequences would be cut that mean nothing without their end."""
    if needed > max_length:
        raise SubquadError(
            f"sequences of {task} have up to {needed} tokens, and {max_length} of them would be read, without the rest "
            f"of which nothing tells the answer: give max_length {needed}"
            + (f", or a smaller {setting} among data_settings" if (setting := SEQUENCES[task].length) else "")
        )


def _listops(split: str, data_dir: Path | None, **settings: Any) -> Source:
    found = listops.load_listops(split, **settings)
    return Source(lambda index: [found.tokens[index, : found.lengths[index]]], found.labels, tuple(map(str, range(10))))


def _pathfinder(split: str, data_dir: Path | None, **settings: Any) -> Source:
    images, labels = pathfinder.load_pathfinder(split, **settings)
    return Source(lambda index: [_symbols(images[index])], labels, pathfinder.CLASSES)


def _image(split: str, data_dir: Path | None) -> Source:
    name = "validation" if split == "test" else "train"
    images = load_dataset("cifar10", split=name, data_dir=data_dir, strict=True)
    label = f"cifar10-grey-{name}-{len(images)}-{_stamp(images):08x}"
    grey = kept(label, lambda: _all_grey(images), count=len(images))["images"]
    labels = np.asarray(images.labels, np.int64)
    source = Source(lambda index: [_symbols(grey[index])], labels, images.classes, needed=grey[0].size)
    if split == "test":
        return source
    train, validation = hold_out(list(images.labels))
    return source.part(train if split == "train" else validation)


def _stamp(images: ImageDataset) -> int:
    """A number for where images are and when they were changed, so that others are not taken for them."""
    stamp = 0
    for name in map(images.path, range(len(images))):
        path = Path(name)
        status = path.stat() if is_regular_file(path) else None
        # archives and mirrors give files one time for all, and sizes of pictures that are not compressed are the same
        text = f"{name} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}" if status else name
        stamp = crc32(text.encode(errors="surrogateescape"), stamp)
    return stamp


def _all_grey(images: ImageDataset) -> dict[str, NDArray[np.uint8]]:
    grey = [to_grey(images, index) for index in range(len(images))]
    sizes = {image.shape for image in grey}
    if len(sizes) > 1:
        raise SubquadError(f"the images of {images.name} have {len(sizes)} sizes: CIFAR-10's are all of 32×32 px")
    return {"images": np.stack(grey)}


def to_grey(images: ImageDataset, index: int) -> NDArray[np.uint8]:
    """An image in the grey levels that the arena's are in: weights 0.2989, 0.5870, 0.1140, rounded down from 255.5."""
    picture = np.asarray(images.picture(index), np.float32) / 255
    return np.floor(255.5 * (picture @ np.array([0.2989, 0.5870, 0.1140], np.float32))).clip(0, 255).astype(np.uint8)


def _text(split: str, data_dir: Path | None) -> Source:
    folder = _folder(data_dir, "text", "IMDb's archive aclImdb_v1.tar.gz, or the folder in it")
    classes = ("neg", "pos")
    part = folder / ("test" if split == "test" else "train")
    files = [sorted((part / name).glob("*.txt")) for name in classes]
    if not all(files):
        raise SubquadError(f"{part} has no reviews: it needs the folders neg and pos with .txt files")
    _check_reviews(part, [path for paths in files for path in paths])
    every = [path for paths in files for path in paths]
    labels = np.repeat(np.arange(2), [len(paths) for paths in files])
    source = Source(lambda index: [_bytes(_read_review(every[index]))], labels, classes)
    if split == "test":
        return source
    train, validation = hold_out(labels.tolist())
    return source.part(train if split == "train" else validation)


def _check_reviews(folder: Path, files: Sequence[Path]) -> None:
    """Refuse reviews that can't be read or say nothing."""
    empty = [path for path in files if not is_regular_file(path) or not path.stat().st_size]
    if empty:
        raise SubquadError(f"{len(empty)} of {len(files)} reviews in {folder} are empty or no files: {empty[0]}")


def _read_review(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"review {path} can't be read: {reason_without_path(error)}") from None


def _retrieval(split: str, data_dir: Path | None) -> Source:
    folder = _folder(data_dir, "retrieval", "the files new_aan_pairs.train.tsv, .eval.tsv and .test.tsv")
    file = folder / f"new_aan_pairs.{'eval' if split == 'validation' else split}.tsv"
    if not is_regular_file(file):
        raise SubquadError(f"{file} is missing: retrieval needs new_aan_pairs.train.tsv, .eval.tsv and .test.tsv")
    csv.field_size_limit(sys.maxsize)
    texts: list[tuple[bytes, bytes]] = []
    labels = []
    try:
        # which passes over the mark of its encoding that some editors begin a file with
        with file.open(encoding="utf-8-sig", newline="") as lines:
            for number, row in enumerate(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE), start=1):
                label, pair = _pair(row, f"line {number} of {file}")
                labels.append(label)
                texts.append(pair)
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise SubquadError(f"{file} can't be read behind line {len(labels)}: {reason_without_path(error)}") from None
    if not labels:
        raise SubquadError(f"{file} is empty")
    return Source(lambda index: [_bytes(text) for text in texts[index]], np.asarray(labels), ("other", "same"))


def _pair(row: list[str], where: str) -> tuple[int, tuple[bytes, bytes]]:
    """The label and the texts of a row: as many of their characters as the released pipeline takes."""
    if len(row) != 5 or row[0] not in ("0", "1", "0.0", "1.0"):
        shown = f"'{row[0][:20]}' first" if row else "nothing"
        raise SubquadError(f"{where} is no pair: label, two numbers, two texts, got {len(row)} cells, {shown}")
    one, other = (text[:10_000].encode() for text in row[3:])
    if not one or not other:
        raise SubquadError(f"{where} has an empty text")
    return int(float(row[0])), (one, other)


def _folder(data_dir: Path | None, task: str, what: str) -> Path:
    if data_dir is None:
        raise SubquadError(f"{task} is not ours to give away: name with data_dir where {what} is")
    folder = unpack(data_dir) if is_archive(data_dir) else data_dir
    if not folder.is_dir():
        raise SubquadError(f"{not_there('folder or archive', data_dir)}: {task} needs {what}")
    return folder


def _symbols(image: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Pixels row by row, black as 1."""
    return image.reshape(-1).astype(np.int64) + 1


def _bytes(text: bytes) -> NDArray[np.int64]:
    return np.frombuffer(text, np.uint8).astype(np.int64) + 1


def _number_in(settings: Mapping[str, Any], name: str, usual: int) -> int:
    """A setting; one that is no number is refused where data are made."""
    value = settings.get(name, usual)
    return value if type(value) is int else 0


@dataclass(frozen=True)
class SequenceTask:
    """A task.

    Attributes:
        load: its sequences.
        symbols: there are, padding among them.
        num_classes: there are.
        pairs: whether two texts are compared.
        padded: whether its sequences differ in length.
        drawn: whether no more of them need be generated than are wanted.
        what: it is, in a few words.
        settings: what its data can be told, where they are generated.
        length: of generated data, which of these makes sequences shorter.
        needed: of generated data, the tokens of the longest sequence that such settings give.
    """

    load: Callable[..., Source]
    symbols: int
    num_classes: int
    what: str
    pairs: bool = False
    padded: bool = True
    drawn: bool = False
    settings: frozenset[str] = frozenset()
    length: str = ""
    needed: Callable[[Mapping[str, Any]], int] | None = None


SEQUENCES = {
    "listops": SequenceTask(
        _listops,
        len(listops.VOCABULARY),
        10,
        "the value of nested operations on digits",
        settings=frozenset({"count", "seed", "shortest", "longest"}),
        length="longest",
        needed=lambda settings: _number_in(settings, "longest", 1999),
    ),
    "image": SequenceTask(_image, 257, 10, "CIFAR-10 in grey, pixel by pixel", padded=False),
    "pathfinder": SequenceTask(
        _pathfinder,
        257,
        2,
        "whether two discs are joined by a dashed path",
        padded=False,
        drawn=True,
        settings=frozenset({"count", "seed", *pathfinder.Setting.__dataclass_fields__}),
        length="size",
        needed=lambda settings: _number_in(settings, "size", pathfinder.Setting.size) ** 2,
    ),
    "text": SequenceTask(_text, 257, 2, "the opinion of film reviews, byte by byte"),
    "retrieval": SequenceTask(_retrieval, 257, 2, "whether papers cite each other, byte by byte", pairs=True),
}
"""The tasks by name."""
