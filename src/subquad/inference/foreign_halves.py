"""The first half of other libraries' blocks in few steps: what it asks of an attention layer, its own or converted.

A library's file (`timm_blocks.py`, …) says what its softmax attention computes between its projections. A converted
layer says so itself.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, cast

from torch import Tensor, nn

from subquad.grid import TokenGrid
from subquad.inference.halves import does_more, drops_no_branch, drops_nothing, first_half, is_norm
from subquad.inference.rotations import replayed_turning
from subquad.inference.windowed_halves import half_in_windows
from subquad.models.layers import is_linear
from subquad.models.windows import Windows
from subquad.rope import Rotation

DROPPED_BY = "attn_drop", "proj_drop"
"""What drops weights and answers of an attention layer in training, in timm's."""


def has_usual_scale(scale: Any, width: int) -> bool:
    """Whether scores of heads of so many channels are divided by their root, as they are where nothing is said."""
    return scale is None or (isinstance(scale, int | float) and math.isclose(scale * math.sqrt(width), 1, rel_tol=1e-5))


class InFewSteps:
    """Marks a class of blocks that computes what the one behind it does, and may be converted as that one may."""


class KnowsFewSteps:
    """A block that itself is of few steps in evaluation, where `optimize` says that they are wanted."""

    wants_few_steps: bool = False


class Between(Protocol):
    """What an attention layer computes between its projections.

    Attributes:
        projected_by: names of the layers that project tokens, one to queries, keys and values or three; none where that
            is not all that is done.
        answered_by: the name of the layer behind it.
        reads_tokens: whether what lies between reads the layer's tokens, and not only how many there are.
    """

    @property
    def projected_by(self) -> tuple[str, ...]: ...

    @property
    def answered_by(self) -> str: ...

    @property
    def reads_tokens(self) -> bool: ...

    def grid_under(self, x: Tensor) -> TokenGrid | None:
        """Where these tokens (b, n, c) stand, if what lies between asks for it."""

    def between(self, projected: Sequence[Tensor], x: Tensor, positions: Any = None) -> Tensor:
        """(b, n, m) of what is projected, of tokens x (b, n, c), and of a rotation, or where a map's tokens stand."""


class Turning(Between, Protocol):
    """The same where a library hands over rotary positions."""

    def rotation_of(self, x: Tensor, positions: Any) -> Rotation:
        """These as a rotation of tokens (b, n, c)."""


def converted(attn: nn.Module) -> Between | None:
    """An attention layer that says itself what it computes between its projections, or None."""
    return cast(Between, attn) if hasattr(type(attn), "between") else None


def first_half_of(
    block: nn.Module,
    x: Tensor,
    norm: nn.Module,
    attn: Any,
    mixing: Between | None,
    scale: Tensor | None,
    positions: Any = None,
    windows: Windows | None = None,
) -> Tensor | None:
    """Tokens x (b, n, c) behind the first half of a block; None where it is more than that, or would take longer.

    `mixing` says what the layer `attn` computes, None that nobody knows. Within `windows` it has, instead of positions,
    the pairs that must not attend.
    """
    if mixing is None or not mixing.projected_by:
        return None
    layers = [attn.get_submodule(name) for name in mixing.projected_by]
    proj = attn.get_submodule(mixing.answered_by)
    # what others make of a projection, low-rank changes for instance, has a class of its own
    plain = all(is_linear(layer) for layer in (*layers, proj)) and is_norm(norm)
    # what stands for a layer calls none of its parts; a converted one calls them itself
    parts = (attn, *layers, proj) if mixing is attn else attn.modules()
    plain = plain and drops_no_branch(block) and drops_nothing(*(getattr(attn, name, None) for name in DROPPED_BY))
    if not plain or any(map(does_more, (norm, *parts))):
        return None
    weights = [(layer.weight, layer.bias) for layer in layers]
    keeps = mixing.reads_tokens

    def between(projected: list[Tensor], tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return mixing.between(projected, tokens, positions if windows is None else mask)

    if windows is not None:
        return half_in_windows(block, x, windows, norm, weights, between, proj, scale, keeps=keeps)
    return first_half(block, x, norm, weights, between, proj, scale, keeps=keeps)


def replayed_where_it_stands(
    block: nn.Module,
    mixing: Between | None,
    x: Tensor,
    rotation: Rotation | None,
    steps: Callable[[Tensor, Any], Tensor],
    settings: Hashable = None,
) -> Tensor:
    """A block's `steps(x, rotation)` of tokens x (b, n, c), by a tape where kernels do all of it.

    `mixing` is that of its attention layer. Of some rows of an image there is no tape.
    """
    grid = None if mixing is None else mixing.grid_under(x)
    if grid is not None and grid.whole is not grid:
        return steps(x.contiguous(), rotation)
    return replayed_turning(block, steps, x.contiguous(), rotation, settings=(grid, settings))


def three(projected: Sequence[Tensor]) -> Sequence[Tensor]:
    """Queries, keys and values (b, n, h·d), of one projection (b, n, 3·h·d) or of three."""
    return projected[0].chunk(3, dim=-1) if len(projected) == 1 else projected


def is_asked_for(*settings: Any) -> bool:
    """Whether a block is called with more than tokens: a mask, or that attention is causal."""
    return any(one is not None and one is not False for one in settings)
