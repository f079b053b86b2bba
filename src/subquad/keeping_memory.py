"""Memory that stays with the process when it is freed."""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""What glibc's malloc.h calls M_TRIM_THRESHOLD and M_MMAP_THRESHOLD."""
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def keep_memory() -> bool:
    """Let this process keep what it frees, up to blocks of 1 GB, until it ends; whether that could be arranged.

    glibc gives large blocks back to the system as soon as they are free and takes them anew, page by page: that is 5 to
    30 % of the time of networks with large maps on a CPU, in training as well as afterwards (docs/performance.md). The
    command `subquad` does this for itself. It holds for whatever the process allocates, not for PyTorch alone, so that
    nobody else is decided for: call it once, before networks run. What glibc was told by variables (MALLOC_…,
    GLIBC_TUNABLES) stays as it was told, and other C libraries know nothing of it.
    """
    told = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc." in told or any(name in os.environ for name in _VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        # macOS and Windows
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(_TRIM_THRESHOLD, (1 << 31) - 1))
