"""Networks that answer with several things by name, as transformers' do, as networks of one of them."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from subquad.errors import SubquadError, shown
from subquad.kernels import use_backend
from subquad.tasks.transformers_network import NetworkOfTransformers, told_of_any_size

USUAL = "logits"
"""What is written where nothing is said."""


class NamedAnswer(nn.Module):
    """A network that gives one of another one's answers.

    Args:
        network: what is called.
        name: of the answer.
    """

    def __init__(self, network: nn.Module, name: str) -> None:
        super().__init__()
        self.network, self.name, self.told = network, name, told_of_any_size(network)

    def forward(self, images: Tensor) -> Tensor:
        answer: Tensor = self.network(images, **self.told)[self.name]
        return answer


def with_one_answer(model: nn.Module, tried: Iterable[Tensor], name: str | None) -> nn.Module:
    """A network that gives one tensor, `name` of those that `model` gives, its logits or its only one if none is said.

    Args:
        model: what is called.
        tried: images of which it takes some; where it takes none it stays as it is, and is told of elsewhere.
        name: of its answer.

    Raises:
        SubquadError: it gives no such tensor, or several and no logits.
    """
    if name is not None and isinstance(model, NetworkOfTransformers):
        # which gives one of them
        model = model.network
    answered = next((answer for images in tried if (answer := _answered(model, images)) is not None), None)
    if not isinstance(answered, Mapping):
        if name is not None and answered is not None:
            raise SubquadError(f"answer={shown(name)} is of networks that give several by name, and this one does not")
        return model
    names = [one for one, value in answered.items() if isinstance(value, Tensor)]
    chosen = name or (USUAL if USUAL in names else names[0] if len(names) == 1 else None)
    if chosen is None or chosen not in names:
        got = "" if name is None else f", got {shown(name)}"
        raise SubquadError(
            f"the network gives {', '.join(names) or 'no tensor'} by name, and one is written: say answer=…{got}"
        )
    return NamedAnswer(model, chosen)


def _answered(model: nn.Module, images: Tensor) -> Any:
    """What a network gives for images; None where it does not take them."""
    try:
        with torch.no_grad(), use_backend("eager"):
            return model(images, **told_of_any_size(model))
    except Exception:
        return None
