"""The most memory that a run takes.

It is that of the accelerator where there is one. On the CPU it is the peak of the resident memory of the whole process,
libraries and data included; on Linux the peak is reset when a run starts.
"""

import contextlib
import gc
import resource
import sys
from pathlib import Path

import torch


def reset_run_peak(device: torch.device) -> None:
    """Start a new peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def run_peak_mb(device: torch.device) -> float:
    """The peak since the reset, in 2^20 bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # Linux counts in KiB, macOS in bytes
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
