"""The CPU kernels: those that a wheel ships where they fit, else compiled where they run.

They compile once for each processor, compiler and version of their source. There is nothing of PyTorch in it, so that
it takes seconds; the threads are those of PyTorch's own OpenMP. Where there is neither a shipped library nor a compiler
there are no kernels, and `missing` says so.

What is kept in `home()`, which several users may share, is code: each user has a folder of their own there, and only
what this user wrote, and nobody else may write, is loaded. Behind the library stands its digest; what is damaged is
compiled again.
"""

import contextlib
import ctypes
import functools
import hashlib
import itertools
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import torch

from subquad.errors import SubquadError
from subquad.home import home
from subquad.kernels.cpu import by_memory, openmp
from subquad.kernels.cpu.by_memory import ByMemory
from subquad.kernels.cpu.shipping import (
    DIGEST_SIZE,
    ELEMENTS,
    PORTABLE_FLAGS,
    SOURCES,
    digest_of,
    processor,
    shipped_libraries,
    source_digest,
)
from subquad.writing import replacing

FLAGS = (*PORTABLE_FLAGS, "-march=native")


_LOADS = itertools.count()
_HEARD = threading.local()


def functions() -> list[str]:
    """What the library exports, of each of ELEMENTS, as its source says; each gives back whether lengths fitted."""
    sources = (source.read_text(encoding="utf-8") for source in SOURCES.glob("*.h"))
    return sorted(name for source in sources for name in re.findall(r"^KERNEL\(\s*(\w+),", source, re.MULTILINE))


class NotBuiltError(Exception):
    """Why there are no kernels, in one line."""


def library() -> ctypes.CDLL:
    """The loaded kernels, compiled if they have not been; raises NotBuiltError."""
    state = _state()
    if isinstance(state, str):
        raise NotBuiltError(state)
    return state


def kernel(name: str, dtype: torch.dtype = torch.float32) -> Callable[..., int]:
    """The kernel `name` of `functions` for tokens of a dtype, fp32 or bf16; raises NotBuiltError, or SubquadError."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise SubquadError(f"kernels for CPUs compute in fp32 and bf16, and tokens are {dtype}")
    name = f"{name}_{'bf16' if dtype == torch.bfloat16 else 'float'}"
    loaded = library()
    function: Callable[..., int] = (
        ByMemory(name, getattr(loaded, f"{name}_unpacked")) if by_memory.IS_NEEDED else getattr(loaded, name)
    )
    listener = getattr(_HEARD, "by", None)
    return function if listener is None else functools.partial(listener, function)


def is_heard_here() -> bool:
    """Whether calls of kernels in this thread are by a listener."""
    return hasattr(_HEARD, "by")


@contextlib.contextmanager
def heard_by(listener: Callable[..., int]) -> Iterator[None]:
    """Let kernels be called by `listener(kernel, *arguments)` for a while, in this thread."""
    _HEARD.by = listener
    try:
        yield
    finally:
        del _HEARD.by


def missing() -> str | None:
    """Why there are no kernels here; None where there are."""
    state = _state()
    return state if isinstance(state, str) else None


@functools.cache
def _state() -> ctypes.CDLL | str:
    if sys.platform != "linux":
        return f"they have been made for Linux, and this is {sys.platform}"
    if (shipped := _shipped()) is not None:
        return shipped
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "there is no C++ compiler (c++, g++, clang++ or $CXX)"
    try:
        path = _own_folder() / f"{_fingerprint(compiler)}.so"
        if (library := _loaded(path)) is None:
            # nobody would wait for a minute without knowing what for
            logging.getLogger("subquad").warning("subquad: compiling kernels for this processor, once: a minute or two")
            library = _loaded(_compile(compiler, path)) or _unreadable(path)
        return _refusing(library)
    # ours: there is no home, or no room in it
    except (OSError, NotBuiltError, SubquadError) as error:
        return " ".join(str(error).split())


def _shipped() -> ctypes.CDLL | None:
    """The best of the libraries in this package that this processor can run; None where none can be loaded."""
    # they have no OpenMP of their own, and find that of PyTorch among what is loaded
    if not openmp.make_visible():
        return None
    own = Path(__file__).stat()
    for path in shipped_libraries():
        # whoever may write the library may write this file, too
        with contextlib.suppress(OSError, AttributeError):
            if (library := _loaded(path, own.st_uid, own.st_mode)) is not None:
                return _refusing(library)
    return None


def _own_folder() -> Path:
    """The folder of this user's libraries, which nobody else may write to."""
    folder = home() / "native" / f"user-{os.geteuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise NotBuiltError(f"{folder} belongs to somebody else: set SUBQUAD_HOME to a folder of your own")
    # on a disk that is not to be written to there may be a library all the same
    if stat.S_IMODE(status.st_mode) != 0o700:
        folder.chmod(0o700)
    return folder


def _loaded(path: Path, owner: int | None = None, mode: int = 0) -> ctypes.CDLL | None:
    """The library at `path`; None where there is none, or it is damaged or could have been written by others.

    Others are all but its `owner`, this user if left out, and those who may write a file of this `mode`.
    """
    owner = os.geteuid() if owner is None else owner
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != owner or status.st_mode & ~mode & 0o022:
            return None
        content = file.read()
        if content[-DIGEST_SIZE:] != digest_of(content[:-DIGEST_SIZE]):
            return None
        # by its descriptor: what was looked at is what is loaded; under a name that no library had before, since what
        # is loaded already is found by its name
        return ctypes.CDLL(f"/proc/self/{'./' * next(_LOADS)}fd/{descriptor}")


def _unreadable(path: Path) -> NoReturn:
    raise NotBuiltError(f"{path} was written and can't be read back")


def _refusing(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library, whose functions raise where they were given lengths that do not fit each other."""
    for name, element, way in itertools.product(functions(), ELEMENTS, ("", "_unpacked")):
        getattr(library, f"{name}_{element}{way}").errcheck = _refuse
    return library


def _refuse(answer: int, function: Any, arguments: tuple[Any, ...]) -> None:
    if answer:
        raise SubquadError(f"the kernel {function.__name__} was called with tensors that do not fit each other")


def _fingerprint(compiler: str) -> str:
    """Changes with the source, the compiler, the processor (folders of users are shared among machines) and torch."""
    digest = hashlib.sha256(source_digest().encode())
    real = Path(compiler).resolve()
    facts = real, real.stat().st_size, FLAGS, platform.machine(), processor(), torch.__version__
    digest.update(repr(facts).encode())
    return digest.hexdigest()[:24]


def _compile(compiler: str, path: Path) -> Path:
    """Compile to `path`; other processes see all of it or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "kernels.so"
        threads = openmp.loaded()
        # linked against the OpenMP that torch brings, if it brings one: two of them fight over the cores
        with_threads = [] if threads is None else ["-fopenmp"]
        parts = {element: str(Path(folder) / f"{element}.o") for element in ELEMENTS}
        flags = [*FLAGS, *with_threads, "-c", str(SOURCES / "kernels.cpp")]
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(_run, ([compiler, *flags, f"-DELEMENT={e}", "-o", part] for e, part in parts.items())))
        _run([compiler, "-shared", *parts.values(), *([] if threads is None else [str(threads)]), "-o", str(built)])
        content = built.read_bytes()
    with replacing(path) as aside:
        aside.write_bytes(content + digest_of(content))
        aside.chmod(0o700)
    return path


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise NotBuiltError(f"{command[0]} failed: {lines[0] if lines else f'exit status {done.returncode}'}")
