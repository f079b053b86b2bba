"""What of this processor PyTorch's own products use."""

import functools
from pathlib import Path

import torch


@torch.compiler.assume_constant_result
def products_lag() -> bool:
    """Whether PyTorch's products in fp32 leave half of this processor's multipliers idle.

    MKL, which computes them, takes the instructions of AVX2 on processors that are not Intel's. AMD's have multipliers
    twice as wide from Zen 5 on, of which half are used (docs/performance.md, "Who multiplies").
    """
    return _products_lag()


@functools.cache
def _products_lag() -> bool:
    if not torch.backends.mkl.is_available():
        return False
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    said = dict(reversed([(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in lines)]))
    family = said.get("cpu family", "")
    is_wide = said.get("vendor_id") == "AuthenticAMD" and family.isdecimal() and int(family) >= 26
    return is_wide and "avx512f" in said.get("flags", "").split()
