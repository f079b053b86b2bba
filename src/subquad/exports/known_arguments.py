"""Networks that are called with more than one tensor, as programs of one: the other arguments are constants of it.

So towers of networks of language are written, which are handed patches of images and how many of them each image has:
for images of the sizes that they were given.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from subquad.errors import SubquadError, shown
from subquad.inference import in_evaluation
from subquad.tracing import as_known, as_plain


class WithArguments(nn.Module):
    """A network called with one tensor, all else that it takes being what it was given.

    Args:
        network: what is called; it stays as it is.
        given: arguments of a call by name. The first tensor of floats is what this module is called with.
        answer: which of the network's answers it gives, by name; the first where none is said.

    Attributes:
        example: that tensor.

    Raises:
        SubquadError: there is no such tensor, or no such answer.
    """

    def __init__(self, network: nn.Module, given: Mapping[str, Any], answer: str | None = None) -> None:
        super().__init__()
        self.network, self.answer = network, answer
        self.taken = next((name for name, value in given.items() if _is_of_floats(value)), "")
        if not self.taken:
            raise SubquadError(f"none of what is given is a tensor of floats: {', '.join(given) or 'nothing is'}")
        self.example: Tensor = given[self.taken]
        rest = {name: value for name, value in given.items() if name != self.taken}
        self.known = {name: as_known(one) if isinstance(one, Tensor) else one for name, one in rest.items()}
        with in_evaluation(network), torch.no_grad():
            # converted layers are told where tokens stand
            answered = network(**given)
            self.known |= _precomputed(network, dict(given))
        self._check(answered)
        with in_evaluation(network), torch.no_grad():
            wanted = self._chosen(answered)
            if not torch.allclose(self(self.example), wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max())):
                raise SubquadError(
                    f"{type(network).__name__} answers otherwise with what transformers computes of these numbers in "
                    "advance: of such sizes it can't be written"
                )

    def forward(self, x: Tensor) -> Tensor:
        """Of a tensor like the example."""
        return self._chosen(self.network(**{self.taken: x}, **self.known))

    def _chosen(self, answered: Any) -> Tensor:
        if isinstance(answered, Tensor):
            return answered
        found: Tensor = next(iter(answered.values())) if self.answer is None else answered[self.answer]
        return found

    def _check(self, answered: Any) -> None:
        if isinstance(answered, Tensor) and self.answer is None:
            return
        names = [name for name, one in answered.items() if isinstance(one, Tensor)] if _has_names(answered) else []
        if not names or self.answer not in (None, *names):
            raise SubquadError(
                f"{type(self.network).__name__} answers with {', '.join(names) or shown(type(answered).__name__)}, got "
                f"answer={shown(self.answer)}"
            )


def check_alone(img_size: Any, dynamic: Any) -> None:
    """Raise a SubquadError where a size is said beside arguments, which have theirs, or may change."""
    if img_size is not None or dynamic:
        raise SubquadError("what is given has its sizes, and no others can be taken: leave img_size and dynamic out")


def in_dtype(given: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Arguments whose tensors of floats are of a dtype."""
    return {name: one.to(dtype) if _is_of_floats(one) else one for name, one in given.items()}


def _precomputed(network: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """What transformers itself would compute of known numbers in each call, by name, where it can be handed over."""
    try:
        from transformers.exporters.utils import precompute_export_inputs
    except ImportError:
        return {}
    before = set(given)
    precompute_export_inputs(network, given)
    return {
        name: as_known(as_plain(one)) if isinstance(one, Tensor) else one
        for name, one in given.items()
        if name not in before
    }


def _is_of_floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _has_names(answered: Any) -> bool:
    return isinstance(answered, Mapping)
