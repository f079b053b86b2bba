"""Where the tokens of a large image lie between two layers: in memory, or in two files.

A layer reads all tokens and writes all tokens. In memory it overwrites what it has read; files are two, so that a layer
that is broken off has spoilt nothing: one is read while the other is written, and they change places.

Letters: n tokens, c channels.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from subquad.errors import SubquadError
from subquad.writing import reserve

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
"""What tokens are kept in."""


class TokenStore(Protocol):
    """Tokens (n, c), read and written a slice at a time."""

    def read(self, tokens: slice) -> Tensor:
        """Give the tokens of a slice as the last turn left them, (1, n, c); in memory also what this turn wrote."""

    def write(self, tokens: slice, x: Tensor) -> None:
        """Keep the tokens (1, n, c) of a slice."""

    def turn(self) -> None:
        """Let what was written be what is read from now on."""


class Stores(Protocol):
    """Stores for one stage of a network after the other.

    Attributes:
        done: steps of the walk that were done before, whose tokens are there.
    """

    done: int

    def store(self, stage: int) -> TokenStore:
        """What keeps the tokens of a stage."""

    def reached(self, done: int, stage: int) -> None:
        """Hear that so many steps are done, the last of them in this stage, and keep that for good if anything is."""

    def finished(self) -> None:
        """Hear that all is done."""


class InMemory:
    """Stores for stages of so many (tokens, channels), each let go with the last who reads it."""

    done = 0

    def __init__(self, sizes: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
        self.sizes, self.dtype = sizes, dtype

    def store(self, stage: int) -> TokenStore:
        """One tensor."""
        return TokensInMemory(*self.sizes[stage], self.dtype)

    def reached(self, done: int, stage: int) -> None:
        """Do nothing: what is broken off is lost."""

    def finished(self) -> None:
        """Do nothing."""


class TokensInMemory:
    """One tensor."""

    def __init__(self, count: int, dim: int, dtype: torch.dtype) -> None:
        try:
            self.tokens = torch.empty(1, count, dim, dtype=dtype, device="cpu")
        except RuntimeError as error:
            size = count * dim * dtype.itemsize / 2**30
            raise SubquadError(
                f"{count:,} tokens of width {dim} take {size:.1f} GiB, which are not there: keep them in files "
                "(tokens_in, --tokens-in FOLDER), or in bf16"
            ) from error

    def read(self, tokens: slice) -> Tensor:
        """Give a view."""
        return self.tokens[:, tokens]

    def write(self, tokens: slice, x: Tensor) -> None:
        """Overwrite."""
        self.tokens[:, tokens] = x

    def turn(self) -> None:
        """Do nothing: what is written is there."""


def token_paths(folder: Path, stage: int) -> list[Path]:
    """The two files of a stage."""
    return [folder / f"tokens-{stage}-{i}.bin" for i in range(2)]


class TokensInFiles:
    """Two files in a folder, mapped into memory; `current` is the one that is read, `stage` a part of their names."""

    def __init__(
        self, folder: Path, count: int, dim: int, dtype: torch.dtype, *, current: int = 0, stage: int = 0
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.paths = token_paths(folder, stage)
        self.shape, self.dtype, self.current = (1, count, dim), dtype, current
        size, new = count * dim * dtype.itemsize, [path for path in self.paths if not path.exists()]
        try:
            for path in self.paths:
                path.touch()
                reserve(path, size)
        except OSError as error:
            for path in new:
                path.unlink(missing_ok=True)
            raise SubquadError(
                f"{folder} can't hold two files of {size:,} bytes for tokens ({error.strerror or error}): name a "
                "folder on another disk, or keep tokens in bf16"
            ) from None

    def _mapped(self, file: int) -> Tensor:
        # anew for every slice: what is no longer mapped does not count as this process's memory
        size = self.shape[1] * self.shape[2]
        try:
            return torch.from_file(str(self.paths[file]), shared=True, size=size, dtype=self.dtype).view(self.shape)
        except RuntimeError as error:
            raise SubquadError(
                f"{self.paths[file]} can't hold {size * self.dtype.itemsize:,} bytes: {error}"
            ) from error

    def read(self, tokens: slice) -> Tensor:
        """Give a copy."""
        return self._mapped(self.current)[:, tokens].clone()

    def write(self, tokens: slice, x: Tensor) -> None:
        """Write to the other file."""
        self._mapped(1 - self.current)[:, tokens] = x

    def turn(self) -> None:
        """Put what was written on the disk, and read it from now on."""
        path = self.paths[1 - self.current]
        try:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise SubquadError(f"{path} can't be written: {error.strerror or error}") from None
        self.current = 1 - self.current
