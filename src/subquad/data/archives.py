"""Archives of images: unpacked once into the data folder, safely and wholly, and found there afterwards.

What tar, gzip and xz can tell is read to the end: every header, the end of the archive, the checksums. What they can't
is remembered: beside a folder lies a note of how many files it has, of their sizes, and of the archive's digest.
"""

import contextlib
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from filelock import FileLock

from subquad.data.tars import digest_of, read_tar
from subquad.data.walking import is_hidden
from subquad.errors import SubquadError, reason_without_path
from subquad.holding import lock_refusal
from subquad.home import home
from subquad.writing import write_json

ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.xz")


def data_home() -> Path:
    """The folder for data in `home()`, made if it is not there."""
    folder = home() / "data"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SubquadError(
            f"can't make {folder} ({error.strerror}): set SUBQUAD_HOME to a folder to write to"
        ) from None
    return folder


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes out of what is made at `path`."""
    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire()
    except (OSError, NotImplementedError) as error:
        raise lock_refusal(Path(f"{path}.lock"), error) from None
    try:
        yield
    finally:
        lock.release()


def is_archive(path: Path) -> bool:
    """Whether `path` is a file with the name of an archive."""
    return path.is_file() and path.name.lower().endswith(ENDINGS)


def not_there(what: str, path: Path) -> str:
    """That there is no such folder or archive, or that what is there is neither.

    Of a path that begins at the current folder, which may be another today, it is said where that is.
    """
    if not path.is_file():
        return f"there is no {what} {path}" + ("" if path.is_absolute() else f" in {Path.cwd()}")
    folder, _, archive = what.partition(" or ")
    if not archive:
        return f"{path} is no {folder}, but a file"
    said = f"{path} is neither a {folder} nor an {archive} ({', '.join(ENDINGS)})"
    return f"{said}: unpack it first" if path.suffix.lower() == ".zip" else said


@dataclass
class Note:
    """What is known of an unpacked folder.

    Attributes:
        filled: files in it that are not empty, folders not counted.
        size: of all of them together.
        digest: of the archive.
        changed: when archives with this digest were last changed, by their paths.
    """

    filled: int
    size: int
    digest: str
    changed: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(folder: Path) -> "Note | None":
        """Read the note beside a folder; None where there is none, or no whole one."""
        try:
            content = json.loads(_note_file(folder).read_text(encoding="utf-8"))
            note = Note(**content)
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        return note if isinstance(note.changed, dict) else None

    def write(self, folder: Path) -> None:
        """Keep it beside a folder."""
        write_json(_note_file(folder), asdict(self))


def unpack(archive: Path) -> Path:
    """The folder with the content of `archive`: unpacked at the first call, and again when either has changed.

    Raises:
        SubquadError: the archive is damaged, cut short, or reaches out of its folder; nothing is left behind.
    """
    status = archive.stat()
    stem = archive.name.split(".tar")[0].removesuffix(".tgz")[:100]
    folder = data_home() / f"{stem}-{status.st_size:x}-{status.st_mtime_ns:x}"
    with locked(folder):
        try:
            return _inner(_current(archive, folder))
        except OSError as error:
            raise SubquadError(f"can't unpack {archive} into {folder.parent}: {reason_without_path(error)}") from None


def _current(archive: Path, folder: Path) -> Path:
    """The folder with what is in `archive`, unpacked if need be; another one where `folder` is of another archive."""
    note = Note.of(folder)
    if note is None and folder.is_dir():
        note = _compared(archive, folder)
    path, changed = str(archive.resolve()), archive.stat().st_ctime_ns
    if note is not None and note.changed.get(path) != changed:
        # size and time can be those of another file, as of a download that is repeated
        digest = digest_of(archive)
        if digest != note.digest:
            folder = folder.with_name(f"{folder.name}-{digest[:16]}")
            note = Note.of(folder)
        if note is not None:
            note.changed[path] = changed
            note.write(folder)
    if note is None or _counted(folder)[1:] != (note.filled, note.size):
        note = _unpack_to(archive, folder)
        note.changed[path] = changed
        note.write(folder)
    return folder


def _unpack_to(archive: Path, folder: Path) -> Note:
    """Fill `folder` anew, wholly or not at all."""
    for leftover in folder.parent.glob(f".{glob.escape(folder.name)}-*"):
        # of a process that was killed: whoever is at work holds the lock
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as partial:
        content = Path(partial) / "content"
        content.mkdir()
        read = read_tar(archive, content)
        files, filled, size = _counted(content)
        if files != read.files:
            raise SubquadError(f"{archive} has {read.files} files of {files} names: some are meant to be others")
        if folder.exists():
            folder.replace(Path(partial) / "damaged")
        content.replace(folder)
    return Note(filled, size, read.digest)


def _compared(archive: Path, folder: Path) -> Note | None:
    """Make a note of a folder that an earlier version left without one; None where it is not what the archive has."""
    read = read_tar(archive)
    note = Note(read.filled, read.size, read.digest)
    return note if _counted(folder)[1:] == (read.filled, read.size) else None


def _counted(folder: Path) -> tuple[int, int, int]:
    """How many files there are in a folder and below, how many that are not empty, and their size."""
    files = filled = size = 0
    folders = [str(folder)] if folder.is_dir() else []
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    length = entry.stat(follow_symlinks=False).st_size
                    files, filled, size = files + 1, filled + (length > 0), size + length
    return files, filled, size


def _note_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def _inner(folder: Path) -> Path:
    """Past folders that hold nothing but one folder of folders, as archives often begin."""
    while True:
        visible = [entry for entry in folder.iterdir() if not is_hidden(entry.name)]
        if len(visible) != 1 or not visible[0].is_dir() or not any(entry.is_dir() for entry in visible[0].iterdir()):
            return folder
        folder = visible[0]
