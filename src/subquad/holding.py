"""A folder belongs to one process while that writes to it.

The lock is the kernel's: it ends with the process however that ends, so that a lock file which was left behind holds
nothing, whoever has its number now. What stands in the file is for the message only.
"""

import errno
import getpass
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from subquad.errors import SubquadError, reason_without_path
from subquad.writing import sweep

try:
    import fcntl
except ImportError:  # a system without them has no locks
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
_held: dict[Path, tuple[int, int]] = {}
"""By folder, the descriptor of its lock and the thread that has it."""


def is_first_process() -> bool:
    """Whether this is the process that writes, of those that torchrun or Accelerate started together."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Hold `folder`, which is made if it is not there, and taken away afterwards if it was made and is empty.

    Whoever holds it already goes on holding it. Of the processes of one distributed run the first one holds it for all.
    Folders on file systems without locks are not held.

    Raises:
        SubquadError: another process holds it, in one line that says which; or it can't be made.
    """
    key = folder.resolve()
    if not is_first_process() or _held.get(key, (0, 0))[1] == threading.get_ident():
        yield
        return
    made: list[Path] = []
    lock = _lock(folder, made)
    own = _held[key] = lock, threading.get_ident()
    try:
        with suppress(OSError):
            sweep(folder)
        yield
    finally:
        if _held.pop(key, None) == own:
            _release(lock, folder, made)


def tidy(folder: Path) -> None:
    """Remove the lock file that a killed process left in `folder`, where nobody holds it."""
    if (folder / LOCK).exists():
        with suppress(SubquadError), holding(folder):
            pass


def _release(lock: int, folder: Path, made: list[Path]) -> None:
    # removed while it is held: whoever has opened it meanwhile finds that it is no longer there
    with suppress(OSError):
        (folder / LOCK).unlink()
    os.close(lock)
    _remove_empty(made)


def _lock(folder: Path, made: list[Path]) -> int:
    """The descriptor of the folder's lock file, locked."""
    try:
        while True:
            made += _make(folder)
            try:
                lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError:
                # the process that has just left took the folder with it
                continue
            try:
                free = _try_lock(lock)
            except OSError:
                _forget(lock, folder / LOCK)
                raise
            if not free:
                writer = os.pread(lock, 500, 0).decode(errors="replace").strip() or "another process"
                os.close(lock)
                raise SubquadError(f"{folder} is being written by {writer}: wait for it, or name another folder")
            if _is_at(lock, folder / LOCK):
                break
            os.close(lock)
    except OSError as error:
        _remove_empty(made)
        raise SubquadError(f"{folder} can't be written to: {error.strerror or error}") from None
    with suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, _whoami().encode(), 0)
    return lock


def _forget(lock: int, path: Path) -> None:
    """Close a lock file that could not be locked, and remove it where nobody has ever held it."""
    with suppress(OSError):
        if not os.fstat(lock).st_size:
            path.unlink()
    os.close(lock)


def lock_refusal(path: Path, error: Exception) -> SubquadError:
    """The error for a lock in $SUBQUAD_HOME that can't be had, by what was to be locked."""
    known = isinstance(error, NotImplementedError) or getattr(error, "errno", None) in _NO_LOCKS
    where = "on a disk that has locks" if known else "to write to"
    what = "can't lock" if known else "can't write"
    return SubquadError(f"{what} {path} ({reason_without_path(error)}): set SUBQUAD_HOME to a folder {where}")


def _make(folder: Path) -> list[Path]:
    """Make a folder; those that were not there, the innermost first."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is no folder")
    missing = []
    for each in (folder, *folder.parents):
        if each.exists():
            break
        if each.is_symlink():
            # as where a disk is not mounted; the system says that it exists
            raise FileNotFoundError(errno.ENOENT, f"{each} is a link to {each.readlink()}, which is not there")
        missing.append(each)
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _remove_empty(folders: list[Path]) -> None:
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _try_lock(lock: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _is_at(lock: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False


def _whoami() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"process {os.getpid()} on {socket.gethostname()} ({user}) since {datetime.now():%Y-%m-%d %H:%M}"


def _let_go() -> None:
    """Leave the locks to the parent: they would outlive it in a loader process."""
    for lock, _ in _held.values():
        with suppress(OSError):
            os.close(lock)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
