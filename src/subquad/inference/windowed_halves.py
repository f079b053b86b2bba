"""The first half of a block of windows in few steps: windows are there what images are elsewhere."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from subquad.inference.halves import Weights, first_half
from subquad.kernels import multipliers
from subquad.models.windows import Windows


def half_in_windows(
    block: nn.Module,
    x: Tensor,
    windows: Windows,
    norm: Any,
    projections: Sequence[Weights],
    between: Callable[[list[Tensor], Tensor, Tensor | None], Tensor],
    proj: Any,
    scale: Tensor | None,
    *,
    keeps: bool,
) -> Tensor | None:
    """Give what `first_half` does where tokens x (b, n, c) of a map attend within `windows`.

    `between` is called with what the tokens of all windows are projected to, with these, and with the pairs that must
    not attend (b·r·l, 1, n, n), or None. Windows are cut in between, so that such a block is never one call: in fp32
    few steps are faster only where PyTorch's products lag, and it gives None elsewhere.
    """
    if x.dtype != torch.bfloat16 and not multipliers.products_lag():
        return None
    mask = windows.mask(x.shape[0], x.device)

    def inside(projected: list[Tensor], tokens: Tensor) -> Tensor:
        # maps are filled up behind the norm: what is projected of these zeros is the biases
        filled = [windows.fill(part, bias) for part, (_, bias) in zip(projected, projections, strict=True)]
        return between(filled, windows.fill(tokens, None) if keeps else tokens, mask)

    tokens = windows.gather(x.unflatten(1, windows.grid.shape))
    y = first_half(block, tokens, norm, projections, inside, proj, scale, keeps=keeps)
    return None if y is None else windows.scatter(y).flatten(1, 2)
