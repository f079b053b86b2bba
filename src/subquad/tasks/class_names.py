"""Names of classes: those of a network's outputs, and whether data have those of other data, or of a network."""

from collections.abc import Sequence

from subquad.errors import SubquadError


def check_classes(data: str, found: Sequence[str], known: Sequence[str], *, hint: str = "") -> None:
    """Raise where the classes `found` in `data` are not those `known` to a network, in the same order.

    `hint` says what to do where there are as many of them, so that they may be the same by other names.
    """
    if tuple(found) != tuple(known):
        told = hint if len(found) == len(known) and set(found) != set(known) else ""
        counts = f"{data} has {len(found)} classes, the model {len(known)}"
        raise SubquadError(f"{counts}, and they differ: {_difference(found, known)}{told}")


def numbered(count: int) -> tuple[str, ...]:
    """What classes are called of which only the number is known."""
    return tuple(f"class {number}" for number in range(count))


def check_same_classes(training: Sequence[str], validation: Sequence[str]) -> None:
    """Raise where the data to judge by has other classes than the data to train on, or has them in another order."""
    if tuple(training) != tuple(validation):
        differing = _difference(training, validation)
        raise SubquadError(f"training and validation data differ in their classes: {differing}")


def check_there_are_two(data: str, classes: Sequence[str]) -> None:
    """Raise where there is one class alone: a classifier of it is right from the start, and has learnt nothing."""
    if len(classes) < 2:
        raise SubquadError(
            f"{data} has one class alone, {classes[0]!r}: nothing is to be told apart; each class has its own folder"
        )


def all_named(classes: Sequence[str], outputs: int) -> list[str]:
    """A name for each output: a model may have more of them than its data had classes."""
    if outputs < len(classes):
        raise SubquadError(f"the model tells {outputs} classes apart, but {len(classes)} have names")
    return [*classes, *(f"class {place}" for place in range(len(classes), outputs))]


def _difference(some: Sequence[str], others: Sequence[str]) -> str:
    """What classes there are on one side alone, or that their order is another."""
    return ", ".join(sorted(set(some) ^ set(others))[:5]) or "another order"
