"""The best states of a network on the way of a fit, by what was measured on images that it is not trained on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Part:
    """Parameters that are fitted, and judged, together.

    Attributes:
        parameters: whose gradients are clipped together.
        figures: names of what measures them, whose sum is to be low; all that is measured if None.
    """

    parameters: Sequence[nn.Parameter]
    figures: tuple[str, ...] | None = None

    def of(self, figures: Mapping[str, float]) -> dict[str, float]:
        """The figures of this part."""
        return {name: figure for name, figure in figures.items() if self.figures is None or name in self.figures}


class BestStates:
    """The parameters of each part when its figures were lowest: a second copy of what is trained."""

    def __init__(self, parts: Sequence[Part]):
        self.parts = parts
        self._figures: list[dict[str, float]] = [{} for _ in parts]
        self._tensors: list[list[Tensor]] = [[] for _ in parts]

    @property
    def figures(self) -> dict[str, float]:
        """Those of the states that are kept, of all parts together."""
        return {name: figure for own in self._figures for name, figure in own.items()}

    @torch.no_grad()
    def note(self, figures: Mapping[str, float]) -> None:
        """Keep the parts that have never been as good; of equally good ones the first."""
        for place, part in enumerate(self.parts):
            own = part.of(figures)
            if not self._tensors[place] or _total(own) < _total(self._figures[place]):
                self._figures[place] = own
                self._tensors[place] = [parameter.detach().clone() for parameter in part.parameters]

    @torch.no_grad()
    def put_back(self) -> None:
        """Set each part to what is kept of it."""
        for part, tensors in zip(self.parts, self._tensors, strict=True):
            for parameter, tensor in zip(part.parameters, tensors, strict=True):
                parameter.copy_(tensor)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` reads."""
        return {"figures": self._figures, "tensors": self._tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what was kept before, of the same parts.

        Raises:
            ValueError: it is of other parts.
        """
        for part, tensors in zip(self.parts, state["tensors"], strict=True):
            if [parameter.shape for parameter in part.parameters] != [tensor.shape for tensor in tensors]:
                raise ValueError("the best states are those of other parameters")
        self._figures, self._tensors = list(state["figures"]), list(state["tensors"])


def _total(figures: Mapping[str, float]) -> float:
    """The sum, which nothing is above where one of them is no number."""
    total = math.fsum(figures.values())
    return total if math.isfinite(total) else math.inf
