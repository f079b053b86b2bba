"""Tensors as a pickle of torch.save describes them: which storage, from where, in which steps.

A description holds numbers that were checked and nothing else. `StoredTensor.read` makes the tensor, from bytes that
`Numbers` gives; whoever asks for some tensors of a file reads only those.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES: dict[str, torch.dtype] = {
    name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype) and "q" not in name
}
"""By the names that files have for them, without the quantised ones."""

STORAGES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
    "QInt8Storage": torch.int8,
    "QUInt8Storage": torch.uint8,
    "QInt32Storage": torch.int32,
}
"""Storage classes of PyTorch by name, and what they hold; of quantised tensors, which are not read, the numbers."""

MOST_DIMENSIONS = 64
MOST_REPEATED = 2**16
"""Numbers that a tensor may have although fewer are stored, as an expanded one does."""


class UnreadableError(ValueError):
    """A file is not what torch.save writes, or is damaged."""


class Numbers(ABC):
    """The storages of a file, by key; all that is asked of it together may not be larger than the file.

    Args:
        size: bytes of the file.
        byteorder: "little" or "big", of the numbers in it.
    """

    def __init__(self, size: int, byteorder: str = "little") -> None:
        self.left, self.byteorder = size, byteorder
        self._read: dict[tuple[str, torch.dtype], Tensor] = {}

    @abstractmethod
    def check(self, storage: "Storage") -> None:
        """Raise where the file cannot hold a storage, before its bytes are read."""

    @abstractmethod
    def stored_bytes(self, key: str) -> Tensor:
        """All bytes of a storage, in a tensor of their own."""

    def numbers(self, key: str, dtype: torch.dtype) -> Tensor:
        """All numbers of a storage in a row, read once."""
        if (key, dtype) not in self._read:
            stored = self.stored_bytes(key)
            self.left -= len(stored)
            if self.left < 0:
                raise UnreadableError("its storages are larger than the file: they overlap")
            if len(stored) % dtype.itemsize:
                raise UnreadableError(f"a storage of {len(stored)} bytes does not hold whole numbers of {dtype}")
            self._read[key, dtype] = _as_numbers(stored, dtype, self.byteorder)
        return self._read[key, dtype]


def _as_numbers(stored: Tensor, dtype: torch.dtype, byteorder: str) -> Tensor:
    if dtype is torch.bool:
        # a byte that is neither 0 nor 1 is no truth value to PyTorch's kernels
        return stored != 0
    width = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
    if byteorder != sys.byteorder and width > 1:
        stored = stored.view(-1, width).flip(1).flatten()
    return stored.view(dtype)


@dataclass(frozen=True, slots=True)
class Storage:
    """`count` numbers from number `start` on, of the `total` that are stored under `key`."""

    file: Numbers
    key: str
    dtype: torch.dtype
    total: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A strided view of a storage, within its bounds."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def read(self) -> Tensor:
        """The tensor; those of one storage share their memory."""
        if not math.prod(self.size):
            return torch.empty(self.size, dtype=self.dtype)
        numbers = self.storage.file.numbers(self.storage.key, self.dtype)
        start = self.storage.start * self.storage.dtype.itemsize // self.dtype.itemsize
        return numbers.as_strided(self.size, self.stride, start + self.offset)


@dataclass(frozen=True, slots=True)
class StrangeTensor:
    """A tensor of a kind that is not read."""

    kind: str


def make_tensor(
    storage: Any, offset: Any, size: Any, stride: Any, metadata: Any = None, dtype: torch.dtype | None = None
) -> StoredTensor | StrangeTensor:
    """The description of a tensor, its numbers checked against its storage.

    Raises:
        UnreadableError: where they reach beyond it.
    """
    if not isinstance(storage, Storage):
        raise UnreadableError("a tensor without a storage")
    if metadata:
        return StrangeTensor("a conjugated or negated")
    dtype = storage.dtype if dtype is None else dtype
    size, stride = _whole(size), _whole(stride)
    (offset,) = _whole((offset,))
    stored = storage.count * storage.dtype.itemsize // dtype.itemsize
    if len(size) != len(stride):
        raise UnreadableError(f"a tensor of {len(size)} axes with {len(stride)} strides")
    count = math.prod(size)
    if count and offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) >= stored:
        raise UnreadableError(f"a tensor of shape {_text(size)} reaches beyond its storage of {stored} numbers")
    if max((count, *size)) > max(stored, MOST_REPEATED):
        raise UnreadableError(f"a tensor of shape {_text(size)} is of {stored} stored numbers")
    return StoredTensor(storage, dtype, offset, size, stride)


def make_storage(file: Numbers, identity: Any) -> Storage:
    """The description of a storage from its persistent id: ("storage", class, key, device, count[, view])."""
    if type(identity) is not tuple or len(identity) not in (5, 6) or identity[0] != "storage":
        raise UnreadableError("a persistent id that is no storage's")
    dtype, key, count, view = identity[1], identity[2], identity[4], identity[5:]
    if not isinstance(dtype, torch.dtype) or type(key) is not str or len(key) > 100:
        raise UnreadableError("a storage without a key or of an unknown kind")
    (total,) = _whole((count,))
    start, count = 0, total
    if view not in ((), (None,)):
        if type(view[0]) is not tuple or len(view[0]) != 3:
            raise UnreadableError("a view that is no part of a storage")
        start, count = _whole(view[0][1:])
        if start + count > total:
            raise UnreadableError(f"a view of numbers {start} to {start + count} of {total}")
    storage = Storage(file, key, dtype, total, start, count)
    file.check(storage)
    return storage


def _whole(numbers: Any) -> tuple[int, ...]:
    """Sizes, strides or offsets, none of them negative."""
    if type(numbers) is not tuple or len(numbers) > MOST_DIMENSIONS:
        raise UnreadableError(f"sizes that are not {MOST_DIMENSIONS} numbers or fewer")
    if not all(type(number) is int and 0 <= number < 2**48 for number in numbers):
        raise UnreadableError("sizes that are no whole numbers, or too large")
    return numbers


def _text(size: tuple[int, ...]) -> str:
    return "×".join(map(str, size)) or "()"


def _parameter_of(arguments: tuple[Any, ...]) -> Any:
    tensor = arguments[0]
    if not isinstance(tensor, StoredTensor | StrangeTensor):
        raise UnreadableError("a parameter without a tensor")
    return tensor


def _of_any_dtype(arguments: tuple[Any, ...]) -> Any:
    storage, offset, size, stride, _, _, dtype, *metadata = arguments
    if not isinstance(dtype, torch.dtype):
        raise UnreadableError("a tensor without a dtype")
    return make_tensor(storage, offset, size, stride, metadata and metadata[0], dtype)


MAKERS: dict[tuple[str, str], Callable[[tuple[Any, ...]], Any]] = {
    ("torch._utils", "_rebuild_tensor"): lambda arguments: make_tensor(*arguments[:4]),
    ("torch._utils", "_rebuild_tensor_v2"): lambda arguments: make_tensor(*arguments[:4], *arguments[6:7]),
    ("torch._utils", "_rebuild_tensor_v3"): _of_any_dtype,
    ("torch._utils", "_rebuild_parameter"): _parameter_of,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter_of,
    ("torch.nn.parameter", "Parameter"): _parameter_of,
}
"""What makes a tensor of its pickled arguments, by the name of PyTorch's own function."""

STRANGE = {
    "_rebuild_qtensor": "a quantised",
    "_rebuild_sparse_tensor": "a sparse",
    "_rebuild_sparse_csr_tensor": "a sparse",
    "_rebuild_nested_tensor": "a nested",
    "_rebuild_meta_tensor_no_storage": "an empty (meta)",
    "_rebuild_wrapper_subclass": "a wrapped",
    "_rebuild_xla_tensor": "an XLA",
    "_rebuild_device_tensor_from_numpy": "a device's own",
    "_rebuild_device_tensor_from_cpu_tensor": "a device's own",
}
"""Functions of torch._utils whose tensors are not read, and what they are."""
