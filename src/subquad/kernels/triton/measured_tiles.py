"""Tiles that were fastest of those tried on an H200, which bf16 has on Hopper GPUs for heads of up to 64 channels.

Tokens of a tile, warps of a program, tiles that are read ahead: of heads of 64 channels (64 images of 1,024 tokens, 3
heads), and of up to 32 (16 images of 3,136 tokens, 12 heads; MLLA's and softmax-free attention's were measured at 64
only). Other tiles of half precision have as many warps there as find rows to compute. docs/gpu/first-h200.md has what
they take, scripts/gpu_tiles.py what measures it. A choice of `subquad tune` stands before them.
"""

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

Row = tuple[int, int, int]

ABOUT = "BLOCK", "num_warps", "num_stages"

PRODUCTS: dict[str, tuple[Row, Row]] = {
    "relu.state": ((64, 4, 3), (128, 4, 2)),
    "relu.spread": ((64, 4, 3), (128, 4, 3)),
    "relu.dq": ((64, 4, 2), (64, 4, 2)),
    "relu.dk": ((64, 4, 2), (64, 4, 2)),
    "inline.state": ((64, 4, 3), (128, 4, 3)),
    "inline.spread": ((64, 4, 3), (64, 4, 3)),
    "inline.dq": ((64, 4, 2), (64, 4, 2)),
    "inline.dk": ((64, 4, 2), (64, 4, 2)),
    "pola.state": ((64, 4, 3), (32, 4, 2)),
    "pola.spread": ((64, 4, 3), (64, 4, 3)),
    "pola.dq": ((32, 8, 2), (64, 4, 2)),
    "pola.dk": ((64, 4, 2), (64, 4, 2)),
    "mlla.state": ((64, 4, 2), (64, 4, 2)),
    "mlla.spread": ((64, 4, 2), (64, 4, 2)),
    # two tiles ahead are faster, and have no room in 99 KB where features are turned
    "mlla.dq": ((64, 4, 1), (64, 4, 1)),
    "mlla.dk": ((64, 4, 1), (64, 4, 1)),
    "agent.gather": ((64, 4, 3), (64, 4, 3)),
    "agent.spread": ((64, 4, 2), (64, 4, 2)),
    "agent.gather_gradient": ((64, 4, 1), (64, 4, 1)),
    "agent.spread_gradient": ((64, 4, 1), (64, 4, 1)),
    "soft.gather": ((64, 4, 3), (64, 4, 3)),
    "soft.spread": ((128, 4, 2), (128, 4, 2)),
    "soft.gather_gradient": ((64, 4, 2), (64, 4, 2)),
    "soft.spread_gradient": ((64, 4, 2), (64, 4, 2)),
}
PRODUCTS |= {f"elu.{name}": PRODUCTS[f"relu.{name}"] for name in ("state", "spread", "dq", "dk")}


MEASURED = 64
"""Channels of a head up to which tiles were measured."""

WARPS_OF_64_ROWS = 4
"""Of more, Triton lets several compute the same rows, and with 16 columns their sums were wrong on an H200."""

GENERATION = 9
"""Of GPUs that these are for: Ampere's compiler has not the registers for some of them."""

INTERPRETED = 9
"""What stands for the generation of a GPU where there is none."""


@lru_cache
def _generation(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def measured(kernel: str, tokens: Tensor) -> dict[str, int]:
    """What replaces a kernel's settings for tokens (b, h, n, d), where that is known."""
    if _generation_of(tokens) != GENERATION:
        return {}
    width, warps = tokens.shape[-1], {"num_warps": WARPS_OF_64_ROWS}
    if tokens.dtype == torch.float32:
        return {}
    if width > MEASURED:
        # what has 64 rows is a tile of agents or landmarks, whatever a head has
        return warps if kernel.startswith(("agent.", "soft.")) else {}
    if tokens.dtype == torch.float16:
        return warps
    return dict(zip(ABOUT, PRODUCTS[kernel][width <= 32], strict=True)) if kernel in PRODUCTS else {}


def may_idle(tokens: Tensor, trial: Mapping[str, int], default: Mapping[str, int]) -> bool:
    """Whether settings other than those that a kernel comes with may have more warps than there are rows.

    It can't be found out by trying: what such warps read may be nobody's, which ends the process.
    """
    if _generation_of(tokens) != GENERATION or tokens.dtype == torch.float32:
        return False
    if trial["num_warps"] <= WARPS_OF_64_ROWS:
        return False
    return trial["num_warps"] > default["num_warps"] or trial.get("BLOCK", 0) < default.get("BLOCK", 0)


def _generation_of(tokens: Tensor) -> int:
    return _generation(tokens.device) if tokens.is_cuda else INTERPRETED
