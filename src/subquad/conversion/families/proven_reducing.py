"""Attention of pyramids whose keys are reduced, in anybody's copy of PVT, PVTv2 or SegFormer, proven by numbers.

Their layers have the names of the authors' code wherever they stand: what a layer with all of these names answers is
held against the formula, by a twin (`twins.py`).
"""

import inspect
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from subquad.conversion.converted_attention import ConvertedAttention, channels_into
from subquad.conversion.families.reducing_attention import TimmReducingAttention
from subquad.conversion.families.twins import OF_LIBRARIES, Remembered, are_equal, random_tokens, twin_of
from subquad.grid import TokenGrid

NEEDED = frozenset({"q", "kv", "proj"})
KNOWN = NEEDED | {"sr", "norm", "pool", "act", "attn_drop", "proj_drop"}


class ProvenReducing(TimmReducingAttention):
    """Called with tokens (b, n, c), and the height and width of their map."""

    replaces: ClassVar[tuple[str, ...]] = ()

    def __init__(self, original: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        self.called_with = tuple(inspect.signature(original.forward).parameters)

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_heads, channels_into(original.proj) // original.num_heads

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        # under the names that the layer has for them
        given = dict(zip(self.called_with, args, strict=False)) | kwargs
        if len(args) + len(kwargs) != len(self.called_with) or given.keys() != set(self.called_with):
            raise TypeError(f"a converted {type(self.original).__name__} takes {', '.join(self.called_with)}")
        x, height, width = (given[name] for name in self.called_with)
        return self.attend(x, TokenGrid(height, width))


def stands_for_reducing(layer: nn.Module) -> type[ConvertedAttention] | None:
    """The class that stands for a layer whose parts are called so, and that computes so; None where it does not."""
    names = {name for name, part in layer._modules.items() if part is not None}
    foreign = type(layer).__module__.partition(".")[0] not in OF_LIBRARIES
    adds = layer._parameters or layer._buffers or "forward" in vars(layer)
    if not foreign or not NEEDED <= names <= KNOWN or adds:
        return None
    return _found(layer)


MAPS = (2, 16, 8), (1, 40, 32)
"""Numbers of images, rows and columns that are asked about; reductions by up to 8 divide them."""


def _prove(layer: nn.Module) -> type[ConvertedAttention] | None:
    try:
        twin = twin_of(layer)
        is_called_so = len(inspect.signature(twin.forward).parameters) == 3 and type(twin.num_heads) is int
        return ProvenReducing if is_called_so and all(_agrees(twin, *one) for one in MAPS) else None
    except Exception:
        # that is somebody's code, which may say in any way that it is called otherwise, or can't be copied
        return None


def _agrees(twin: Any, images: int, height: int, width: int) -> bool:
    x = random_tokens(images, height * width, twin.q.in_features)
    return are_equal(_answer(twin, x, height, width), twin(x, height, width))


def _answer(twin: Any, x: Tensor, height: int, width: int) -> Tensor:
    """What the authors' formula gives of tokens (b, n, c) of such a map."""
    reduced = x
    if hasattr(twin, "sr"):
        image = x.mT.unflatten(2, (height, width))
        image = twin.sr(twin.pool(image) if hasattr(twin, "pool") else image)
        reduced = twin.norm(image.flatten(2).mT)
        reduced = twin.act(reduced) if hasattr(twin, "act") else reduced
    q = twin.q(x).unflatten(2, (twin.num_heads, -1)).transpose(1, 2)
    k, v = twin.kv(reduced).unflatten(2, (2, twin.num_heads, -1)).permute(2, 0, 3, 1, 4)
    answers: Tensor = twin.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    return answers


_found = Remembered(_prove)
