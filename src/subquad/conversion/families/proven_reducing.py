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

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_heads, channels_into(original.proj) // original.num_heads

    def __init__(self, original: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        self.names = list(inspect.signature(original.forward).parameters)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        given = dict(zip(self.names, args, strict=False)) | kwargs
        x, height, width = (given[name] for name in self.names)
        return self.attend(x, TokenGrid(height, width))


def stands_for_reducing(layer: nn.Module) -> type[ConvertedAttention] | None:
    """The class that stands for a layer whose parts are called so, and that computes so; None where it does not."""
    names = {name for name, part in layer._modules.items() if part is not None}
    foreign = type(layer).__module__.partition(".")[0] not in OF_LIBRARIES
    if not foreign or not NEEDED <= names <= KNOWN or layer._parameters or "forward" in vars(layer):
        return None
    return _found(layer)


def _prove(layer: nn.Module) -> type[ConvertedAttention] | None:
    twin = twin_of(layer)
    if len(inspect.signature(twin.forward).parameters) != 3 or type(getattr(twin, "num_heads", None)) is not int:
        return None
    for images, height, width in ((2, 16, 8), (1, 40, 32)):
        try:
            x = random_tokens(images, height * width, twin.q.in_features)
            if not are_equal(_answer(twin, x, height, width), twin(x, height, width)):
                return None
        except Exception:
            # that is somebody's code, which may say in any way that it is called otherwise
            return None
    return ProvenReducing


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
