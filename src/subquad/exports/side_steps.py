"""Networks that take images whose sides are multiples of some number alone, as decoders that halve and double maps do.

They say so by what they raise: sides are tried.
"""

import torch
from torch import nn

from subquad.errors import SubquadError
from subquad.exports.checking import answer_of, other_sides

STEPS = (2, 4, 7, 8, 14, 16, 28, 32, 48, 56, 64, 112, 128, 256)
"""Of pixels, in the order in which they are tried: halves, patches, several patches, windows of them."""


def step_of_sides(model: nn.Module, channels: int, dtype: torch.dtype, least: int) -> tuple[int, int]:
    """The number of which the sides of all images are multiples that a network takes, and the least of these.

    Args:
        model: in evaluation mode.
        channels: of its images.
        dtype: of its images.
        least: pixels of the shortest side that it could take.

    Raises:
        SubquadError: it takes images of none of the sides that are tried, by what it says of the first.
    """
    refusal = None
    for step in (1, *STEPS):
        smallest = step * -(-least // step)
        try:
            answer_of(model, torch.zeros(1, channels, *other_sides(smallest, step), dtype=dtype))
        except SubquadError as error:
            refusal = refusal or error
        else:
            return step, smallest
    assert refusal is not None
    raise refusal
