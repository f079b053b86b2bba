"""Files are written whole or not at all: aside first, and then moved into place.

What a killed process left aside is removed by the next one that writes to the same folder.
"""

import errno
import io
import json
import math
import os
import re
import shutil
import socket
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from subquad.errors import SubquadError, reason_without_path, shown

_ASIDE = re.compile(r"\..+\.(?P<process>\d+)-(?P<host>[0-9a-f]{8})\.unfinished")
_TEMPORARY = re.compile(r"subquad-\w+-(?P<process>\d+)-(?P<host>[0-9a-f]{8})-.+")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_swept: set[tuple[int, Path]] = set()


class WriteError(SubquadError):
    """A file that can't be written, with the reason that the system gives."""


def check_place(path: Path, folder: Path | None = None) -> None:
    """Raise where a file, or the folder that it is to be in, can't be made: in front of all work.

    Args:
        path: what is to be written.
        folder: that it is to be in; `path` itself where that is a folder.

    Raises:
        WriteError: says why.
    """
    if any(len(os.fsencode(part)) > 255 for part in path.parts):
        raise WriteError(f"has a name of more than 255 bytes: {shown(str(path))}")
    there = path.parent if folder is None else folder
    try:
        while not there.exists():
            there = there.parent
    except OSError as error:
        raise WriteError(f"{shown(str(path))} can't be written: {error.strerror}") from None
    written = "nothing can be written there" if there == path else f"{path} can't be written"
    if not there.is_dir():
        raise WriteError(f"{there} is no folder: {written}")
    if not os.access(there, os.W_OK | os.X_OK):
        read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        raise WriteError(f"{there} is {'on a read-only disk' if read_only else 'not to be written to'}: {written}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` if the block goes well; folders on the way are made.

    Raises:
        WriteError: the disk is full, the folder is not to be written to, or the like; `path` is then as it was.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}-{_host()}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep_once(path.parent)
        yield aside
        aside.replace(path)
    except SubquadError:
        raise
    except Exception as error:
        if (reason := write_reason(error)) is None:
            raise
        raise WriteError(f"{path} can't be written: {reason}") from error
    finally:
        with suppress(OSError):
            _remove(aside)


@contextmanager
def replacing_together(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """As `replacing`, for files that mean something together: whoever opens them opens the last one.

    All are written aside before any is moved, and the last one is away until the others are in their places: a process
    that is ended in between leaves none to open, and not one beside files of another.
    """
    with ExitStack() as stack:
        # which are moved in the opposite order
        asides = [stack.enter_context(replacing(path)) for path in reversed(paths)]
        yield asides[::-1]
        if len(paths) > 1:
            paths[-1].unlink(missing_ok=True)


def reserve(path: Path, size: int) -> None:
    """Have the disk keep so many bytes for a file that is there, which is as long then, or longer if it was.

    What is mapped into memory and finds no place on the disk ends the process without a word.

    Raises:
        OSError: there is no such place.
    """
    with path.open("r+b") as file:
        if size and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file.fileno(), 0, size)
                return
            except OSError as error:
                # a file system that keeps no place for anybody
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
        if shutil.disk_usage(path.parent).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.truncate(max(size, os.fstat(file.fileno()).st_size))


@contextmanager
def temporary_folder(name: str) -> Iterator[Path]:
    """A folder among the system's temporary ones, which is gone afterwards, with those of processes that were killed.

    Raises:
        SubquadError: there is no place for such.
    """
    try:
        _sweep_once(Path(tempfile.gettempdir()))
        place = tempfile.TemporaryDirectory(prefix=f"subquad-{name}-{os.getpid()}-{_host()}-")
    except OSError as error:
        raise SubquadError(
            f"there is no place for temporary files ({reason_without_path(error)}): set TMPDIR to a folder to write to"
        ) from None
    with place as folder:
        yield Path(folder)


def little_room(folder: Path, needed: int) -> str:
    """What is to be added to an error where a temporary folder has less room than is needed; else nothing."""
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return ""
    return f"; {folder.parent} has room for {free / 2**20:.0f} MiB more: set TMPDIR to a folder with more of it"


class ToldAfterwards(io.FileIO):
    """A new file that says only when it is closed that it could not be written.

    PyTorch's writer of programs ends the process where it is told in the middle.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w")
        self._error: OSError | None = None

    def write(self, content: Any, /) -> int:
        """Write all of it, or remember why it can't be."""
        rest = memoryview(content).cast("B")
        size = len(rest)
        try:
            while len(rest) and self._error is None:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self._error = error
        return size

    def close(self) -> None:
        """Raise an OSError where anything could not be written."""
        super().close()
        if (error := self._error) is not None:
            self._error = None
            raise error


def write_text(path: Path, text: str) -> None:
    """Write a whole file or nothing."""
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any, *, indent: int | None = None) -> None:
    """Write `content` as JSON and a newline, whole or not at all."""
    write_text(path, json_text(content, indent=indent) + "\n")


def json_text(content: Any, *, indent: int | None = None) -> str:
    """JSON as every reader takes it: numbers that it has no word for, NaN and infinities, are null."""
    return json.dumps(_finite(content), indent=indent, ensure_ascii=False, allow_nan=False)


def sorted_json(content: Any) -> str:
    """JSON by the order of its names and without spaces: the same content is the same text."""
    return json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _finite(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return content


def write_reason(error: BaseException) -> str | None:
    """Why a file could not be written: what the system said, also through libraries; None for other errors."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause.strerror or str(cause)
        # safetensors, and torch of memory that processes share, say it in words
        if match := re.search(r"(?:I/O error|unable to \w+ .*): (.+?)(?: \((?:os error )?\d+\))?$", str(cause)):
            return match[1]
        cause = cause.__cause__ or cause.__context__
    return None


def full_reason(error: BaseException) -> str | None:
    """What the system said of a disk that is full, or of a file that is longer than may be; None for other errors."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return os.strerror(cause.errno)
        cause = cause.__cause__ or cause.__context__
    return None


@contextmanager
def naming_what_is_full(path: Path) -> Iterator[None]:
    """Name the file that a disk has no room for, where several are written together.

    Raises:
        WriteError: there is no room.
    """
    try:
        yield
    except OSError as error:
        if (reason := full_reason(error)) is None:
            raise
        raise WriteError(f"{path} can't be written: {reason}") from error


def is_aside(name: str) -> bool:
    """Whether a file of this name is one that has not taken its place yet."""
    return _ASIDE.fullmatch(name) is not None


def sweep(folder: Path) -> None:
    """Remove what processes of this machine that are no more left aside in `folder`."""
    for entry in folder.iterdir():
        match = _ASIDE.fullmatch(entry.name) or _TEMPORARY.fullmatch(entry.name)
        if match and match["host"] == _host() and not _runs(int(match["process"])):
            with suppress(OSError):
                _remove(entry)


def _remove(path: Path) -> None:
    """Remove a file, or a folder with what is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sweep_once(folder: Path) -> None:
    """Sweep a folder that this process has not written to yet."""
    key = (os.getpid(), folder.absolute())
    if key not in _swept:
        _swept.add(key)
        with suppress(OSError):
            sweep(folder)


def _host() -> str:
    """This machine, in 8 letters that fit into any file name."""
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
