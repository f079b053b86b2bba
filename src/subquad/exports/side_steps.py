"""Networks that take images whose sides are multiples of some number alone, as decoders that halve and double maps do.

They say so by what they raise: sides are tried.
"""

import torch
from torch import nn

from subquad.errors import SubquadError
from subquad.exports.checking import answer_of, multiples_from

STEPS = (2, 4, 7, 8, 14, 16, 28, 32, 48, 56, 64, 112, 128, 256)
"""Of pixels, in the order in which they are tried: halves, patches, several patches, windows of them."""


def step_of_sides(model: nn.Module, channels: int, dtype: torch.dtype, sides: tuple[int, int]) -> int:
    """The number of which the sides of all images are multiples that a network takes, from images of these sides on.

    Raises:
        SubquadError: it takes none of these sides and none like them, by what the network says of the first.
    """
    refusal = None
    for step in (1, *STEPS):
        height, width = multiples_from(sides, step)
        try:
            answer_of(model, torch.zeros(1, channels, height, width, dtype=dtype))
        except SubquadError as error:
            refusal = refusal or error
        else:
            return step
    assert refusal is not None
    raise refusal
