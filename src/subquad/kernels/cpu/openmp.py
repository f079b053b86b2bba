"""PyTorch's OpenMP, for kernels: two of them in one process would fight over the cores.

Where it lies differs. PyTorch's wheels for x86-64 load it for all to see; those for aarch64 load it for themselves,
with others in the same folder that are called alike (libarm_compute, libnvpl_blas_lp64_gomp).
"""

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

import torch

NAMES = ("libgomp", "libomp", "libiomp")
"""As GNU's, LLVM's and Intel's files begin; kernels are compiled for GNU's interface, which all three have."""


def make_visible() -> bool:
    """Let libraries that are loaded next find PyTorch's OpenMP; False where it has none of GNU's interface."""
    if not _is_visible() and (path := loaded()) is not None:
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(path), mode=os.RTLD_GLOBAL | os.RTLD_NOLOAD)
    return _is_visible()


def loaded() -> Path | None:
    """The file that PyTorch's OpenMP was loaded from; None where it has none, or Linux does not say."""
    try:
        maps = Path("/proc/self/maps").read_text(errors="surrogateescape")
    except OSError:
        return None
    return among(line.split(maxsplit=5)[-1] for line in maps.splitlines())


def among(files: Iterable[str]) -> Path | None:
    """The OpenMP among files of a process: PyTorch's own before one that another package has brought."""
    paths = sorted({Path(file) for file in files if Path(file).name.startswith(NAMES)})
    own = Path(torch.__file__).parent
    return min(paths, key=lambda path: not path.is_relative_to(own), default=None)


def _is_visible() -> bool:
    return hasattr(ctypes.CDLL(None), "GOMP_parallel")
