"""Making a state dict fit a model: under its names, its tables at its size; and saying what does not fit."""

from dataclasses import dataclass, field

from torch import Tensor, nn

from subquad.errors import SubquadError
from subquad.models.released import family_of, to_our_layout
from subquad.positions import GridTable


@dataclass
class Adapted:
    """A state dict made ready for a model.

    Attributes:
        state: under the model's names.
        family: whose layout it had; None for ours.
        resized: entries that were resampled to the model's size.
    """

    state: dict[str, Tensor]
    family: str | None = None
    resized: list[str] = field(default_factory=list)


def adapt(state: dict[str, Tensor], model: nn.Module) -> Adapted:
    """Bring a state dict, in our layout or a released one, to the names and table sizes of `model`."""
    own = {name: tensor.shape for name, tensor in model.state_dict().items()}
    family = None if own.keys() & state.keys() - HEADS else family_of(state)
    if family is not None:
        if family != getattr(model, "layout", family):
            raise SubquadError(f"these are weights of a {family} network, and the model is a {model.layout}")
        state = to_our_layout(state, family, own)
        # released PVTs of PolaFormer carry a final norm that nothing calls
        if family == "pvt" and "norm.weight" not in own:
            state = {name: tensor for name, tensor in state.items() if name not in ("norm.weight", "norm.bias")}
    adapted = Adapted(dict(state), family)
    # counters that released files may lack, and that nothing reads
    adapted.state |= {
        name: tensor for name, tensor in model.state_dict().items() if name.endswith(COUNTER) and name not in state
    }
    for name in own.keys() & state.keys():
        if own[name] == state[name].shape:
            continue
        owner, _, parameter = name.rpartition(".")
        table = model.get_submodule(owner)
        if isinstance(table, GridTable):
            resampled = table.fitted(parameter, state[name])
            if resampled.shape == own[name]:
                adapted.state[name] = resampled
                adapted.resized.append(name)
    return adapted


HEADS = frozenset({"head.weight", "head.bias", "norm.weight", "norm.bias"})
"""Entries that are named alike in all layouts."""

COUNTER = ".num_batches_tracked"


def misfits(state: dict[str, Tensor], own: dict[str, Tensor]) -> str:
    """What keeps `state` from being loaded where `own` is, in words; empty if nothing does."""
    missing = sorted(own.keys() - state.keys())
    unexpected = sorted(state.keys() - own.keys())
    shapes = sorted(
        f"{name} is {tuple(state[name].shape)}, the model's {tuple(own[name].shape)}"
        for name in own.keys() & state.keys()
        if own[name].shape != state[name].shape
    )
    return "; ".join(
        f"{len(names)} {what} ({_some(names)})"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
        if names
    )


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")
