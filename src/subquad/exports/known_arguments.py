"""Networks that are called with several arguments, as programs of some of them: the others are constants of it.

So towers of networks of language are written, which are handed patches of images and how many of them each image has,
and networks of diffusion, which are told a time and a text.
"""

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from subquad.errors import SubquadError, reason_of, shown
from subquad.exports.changing_axes import axes_of
from subquad.inference import in_evaluation
from subquad.tracing import as_known


class WithArguments(nn.Module):
    """A network called with some tensors, in their order, all else that it takes being what it was given.

    Args:
        network: what is called; it stays as it is.
        given: arguments of a call by name.
        takes: the names of those that stay arguments, which may stand in a dictionary that is one of them; the first
            tensor of floats where none is said.
        answer: which of the network's answers it gives, by name; the first where none is said.

    Attributes:
        examples: the tensors that were given for those.
        axes: what each of them has of images.

    Raises:
        SubquadError: there is no such tensor, or no such answer.
    """

    def __init__(
        self,
        network: nn.Module,
        given: Mapping[str, Any],
        takes: Sequence[str] = (),
        answer: str | None = None,
    ) -> None:
        super().__init__()
        self.network, self.answer = network, answer
        self.takes = _taken(given, takes)
        places = places_of_tensors(given)
        self.places = [places[name] for name in self.takes]
        found = (tensor_at(given, place) for place in self.places)
        self.examples = tuple(one.detach() for one in found if one is not None)
        self.axes = axes_of(self.examples)
        self.known = {name: self._as_known(value, (name,)) for name, value in given.items()}
        with in_evaluation(network), torch.no_grad():
            # converted layers are told where tokens stand
            wanted = self._chosen(_answered(network, given))
            self.known |= _precomputed(network, given)
            found = self(*self.examples)
        if not torch.allclose(found, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max())):
            raise SubquadError(
                f"{type(network).__name__} answers otherwise with what transformers computes of these numbers in "
                "advance: of such sizes it can't be written"
            )

    @property
    def forward(self) -> Callable[..., Tensor]:  # type: ignore[override]
        """Of tensors like the examples, in their order; its arguments have their names, as inputs of a program have."""

        def named(*tensors: Tensor) -> Tensor:
            return self.of_tensors(*tensors)

        kind = Parameter.POSITIONAL_OR_KEYWORD
        vars(named)["__signature__"] = Signature([Parameter(name, kind) for name in self.takes])
        return named

    def of_tensors(self, *tensors: Tensor) -> Tensor:
        """What the network answers to these."""
        named = dict(self.known)
        for (outer, *inner), tensor in zip(self.places, tensors, strict=True):
            named[outer] = {**named[outer], inner[0]: tensor} if inner else tensor
        return self._chosen(self.network(**named))

    def _as_known(self, value: Any, place: tuple[str, ...]) -> Any:
        """A constant of the program; in the place of what it takes something that is replaced."""
        if isinstance(value, Mapping):
            return {name: self._as_known(one, (*place, name)) for name, one in value.items()}
        if not isinstance(value, Tensor):
            return value
        return None if place in self.places else as_known(value.detach())

    def _chosen(self, answered: Any) -> Tensor:
        """The tensor that is wanted of an answer: itself, the first of several, or that of a name."""
        if self.answer is not None:
            found = answered.get(self.answer) if isinstance(answered, Mapping) else None
        elif isinstance(answered, Tensor):
            return answered
        else:
            found = next(iter(answered.values() if isinstance(answered, Mapping) else answered), None)
        if isinstance(found, Tensor):
            return found
        names = (
            [name for name, one in answered.items() if isinstance(one, Tensor)] if isinstance(answered, Mapping) else []
        )
        raise SubquadError(
            f"{type(self.network).__name__} answers with {', '.join(names) or shown(type(answered).__name__)}, got "
            f"answer={shown(self.answer)}"
        )


def _answered(network: nn.Module, given: Mapping[str, Any]) -> Any:
    try:
        return network(**given)
    except SubquadError:
        raise
    except Exception as error:
        # some take whatever is named, and fail further in
        known = [name for name, one in signature(network.forward).parameters.items() if one.kind is not one.VAR_KEYWORD]
        wrong = [name for name in given if name not in known]
        hint = f"; {', '.join(wrong)} is none of its {', '.join(known)}" if wrong else ""
        raise SubquadError(
            f"{type(network).__name__} does not take what is given, {', '.join(given)}: {reason_of(error)}{hint}"
        ) from error


def check_alone(img_size: Any, batch: int) -> None:
    """Raise a SubquadError where a size or a number is said beside arguments, which have theirs."""
    if img_size is not None or batch != 1:
        raise SubquadError(
            "what is given has its size and number: leave img_size and batch out; dynamic lets others be taken"
        )


def in_dtype(given: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Arguments whose tensors of floats are of a dtype."""
    brought: dict[str, Any] = tree_map_only(
        Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, dict(given)
    )
    return brought


def places_of_tensors(given: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Where the tensors of a call are, by name: arguments, and what is in a dictionary that is one of them."""
    found = {name: (name,) for name, one in given.items() if isinstance(one, Tensor)}
    several = ((outer, inner) for outer, value in given.items() if isinstance(value, Mapping) for inner in value)
    within = {inner: (outer, inner) for outer, inner in several if isinstance(given[outer][inner], Tensor)}
    # an argument goes before what is called like it
    return found | {name: place for name, place in within.items() if name not in found}


def tensor_at(given: Mapping[str, Any], place: Sequence[str]) -> Tensor | None:
    """What stands at a place of a call, numbers as tensors; None where nothing does."""
    found: Any = given
    for name in place:
        found = None if found is None else found.get(name)
    return None if found is None else torch.as_tensor(found)


def _precomputed(network: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers itself would compute of known numbers in each call, by name, where it can be handed over."""
    if not type(network).__module__.startswith("transformers."):
        return {}
    try:
        from transformers.exporters.utils import precompute_export_inputs
    except ImportError:
        return {}
    filled = dict(given)
    precompute_export_inputs(network, filled)
    return {
        name: as_known(one) if isinstance(one, Tensor) else one for name, one in filled.items() if name not in given
    }


def _taken(given: Mapping[str, Any], takes: Sequence[str]) -> tuple[str, ...]:
    """The names of the arguments that stay arguments.

    Raises:
        SubquadError: one of them is no tensor or named twice, or there are none.
    """
    places = places_of_tensors(given)
    if wrong := [name for name in takes if name not in places]:
        named = ", ".join(given)
        raise SubquadError(f"what is taken are tensors of what is given, {named}, got {', '.join(map(str, wrong))}")
    if twice := [name for number, name in enumerate(takes) if name in takes[:number]]:
        raise SubquadError(f"what is taken is named once each, got {', '.join(twice)} again")
    found = tuple(takes) or next(((name,) for name, value in given.items() if _is_of_floats(value)), ())
    if not found:
        raise SubquadError(f"none of what is given is a tensor of floats: {', '.join(given) or 'nothing is'}")
    return found


def _is_of_floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
