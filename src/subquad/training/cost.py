"""What a run costs: parameters, multiply-adds, memory.

Peak memory is that of the accelerator where there is one. On the CPU it is the peak of the resident memory of the whole
process, libraries and data included; on Linux the peak is reset when a run starts.
"""

import contextlib
import gc
import resource
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from subquad.kernels import use_backend


def count_parameters(model: nn.Module) -> int:
    """Numbers that are learned."""
    return sum(p.numel() for p in model.parameters())


def count_macs(model: nn.Module, img_size: tuple[int, int]) -> int:
    """Multiply-adds of one RGB image, as the papers print them (the counter counts two operations for each)."""
    return count_macs_of(model, torch.zeros(1, 3, *img_size))


def count_macs_of(model: nn.Module, batch: Tensor) -> int:
    """Multiply-adds of one pass over a batch, on the device that the model is on."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    # the same on every machine: the eager forms, as older torch counts nothing for its fused attention on the CPU
    with torch.no_grad(), use_backend("eager"), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(batch.to(device))
    model.train(training)
    return counter.get_total_flops() // 2


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mb(device: torch.device) -> float:
    """The peak since the reset, in 2^20 bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # Linux counts in KiB, macOS in bytes
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
