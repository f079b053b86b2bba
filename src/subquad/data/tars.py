"""Tar archives read strictly: every header must be whole, and an archive must end as archives end.

Python's own reader takes a damaged header for the end of the archive, and says nothing of the files behind it.
"""

import bz2
import gzip
import hashlib
import lzma
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from tarfile import HeaderError, ReadError, TarFile
from typing import Any, BinaryIO

from tqdm import tqdm

from subquad.errors import SubquadError, reason_without_path

_CHUNK = 1 << 20
_DECOMPRESSORS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ\x00": lzma.open, b"BZh": bz2.open}
"""What reads a file, by its first bytes; a plain tar is read as it is."""


@dataclass(frozen=True)
class TarContent:
    """What an archive holds.

    Attributes:
        files: in it, folders not counted.
        filled: files that are not empty.
        size: bytes of all files.
        digest: of the archive.
    """

    files: int
    filled: int
    size: int
    digest: str


class _StrictHeader(tarfile.TarInfo):
    """A header that says when it is damaged."""

    @classmethod
    def fromtarfile(cls, tarfile: TarFile) -> "_StrictHeader":
        try:
            return super().fromtarfile(tarfile)
        except HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":
                # the block of zeros that an archive ends with
                raise
            raise ReadError(f"the header at byte {tarfile.offset}: {error}") from None


class _Hashed:
    """A file that is read from its beginning to its end, and hashed on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._sha = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """Read on."""
        data = self._file.read(size)
        self._sha.update(data)
        return data

    @property
    def digest(self) -> str:
        """Give the digest of what has been read."""
        return self._sha.hexdigest()


def read_tar(archive: Path, target: Path | None = None) -> TarContent:
    """Read an archive to its end, and extract it into `target` if that is given.

    Raises:
        SubquadError: it is damaged, cut short or no archive; it reaches out of `target`; `target` can't be written to.
    """
    try:
        with archive.open("rb") as file:
            return _read(archive.name, file, target)
    except tarfile.FilterError as error:
        raise SubquadError(f"{archive} is not safe to unpack: {error}") from None
    except OSError as error:
        if error.errno is not None:
            raise SubquadError(f"can't unpack {archive}: {reason_without_path(error)}") from None
        raise _damaged(archive, error) from None
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, ValueError, ArithmeticError, LookupError) as error:
        raise _damaged(archive, error) from None
    except (RecursionError, MemoryError) as error:
        raise _damaged(archive, error) from None


def digest_of(archive: Path) -> str:
    """Hash a file."""
    with archive.open("rb") as file:
        hashed = _Hashed(file)
        while hashed.read(_CHUNK):
            pass
    return hashed.digest


def _read(name: str, file: BinaryIO, target: Path | None) -> TarContent:
    beginning = file.read(8)
    file.seek(0)
    hashed: Any = _Hashed(file)
    opener = next((opener for magic, opener in _DECOMPRESSORS.items() if beginning.startswith(magic)), None)
    stream = hashed if opener is None else opener(hashed)
    files = filled = size = 0
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=_StrictHeader) as tar:
        # a bar where there is a terminal, nothing elsewhere
        for member in tqdm(tar, desc=f"unpacking {name}", unit=" files", leave=False, disable=None):
            if not member.isdir():
                files += 1
                filled += member.isreg() and member.size > 0
                size += member.size if member.isreg() else 0
            if target is not None:
                tar.extract(member, target, filter=_without_time)
        end: Any = tar.fileobj
        while rest := end.read(_CHUNK):
            if rest.count(0) != len(rest):
                raise ReadError("there is something behind its end")
    if not files:
        raise ReadError("it holds no files")
    # what compresses checks its sums when it is read to its end
    while stream.read(_CHUNK):
        pass
    return TarContent(files, filled, size, hashed.digest)


def _without_time(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    """Tar's filter for data; a time may be one that no file can have, and is of no use."""
    timeless: dict[str, Any] = {"mtime": None, "deep": False}
    return tarfile.data_filter(member, path).replace(**timeless)


def _damaged(archive: Path, error: Exception) -> SubquadError:
    return SubquadError(f"{archive} is damaged or no archive: {reason_without_path(error)}")
