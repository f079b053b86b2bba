"""Where tokens stand behind a convolution of patches, or a chain that begins with einops' cut, of images or volumes.

Vit-pytorch's networks and MONAI's cut patches so. The maps of a volume are one map, each below the one before it, as
those of a film (`film_recorder.py`). Most of these networks do not say which images they are made for, while they have
a position for each patch: where these are as many as a square or a cube has, it is taken for one.

Letters: b batch, c channels.
"""

import re
from math import prod
from typing import Any, ClassVar

from torch import Tensor, nn

from subquad.conversion.grid_recorder import REPLACED, GridRecorder, is_called
from subquad.errors import SubquadError
from subquad.grid import TokenGrid

_CUT = re.compile(r"\((\w+) (\w+)\)")
_POSITIONS = ("pos_embedding", "position_embeddings", "pos_embed", "position_embedding", "positional_embedding")


class PatchesRecorder(GridRecorder):
    """Listens to what cuts patches, in front of it: images (b, c, height, width), or volumes with one axis more."""

    in_front: ClassVar[bool] = True

    @classmethod
    def hears(cls, module: nn.Module) -> bool:
        return max(patch_of(module), default=1) > 1

    @classmethod
    def most_sides(cls, embedding: nn.Module) -> int:
        return len(patch_of(embedding))

    @classmethod
    def map_from(cls, embedding: Any, size: Any) -> tuple[int, int]:
        """Rows, of all maps of a volume, and columns, of an image of this (height, width) or a volume.

        Of a volume of which only height and width are said, that is one patch deep.

        Raises:
            SubquadError: it is smaller than a patch.
        """
        patch = patch_of(embedding)
        size = (*patch[: len(patch) - len(size)], *size)
        places = [length // side for length, side in zip(size, patch, strict=True)]
        if min(places) < 1:
            raise SubquadError(f"images of {_times(size)} px hold no patch of {_times(patch)}")
        return prod(places[:-1]), places[-1]

    @classmethod
    def size_of(cls, network: nn.Module, embedding: nn.Module) -> tuple[int, ...] | None:
        """The sides of the square or cube that has as many patches as there are positions; None where none has."""
        patch, named = patch_of(embedding), ((one, name) for one in network.modules() for name in _POSITIONS)
        holder, name = next((pair for pair in named if isinstance(getattr(*pair, None), Tensor)), (None, ""))
        if holder is None:
            return None
        count, tokens = getattr(holder, name).shape[-2], getattr(holder, "cls_token", None)
        if tokens is not None:
            # whose positions stand with those of the patches where the token does
            count -= tokens.flatten(0, -2).shape[0]
        side = round(count ** (1 / len(patch)))
        return tuple(side * length for length in patch) if side ** len(patch) == count else None

    def __call__(self, module: Any, arguments: Any, named: Any) -> None:
        """What a hook in front of the embedding is called with.

        Raises:
            SubquadError: these are no batch of images, or the embedding was replaced since the conversion.
        """
        patch, x = patch_of(module), arguments[0]
        if not patch:
            raise SubquadError(f"the patch embedding, now a {type(module).__name__} that cuts no patches, {REPLACED}")
        if x.dim() != len(patch) + 2:
            axes = "depth, height, width" if len(patch) == 3 else "height, width"
            alone = x.dim() == len(patch) + 1
            channels, hint = (x.shape[0], ": x[None] makes a batch of one image") if alone else ("c", "")
            raise SubquadError(f"a converted network takes images (b, {channels}, {axes}), got {tuple(x.shape)}{hint}")
        self.record(TokenGrid(*self.map_from(module, x.shape[2:])))


def patch_of(module: Any) -> tuple[int, ...]:
    """Sides of the patches that a module cuts out of images (b, c, ...), row by row; none where it cuts none."""
    if isinstance(module, nn.Conv2d | nn.Conv3d):
        return tuple(module.kernel_size) if module.stride == module.kernel_size else ()
    # copies of an einops layer have none of its hooks: what holds it is listened to
    first = next(iter(module), None) if isinstance(module, nn.Sequential) else None
    if first is None or not is_called(first, "einops.layers.torch.Rearrange"):
        return ()
    cutting: Any = first
    before, _, behind = cutting.pattern.partition("->")
    front, _, cut = before.strip().partition(" c ")
    places, names = zip(*_CUT.findall(cut), strict=True) if front == "b" and _CUT.search(cut) else ((), ())
    if places != tuple(one for one in re.findall(r"\w+", behind) if one in places):
        return ()
    return tuple(cutting.axes_lengths[name] for name in names) if len(names) in (2, 3) else ()


def _times(sides: Any) -> str:
    return "×".join(map(str, sides))
