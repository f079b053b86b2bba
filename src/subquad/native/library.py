"""The CPU kernels, compiled where they run: once for each processor, compiler and version of their source.

There is nothing of PyTorch in their source, so that it compiles in seconds; the threads are those of PyTorch's own
OpenMP. Where there is no compiler there are no kernels, and `missing` says so.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from subquad.errors import SubquadError
from subquad.home import home

SOURCES = Path(__file__).parent / "kernels"
FUNCTIONS = (
    "agent_attention",
    "agent_attention_gradient",
    "convolve_windows",
    "gaussian_gather",
    "gaussian_spread",
    "inline_attention",
    "inline_attention_gradient",
    "linear_attention",
    "linear_attention_gradient",
    "local_branch",
    "local_branch_gradient",
    "newton_inverse",
    "newton_inverse_gradient",
    "polar_attention",
    "pool",
    "pool_gradient",
)
"""What the library exports; each gives back whether lengths fitted."""

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC")


class NotBuiltError(Exception):
    """Why there are no kernels, in one line."""


def library() -> ctypes.CDLL:
    """The loaded kernels, compiled if they have not been; raises NotBuiltError."""
    state = _state()
    if isinstance(state, str):
        raise NotBuiltError(state)
    return state


def missing() -> str | None:
    """Why there are no kernels here; None where there are."""
    state = _state()
    return state if isinstance(state, str) else None


@functools.cache
def _state() -> ctypes.CDLL | str:
    if sys.platform != "linux":
        return f"they have been made for Linux, and this is {sys.platform}"
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "there is no C++ compiler (c++, g++, clang++ or $CXX)"
    try:
        path = home() / "native" / f"{_fingerprint(compiler)}.so"
        if not path.exists():
            _compile(compiler, path)
        return _refusing(ctypes.CDLL(str(path)))
    except (OSError, NotBuiltError) as error:
        return " ".join(str(error).split())


def _refusing(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library, whose functions raise where they were given lengths that do not fit each other."""
    for name in FUNCTIONS:
        getattr(library, name).errcheck = _refuse
    return library


def _refuse(answer: int, function: Any, arguments: tuple[Any, ...]) -> None:
    if answer:
        raise SubquadError(f"the kernel {function.__name__} was called with tensors that do not fit each other")


def _fingerprint(compiler: str) -> str:
    """Changes with the source, the compiler, the processor (folders of users are shared among machines) and torch."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    real = Path(compiler).resolve()
    facts = real, real.stat().st_size, FLAGS, platform.machine(), _processor(), torch.__version__
    digest.update(repr(facts).encode())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What the processor can do, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile(compiler: str, path: Path) -> None:
    """Compile to `path`; other processes see all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, built = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
        openmp = sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*"))
        # linked against the OpenMP that torch brings, if it brings one: two of them fight over the cores
        with_threads = ["-fopenmp"] if openmp else []
        source = str(SOURCES / "kernels.cpp")
        _run([compiler, *FLAGS, *with_threads, "-c", source, "-o", str(made)])
        _run([compiler, "-shared", str(made), *map(str, openmp[:1]), "-o", str(built)])
        built.replace(path)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise NotBuiltError(f"{command[0]} failed: {lines[0] if lines else f'exit status {done.returncode}'}")
