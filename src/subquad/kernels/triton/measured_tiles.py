"""Tiles that were fastest of those tried on an H200, which bf16 has on Hopper GPUs for heads of up to 64 channels.

Tokens of a tile, warps of a program, tiles that are read ahead: of heads of 64 channels (64 images of 1,024 tokens, 3
heads), and of up to 32 (16 images of 3,136 tokens, 12 heads; MLLA's and softmax-free attention's were measured at 64
only). docs/gpu/first-h200.md has what they take, scripts/gpu_tiles.py what measures it. A choice of `subquad tune`
stands before them.
"""

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


GENERATION = 9
"""Of GPUs that these are for: Ampere's compiler has not the registers for some of them."""

INTERPRETED = 9
"""What stands for the generation of a GPU where there is none."""


@lru_cache
def _generation(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def measured(kernel: str, tokens: Tensor) -> dict[str, int]:
    """What replaces a kernel's settings for tokens (b, h, n, d), where that is known."""
    narrow = tokens.shape[-1] <= 64
    if (_generation(tokens.device) if tokens.is_cuda else INTERPRETED) != GENERATION:
        return {}
    of_few = kernel.startswith(("agent.", "soft."))
    if tokens.dtype != torch.float32 and (of_few if not narrow else tokens.dtype == torch.float16):
        # four warps multiply 64 rows, of tokens or of the few. Of eight, Triton lets two compute the same rows of fp32
        # numbers, and with 16 columns their sums were wrong on an H200
        return {"num_warps": 4}
    if tokens.dtype != torch.bfloat16 or not narrow or kernel not in PRODUCTS:
        return {}
    return dict(zip(ABOUT, PRODUCTS[kernel][tokens.shape[-1] <= 32], strict=True))
