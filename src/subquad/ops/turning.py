"""A rotation of tokens in front of a mechanism: rotary positions, see `subquad.rope`."""

from torch import Tensor

from subquad import kernels
from subquad.rope import Rotation
from subquad.tracing import is_exporting


def turned_tokens(rotation: Rotation, tokens: Tensor) -> Tensor:
    """Queries or keys (b, h, n, d) as `rotation.turn` turns them, by a kernel where one can."""
    cos, sin, interleaved = rotation
    # features of several times the width, and what does not fit, are the formula's
    if is_exporting() or cos.ndim not in (2, 3) or cos.shape != tokens.shape[-cos.ndim :]:
        return rotation.turn(tokens)
    return kernels.compute(kernels.turned, _formula, (tokens, cos, sin), (interleaved,), optional=True)


def _formula(tokens: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return Rotation(cos, sin, interleaved).turn(tokens)
