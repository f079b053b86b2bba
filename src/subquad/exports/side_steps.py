"""Networks that take images whose sides are multiples of some number alone, as decoders that halve and double maps do.

They say so by what they raise: sides are tried.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from subquad.errors import SubquadError
from subquad.exports.checking import other_sides

STEPS = (1, 2, 4, 7, 8, 14, 16, 28, 32, 48, 56, 64, 112, 128, 256)
"""Of pixels, in the order in which they are tried: halves, patches, several patches, windows of them."""


def step_of_sides(
    model: nn.Module,
    run: Callable[[tuple[int, int]], Any],
    least: int,
    other: Callable[[int, int], tuple[int, int]] = other_sides,
) -> tuple[int, int]:
    """The number of which the sides of all images are multiples that a network takes, and the least of these.

    Args:
        model: in evaluation mode.
        run: runs it on images of this height and width, and raises a SubquadError where it takes no such.
        least: pixels of the shortest side that it could take.
        other: sides to try, of the least one and the number of which they are multiples.

    Raises:
        SubquadError: it takes images of none of the sides that are tried, by what it says of the first.
    """
    refusal = None
    coarsest = _said_by_unets(model)
    for step in (step for step in STEPS if step % coarsest == 0):
        # a coarsest map of more than one place
        smallest = step * max(-(-least // step), 1 if coarsest == 1 else 2)
        try:
            run(other(smallest, step))
        except SubquadError as error:
            refusal = refusal or error
        else:
            return step, smallest
    assert refusal is not None
    raise refusal


MOST_TRIED = 16
"""Sides, one step longer each."""


def least_taken(run: Callable[[tuple[int, int]], Any], least: int, step: int) -> int:
    """The first side, from `least` on in steps, of which a square is taken; `least` where none of some is."""
    for side in range(least, least + MOST_TRIED * step, step):
        try:
            run((side, side))
        except SubquadError:
            continue
        return side
    return least


def _said_by_unets(model: nn.Module) -> int:
    """Of diffusers' U-Nets, pixels between places of the coarsest map.

    They take other sides, too, by a branch that no program has.
    """
    doubled = (times for part in model.modules() if isinstance(times := getattr(part, "num_upsamplers", None), int))
    return int(2 ** max(doubled, default=0))
