"""Which part of a network's products attention takes between its projections, counted: any host, windows, pyramids.

A pass is made without memory and without numbers, where a network can do without, of the network as it is and of the
same one with layers that mix nothing; what a layer takes less then is its mixing. What is no product (softmax, norms,
memory) is not counted.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from subquad.conversion.tower import Tower
from subquad.kernels import use_backend
from subquad.models.stated_inputs import image_channels


@dataclass(frozen=True)
class Counted:
    """Shares of all products of a pass over one image.

    Attributes:
        stages: of the mixing in each stage's layers that would be converted.
    """

    stages: tuple[float, ...]

    @property
    def share(self) -> float:
        """Of all of this mixing."""
        return sum(self.stages)

    @property
    def ceiling(self) -> float:
        """How many times as fast the network would be without it, if time were products alone."""
        return 1 / (1 - self.share)

    @property
    def text(self) -> str:
        """What attention takes, and what could be gained, in two lines for a terminal."""
        of_stages = ""
        if len(self.stages) > 1:
            of_stages = f"; of stages {', '.join(f'{stage:.1%}' for stage in self.stages)}"
        takes = f"of all products {self.share:.1%} are attention's own"
        if self.share < 0:
            takes = f"converted layers would take {-self.share:.1%} more of all products than those with few keys do"
        return f"{takes}:\n  at most {self.ceiling:.2f} times as fast{of_stages}"


def count_mixing(model: nn.Module, without: nn.Module, tower: Tower, px: tuple[int, int]) -> Counted:
    """Count the products of a network, and of the same one without mixing.

    Args:
        model: as it is.
        without: with layers that mix nothing.
        tower: of the network, for such images; layers that are the same in both count as nothing.
        px: (height, width) of the image.
    """
    stages = tower.paths_by_stage
    paths = [path for stage in stages for path in stage]
    try:
        (total, whole), (_, left) = (_products(one, paths, px, "meta") for one in (model, without))
    except Exception:
        # some ask for numbers: where patches stand, or whether queries are masked
        if max(layer.grid.num_tokens for layer in tower.layers) > MOST_TOKENS:
            raise
        (total, whole), (_, left) = (_products(one, paths, px, "cpu") for one in (model, without))
    return Counted(tuple(sum(whole[path] - left[path] for path in stage) / total for stage in stages))


MOST_TOKENS = 4096
"""With numbers, all pairs of more take gigabytes in each head."""


def _products(model: nn.Module, paths: Sequence[str], px: tuple[int, int], device: str) -> tuple[int, dict[str, int]]:
    """Of a pass over one image: all, and those in some modules; without numbers on the device meta."""
    sketched = deepcopy(model).to(device).requires_grad_(False)
    inside = dict.fromkeys(paths, 0)
    counter = FlopCounterMode(display=False)

    def add(path: str, sign: int) -> Any:
        def hook(*call: Any) -> None:
            inside[path] += sign * counter.get_total_flops()

        return hook

    for path in paths:
        sketched.get_submodule(path).register_forward_pre_hook(add(path, -1))
        sketched.get_submodule(path).register_forward_hook(add(path, 1))
    dtype = next(model.parameters()).dtype
    # all attention as plain products, which the counter knows
    with torch.no_grad(), use_backend("eager"), sdpa_kernel(SDPBackend.MATH), counter:
        sketched(torch.zeros(1, image_channels(model), *px, dtype=dtype, device=device))
    return counter.get_total_flops(), inside
