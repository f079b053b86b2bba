"""Files of torch.save: a zip archive of a pickle and storages; before PyTorch 1.6 pickles and storages in a row."""

import io
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from subquad.errors import SubquadError
from subquad.text import one_line
from subquad.weights.pickles import MOST_BYTES, read_one
from subquad.weights.stored import Numbers, Storage, UnreadableError, make_storage

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001

MOST_RECORDS = 2**24
"""Bytes of a zip archive's table of contents, some 100 for a storage."""

PART = 2**20
"""Bytes that are read at a time."""


_OF_ENGINES = (".onnx", ".xml", ".pt2")
"""How files of `subquad export` end, which say nothing that weights could be made of again."""


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The content of a file that torch.save wrote, while the file is open: see `subquad.weights.pickles`.

    Its tensors are `StoredTensor`, which read themselves.

    Raises:
        SubquadError: if it is no such file, in one line; also for what is found out later, as a tensor is read.
    """
    try:
        with path.open("rb") as file:
            yield _content(file)
    except SubquadError:
        raise
    except Exception as error:
        # a damaged file can fail in any way
        if path.suffix.lower() in _OF_ENGINES:
            raise SubquadError(
                f"{path} is no weight file but, by its name, a network written for an engine: name the run or the "
                f"weights that it was written of; `subquad eval RUN --engine {path.name}` judges it, and "
                "subquad.exports.open_exported runs it"
            ) from None
        reason = one_line(error) or "it is empty or cut short"
        raise SubquadError(f"{path} is no file of PyTorch weights, or is damaged: {reason}") from None


def _content(file: BinaryIO) -> Any:
    start = file.read(512)
    file.seek(0)
    if start[257:262] == b"ustar":
        raise UnreadableError("it is a tar archive, as PyTorch wrote before 0.2: load and save it with a newer one")
    return (_zip_content if start.startswith(b"PK\x03\x04") else _row_content)(file)


def _zip_content(file: BinaryIO) -> Any:
    records = ZipNumbers(file)
    return read_one(
        io.BytesIO(records.record("data.pkl", MOST_BYTES)), lambda identity: make_storage(records, identity)
    )


def _row_content(file: BinaryIO) -> Any:
    for expected, what in ((MAGIC_NUMBER, "its first number"), (PROTOCOL_VERSION, "its version")):
        if (value := read_one(file, _no_storage)) != expected or type(value) is not int:
            raise UnreadableError(f"{what} is not torch.save's")
    read_one(file, _no_storage)  # about the machine: numbers are little-endian all the same
    numbers = RowNumbers(file)
    content = read_one(file, lambda identity: make_storage(numbers, identity))
    numbers.find(read_one(file, _no_storage))
    return content


def _no_storage(identity: Any) -> Any:
    raise UnreadableError("a storage where there is none")


def _read_into(target: Tensor, read: Callable[[int], bytes]) -> Tensor:
    """Fill a tensor of bytes, a part at a time; past its end nothing may be left, so that checksums are compared."""
    array: Any = target.numpy()
    memory, start = memoryview(array), 0
    while start < len(memory):
        part = read(min(PART, len(memory) - start))
        if not part:
            raise UnreadableError("a storage is cut short")
        memory[start : start + len(part)] = part
        start += len(part)
    return target


class ZipNumbers(Numbers):
    """Records of a zip archive, none of them compressed; each has a checksum, which is compared."""

    def __init__(self, file: BinaryIO) -> None:
        size = file.seek(0, os.SEEK_END)
        self.archive = zipfile.ZipFile(_ReadsLittle(file.fileno(), size))
        names = self.archive.namelist()
        if len(set(names)) < len(names):
            raise UnreadableError("two of its records have one name")
        if any(name.endswith("constants.pkl") for name in names):
            raise UnreadableError("it is a TorchScript program, which is code: save its state_dict instead")
        folders = [name.removesuffix("data.pkl") for name in names if name.rpartition("/")[2] == "data.pkl"]
        if len(folders) != 1:
            raise UnreadableError(f"a zip archive with {len(folders)} records data.pkl")
        self.folder = folders[0]
        super().__init__(size)
        if self.folder + "byteorder" in names:
            order = self.record("byteorder", 100)
            if order not in (b"little", b"big"):
                raise UnreadableError("its byte order is neither little nor big")
            self.byteorder = order.decode()

    def record(self, name: str, most: int) -> bytes:
        """A whole record."""
        information = self._information(name)
        if information.file_size > most:
            raise UnreadableError(f"its record {name} has {information.file_size} bytes, more than {most}")
        return self.archive.read(information)

    def check(self, storage: Storage) -> None:
        """Raise where the archive has no record of a storage's size."""
        size, expected = self._information(f"data/{storage.key}").file_size, storage.total * storage.dtype.itemsize
        if size != expected:
            raise UnreadableError(f"its record data/{one_line(storage.key)} has {size} bytes instead of {expected}")

    def stored_bytes(self, key: str) -> Tensor:
        information = self._information(f"data/{key}")
        target = torch.empty(information.file_size, dtype=torch.uint8)
        with self.archive.open(information) as record:
            return _read_into(target, record.read)

    def _information(self, name: str) -> zipfile.ZipInfo:
        try:
            information = self.archive.getinfo(self.folder + name)
        except KeyError:
            raise UnreadableError(f"it has no record {one_line(name)}") from None
        if information.compress_type != zipfile.ZIP_STORED or information.file_size != information.compress_size:
            raise UnreadableError(f"its record {one_line(name)} is compressed, which torch.save does not do")
        if information.file_size > self.left:
            raise UnreadableError(f"its record {one_line(name)} is larger than the file")
        return information


class RowNumbers(Numbers):
    """Storages one after another behind the pickles: a number of numbers, then they; there are no checksums."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(os.fstat(file.fileno()).st_size)
        self.file = file
        self.sizes: dict[str, int] = {}
        self.widths: dict[str, int] = {}
        self.starts: dict[str, int] = {}

    def check(self, storage: Storage) -> None:
        """Remember a storage's size, the same each time, no larger than the file."""
        size = storage.total * storage.dtype.itemsize
        if self.sizes.setdefault(storage.key, size) != size:
            raise UnreadableError(f"its storage {one_line(storage.key)} has two sizes")
        self.widths.setdefault(storage.key, storage.dtype.itemsize)
        if size > self.left:
            raise UnreadableError(f"its storage {one_line(storage.key)} is larger than the file")

    def find(self, keys: Any) -> None:
        """Where each storage begins, from the keys in their order."""
        if type(keys) is not list or any(type(key) is not str or key not in self.sizes for key in keys):
            raise UnreadableError("its list of storages is none, or names what no tensor needs")
        place, end = self.file.tell(), self.left
        for key in keys:
            self.file.seek(place)
            (count,) = struct.unpack("<q", self.file.read(8))
            if count * self.widths[key] != self.sizes[key] or key in self.starts:
                raise UnreadableError(f"its storage {one_line(key)} has {count} numbers, which is not what is expected")
            self.starts[key] = place + 8
            place += 8 + self.sizes[key]
        if place > end:
            raise UnreadableError(f"it is cut short: {end} bytes of {place}")

    def stored_bytes(self, key: str) -> Tensor:
        if key not in self.starts:
            raise UnreadableError(f"it has no storage {one_line(key)}")
        self.file.seek(self.starts[key])
        return _read_into(torch.empty(self.sizes[key], dtype=torch.uint8), self.file.read)


class _ReadsLittle(io.FileIO):
    """A file that `zipfile` reads in small parts, so that no table of contents fills the memory."""

    def __init__(self, descriptor: int, size: int) -> None:
        super().__init__(descriptor, "rb", closefd=False)
        self.size = size

    def read(self, count: int | None = -1) -> bytes:
        """The next bytes, to the end where `count` is negative."""
        count = self.size - self.tell() if count is None or count < 0 else count
        if count > max(MOST_RECORDS, PART):
            raise UnreadableError("its table of contents is too large")
        return super().read(count) or b""
