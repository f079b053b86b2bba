"""A dense network that starts from another run's head as well as from its backbone, to be trained further."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from subquad.errors import SubquadError
from subquad.models.pretrained import source_of
from subquad.tasks.class_names import check_classes
from subquad.tasks.conventions import OWN
from subquad.weights.files import read_weights, weight_file

WITHIN = "pyramid.backbone."
"""What stands in the names of a backbone's entries, whose weights `build_backbone` takes."""


def take_head(model: nn.Module, recipe: Any, classes: Sequence[str]) -> None:
    """Give a fresh dense network all that `recipe.initial_checkpoint` has beside the backbone.

    Raises:
        SubquadError: there is none, or it is of another head, other conventions, widths or classes.
    """
    if recipe.initial_checkpoint is None:
        raise SubquadError("initial_head takes the head of initial_checkpoint, and none is given")
    file = weight_file(str(source_of(recipe.initial_checkpoint)))
    state, note = read_weights(file)
    made: dict[str, Any] = note.get("creation") or {}
    if "backbone" not in made:
        raise SubquadError(f"{file} is of a network without a dense head: leave initial_head out")
    for name, asked, held in (
        ("head", recipe.head, made.get("head")),
        ("conventions", recipe.conventions, made.get("conventions", OWN)),
    ):
        if asked != held:
            raise SubquadError(f"{file} has {name} {held}, and {asked} is asked for: leave initial_head out")
    check_classes(recipe.data, classes, note.get("classes") or ())
    own = {name: tensor for name, tensor in model.state_dict().items() if WITHIN not in name}
    for name, tensor in own.items():
        found = tuple(state[name].shape) if name in state else None
        if found != tuple(tensor.shape):
            has = "does not have it" if found is None else f"has {found}"
            raise SubquadError(f"{name} is {tuple(tensor.shape)} here, and {file} {has}: leave initial_head out")
    model.load_state_dict({name: state[name] for name in own}, strict=False)
