"""Triton's compiler takes every kernel, and a GPU has room for it, whether there is one or not."""

import sys
from pathlib import Path

import pytest
import torch

from subquad.kernels.triton import INTERPRETED, MOST_TURNED

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import kernel_needs

from subquad import ops
from subquad.kernels import unavailable
from subquad.kernels.triton.offline import compiling, needs_of

CALLS = list(kernel_needs.calls(16, torch.float32))


def check(name, dtype, channels, capability, kilobytes):
    calls = kernel_needs.calls(channels, dtype)
    if channels > MOST_TURNED and name not in calls:
        pytest.skip("heads of so many channels are eager there")
    found = needs_of(calls[name], capability)
    assert found
    for needs in found:
        assert needs.shared <= kilobytes * 1024, needs
        assert not needs.idle, needs
        # states of 128² numbers fit nowhere: PolaFormer's backward pass spills most of one on Ampere
        assert channels > 64 or needs.spilled <= 1536, needs


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CALLS if "backward" in name or "soft" in name])
@pytest.mark.parametrize(
    ("dtype", "channels", "kilobytes"),
    [(torch.bfloat16, 64, 99), (torch.float16, 64, 99), (torch.bfloat16, 128, 227), (torch.float16, 128, 227)],
)
def test_kernels_fit_hopper(name, dtype, channels, kilobytes):
    check(name, dtype, channels, (9, 0), kilobytes)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_sizes_of_one_which_triton_treats_apart_compile(name):
    assert needs_of(kernel_needs.calls(16, torch.float16, images=1, heads=1, tokens=1, few=1)[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("dtype", "channels", "capability", "kilobytes"),
    [
        (torch.float32, 64, (8, 6), 99),
        (torch.float16, 64, (8, 9), 99),
        (torch.bfloat16, 64, (8, 6), 99),
        (torch.bfloat16, 128, (8, 0), 160),
    ],
)
def test_kernels_fit_the_gpu(name, dtype, channels, capability, kilobytes):
    check(name, dtype, channels, capability, kilobytes)


def test_what_is_launched_is_compiled_for_a_gpu_that_is_not_here(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    q, k, v = torch.randn(3, 1, 2, 48, 24).unbind(0)
    reason = unavailable("triton")
    with compiling(132):
        assert ops.inline_attention(q, k, v, backend="triton").shape == q.shape
    assert {path.stem for path in tmp_path.glob("*/*.cubin")} == {"state_kernel", "spread_kernel"}
    assert unavailable("triton") == reason
