"""Tiles of GPU kernels chosen by time for layers and whole networks, and what that gained."""

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from subquad.benchmarks.blocks import dtype_of
from subquad.benchmarks.layers_on_squares import check_mechanisms, describe_device, is_mechanism, layer_on_tokens
from subquad.errors import unknown_name
from subquad.kernels.triton.tuning import Tuned, check_tunable, tune
from subquad.models import VARIANTS, create_model
from subquad.models.networks import NETWORKS
from subquad.text import columns
from subquad.timing import timed_pass


def tune_tiles(
    names: Sequence[str],
    sizes: Sequence[int],
    *,
    dim: int = 192,
    num_heads: int = 3,
    batch_size: int = 1,
    dtype: str = "bf16",
    device: torch.device | str = "cuda",
    backward: bool = False,
    again: bool = False,
    minutes: float | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> list[Tuned]:
    """Choose tiles for layers of mechanisms, or for networks, by time; returns a `Tuned` for each kernel and shape.

    Choices are kept in $SUBQUAD_HOME and hold for all processes of this user on this kind of device.

    Args:
        names: mechanisms, or networks.
        sizes: numbers of tokens of mechanisms, square numbers; pixels of a side of networks.
        dim: channels of the layers.
        num_heads: heads of the layers.
        batch_size: images at a time.
        dtype: fp32, bf16 or fp16.
        device: where they run.
        backward: kernels of gradients as well.
        again: also what was chosen before.
        minutes: that it may take; another call goes on.
        log: hears a line for each kernel.

    Raises:
        SubquadError: there is no CUDA device, or a name or size is wrong, in one line.
    """
    networks = [name for name in names if not is_mechanism(name)]
    for name in networks:
        if name not in VARIANTS and name not in NETWORKS:
            raise unknown_name("model", name, [*VARIANTS, *NETWORKS])
    check_mechanisms([name for name in names if is_mechanism(name)])
    kind, device = dtype_of(dtype), torch.device(device)
    check_tunable(device)
    describe_device(device)
    end = None if minutes is None else time.monotonic() + 60 * minutes
    found: list[Tuned] = []
    for name, size in itertools.product(names, sizes):
        if is_mechanism(name):
            shape = (batch_size, size, dim)
            layer, x, grid = layer_on_tokens(name, shape, num_heads, device=device, dtype=kind, backward=backward)
            compute = partial(layer, x, grid=grid)
        else:
            model = create_model(name, img_size=size).to(device=device, dtype=kind).eval()
            compute = partial(model, torch.randn(batch_size, 3, size, size, device=device, dtype=kind))
        log(f"{name}, {size} {'tokens' if is_mechanism(name) else 'px'}")
        left = None if end is None else (end - time.monotonic()) / 60
        found += tune(timed_pass(compute, backward), device=device, again=again, minutes=left, log=log)
    return found


def tiles_table(found: Sequence[Tuned]) -> str:
    """What was found, as text: a line for each kernel and shape, the largest gain first."""
    lines = [["kernel and shape", "as it comes, ms", "chosen, ms", "gain", "failed", "chosen"]]
    for one in sorted(found, key=lambda one: one.chosen_ms / one.default_ms):
        chosen = " ".join(str(value) for value in one.chosen.values()) if one.chosen != one.default else "as it comes"
        gain = f"{one.default_ms / one.chosen_ms:.2f}"
        lines.append([one.key, f"{one.default_ms:.3f}", f"{one.chosen_ms:.3f}", gain, str(one.failed), chosen])
    return columns(lines)
