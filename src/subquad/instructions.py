"""What the processor that this runs on can compute by itself."""

import platform

import torch


def multiplies_bf16() -> bool:
    """Whether this processor multiplies bf16 itself; others widen it, and are slower by it."""
    asked = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_arm_bf16_supported")
    return any(bool(getattr(torch.cpu, name)()) for name in asked if hasattr(torch.cpu, name))


def loops_over_bf16() -> bool:
    """Whether PyTorch multiplies matrices of bf16 in plain loops here, as oneDNN has nothing for this processor.

    On x86-64 oneDNN needs AVX-512 for it (docs/performance.md has what that costs). What other processors take was not
    seen.
    """
    return _has_nothing("_is_mkldnn_bf16_supported")


def loops_over_fp16() -> bool:
    """The same of fp16, for which oneDNN needs AVX512-FP16 on x86-64."""
    return _has_nothing("_is_mkldnn_fp16_supported")


def loops_over(dtype: torch.dtype) -> bool:
    """Whether PyTorch multiplies matrices and convolves maps of a dtype in plain loops here."""
    if dtype == torch.bfloat16:
        return loops_over_bf16()
    return dtype == torch.float16 and loops_over_fp16()


def _has_nothing(asked: str) -> bool:
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    has = getattr(torch.ops.mkldnn, asked, None)
    return has is not None and not has()


def slow_in_bf16(device: torch.device) -> str | None:
    """How a line goes on that begins with what asks for bf16, where that makes every step slow for nothing."""
    if device.type != "cpu" or not loops_over_bf16():
        return None
    return "is several times slower than fp32 on this processor, which has no AVX-512"
