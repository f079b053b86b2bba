"""Networks from their files alone: made by the note in the file, which a stranger may have written.

A network is sketched first, without memory, and its entries are compared with those of the file; only one that fits is
made. So a note cannot ask for more than the file holds.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from subquad.errors import SubquadError, naming
from subquad.models.create import create_model
from subquad.models.networks import NETWORKS
from subquad.models.variants import VARIANTS
from subquad.ranges import Positive, checks_arguments, fits
from subquad.text import one_line
from subquad.weights.files import BEST, STATE, fitted, read_weights, weight_file
from subquad.weights.fitting import check_tables
from subquad.weights.notes import as_built, creation_of

SPARE_PARAMETERS = 1000
"""That a constructor may make and drop again: heads of detectors, what a pyramid does not need."""

MOST_SPARE = 2**22
"""Numbers that a network may have before it is converted and not behind it, as tables of relative positions."""

Network = TypeVar("Network", bound=nn.Module)


@checks_arguments
def restore_model(path: Path | str) -> tuple[nn.Module, dict[str, Any]]:
    """The classifier of images that `save_weights` wrote to `path`, a file or a run folder, and its note."""
    return restore(path, "classify", create_model)


def restore(path: Path | str, task: str, build: Callable[..., Network]) -> tuple[Network, dict[str, Any]]:
    """The network for `task` that `save_weights` wrote to `path`, a file or a run folder, and its note.

    Args:
        path: of the file, or of a run folder, whose best weights are taken.
        task: a command's name, "classify" for classifiers of images.
        build: makes a network of the arguments that its `creation` holds.

    Raises:
        SubquadError: if the file holds no such network, or its note and its weights do not belong together.
    """
    path = weight_file(path)
    state, note = read_weights(path)
    if path.name == STATE and not note:
        raise SubquadError(f"{path} is what a run goes on from: name its folder, {path.parent}, or {BEST} in it")
    with naming(path):
        creation = _in_one_stage(creation_of(note, task, len(state)))
        sketch = _sketched(build, creation, len(state))
        _check_classes(note, sketch)
        first = _sketched(build, as_built(creation), len(state))
    adapted = fitted(state, sketch, path)
    with naming(path):
        check_tables(adapted, sketch, first)
        network = _built(build, creation)
    network.load_state_dict(fitted(state, network, path).state)
    return network, note


def made_beside(
    state: Mapping[str, Tensor], note: Mapping[str, Any], task: str, build: Callable[..., Network]
) -> Network:
    """The network of a note with weights that mean nothing, for weights that are nearly its own, as a conversion's.

    Args:
        state: what lies beside the note: a network of far more than this is not made.
        note: of `parse_note`.
        task: a command's name.
        build: makes a network of the arguments that its `creation` holds.

    Raises:
        SubquadError: its note makes no network, or a far larger one.
    """
    creation = _in_one_stage(creation_of(note, task, len(state)))
    sketch, first = (_sketched(build, arguments, len(state)) for arguments in (creation, as_built(creation)))
    _check_classes(note, sketch)
    there = sum(map(Tensor.numel, state.values()))
    wanted = max(sum(map(Tensor.numel, one.state_dict().values())) for one in (sketch, first))
    if wanted > 2 * there + MOST_SPARE:
        raise SubquadError(f"its note makes a network of {wanted} numbers, and the file has {there}")
    return _built(build, creation)


def _in_one_stage(creation: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a note, in which earlier versions might write the one stage of a plain network as several."""
    made = {key: _in_one_stage(value) if isinstance(value, dict) else value for key, value in creation.items()}
    name, depths = made.get("name"), made.get("depths")
    network = NETWORKS.get(name) if isinstance(name, str) else None
    variant = VARIANTS.get(network.variant if network else name) if isinstance(name, str) else None
    plain = variant is not None and len(variant.depths) == 1
    return made | {"depths": [sum(depths)]} if plain and fits(depths, list[Positive]) and depths else made


def _sketched(build: Callable[..., Network], creation: dict[str, Any], entries: int) -> Network:
    """The network without memory, if it has not many more parameters than a file of so many entries."""
    with _limited(2 * entries + SPARE_PARAMETERS), torch.device("meta"), warnings.catch_warnings():
        # what is odd about a network that does not fit is of no interest, the network itself says it again
        warnings.simplefilter("ignore")
        return _built(build, creation)


def _built(build: Callable[..., Network], creation: dict[str, Any]) -> Network:
    try:
        return build(**creation)
    except SubquadError as error:
        raise SubquadError(f"its note makes no network: {one_line(error, 400)}") from None
    except Exception as error:
        # a constructor can fail in any way at arguments that nobody has written
        raise SubquadError(f"its note makes no network: {type(error).__name__}: {one_line(error)}") from None


@contextmanager
def _limited(most: int) -> Iterator[None]:
    """Give up a network that has more parameters than `most`, while it is made."""
    left = most

    def count(module: nn.Module, name: str, parameter: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise SubquadError(f"a network of more than {most} parameters, and the file has fewer")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _check_classes(note: Mapping[str, Any], network: Any) -> None:
    """Raise where a note names more classes than its network tells apart; a head may have spare ones."""
    outputs = (getattr(network, "creation", None) or {}).get("num_classes", getattr(network, "num_classes", None))
    if outputs is None and not note.get("classes"):
        # some tasks know no classes
        return
    if type(outputs) is not int:
        raise SubquadError("its note says a number of classes that is no whole number")
    if note.get("classes") is not None and len(note["classes"]) > outputs:
        raise SubquadError(f"its note names {len(note['classes'])} classes, and the network has {outputs}")
