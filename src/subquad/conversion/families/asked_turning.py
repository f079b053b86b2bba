"""How a layer's own code turns queries and keys by their positions: it is asked, whatever it makes that of.

Rotary positions (Su et al. 2021, arXiv 2104.09864) are written in as many ways as there are repositories: tables or
complex numbers, made in the layer or handed to it, of pairs that stand here or there. So nothing of that is read: the
layer's code is run with numbers of ours in the place of what its projections give, up to its first product with keys.
Keys that are one in the first channel of each pair and zero in the second come there as cosines and sines.

Letters: b batch, h heads, n tokens, d channels of a head, g channels of a group, the halves of which are pairs.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from subquad.conversion.families.readings import ORDERS, Reading
from subquad.rope import Rotation, with_signs

MATMULS = frozenset({"matmul", "__matmul__", "bmm"})


@dataclass(frozen=True)
class Turning:
    """How a layer turns its queries and keys.

    Attributes:
        group: g: 2 where neighbours are pairs, d where channels of the first half and the second are, and otherwise
            where those of each part are, as of rows and columns.
        heads_alike: whether all heads are turned alike.
        by_image: names of what is handed over for each image of a batch, so that the layer can be asked about one; None
            where it has to be asked about all.
    """

    group: int
    heads_alike: bool = True
    by_image: frozenset[str] | None = frozenset()

    def for_one(self, x: Tensor, beside: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Tokens (b, n, c) and what else a call brings: those of the first image, or of all."""
        if self.by_image is None:
            return x, dict(beside)
        return x[:1], {name: one[:1] if name in self.by_image else one for name, one in beside.items()}

    def in_pairs(self, heads: Tensor) -> Tensor:
        """Queries or keys (b, h, n, d), their channels so that pairs stand as the rotation has them."""
        if self.group in (2, heads.shape[-1]):
            return heads
        return heads.unflatten(-1, (-1, 2, self.group // 2)).transpose(-1, -2).flatten(-3)

    def rotation(self, keys: Tensor) -> Rotation:
        """The rotation of keys (b, h, n, d) that were asked for, of the first image."""
        first = keys[0, 0] if self.heads_alike else keys[0]
        cos, sin = first.unflatten(-1, (-1, 2, self.group // 2)).unbind(-2)
        if self.group == first.shape[-1]:
            cos, sin = (torch.cat([part, part], dim=-1).flatten(-2) for part in (cos, sin))
        else:
            cos, sin = (part.flatten(-2).repeat_interleave(2, dim=-1) for part in (cos, sin))
        interleaved = self.group != first.shape[-1]
        return Rotation(cos, with_signs(sin, interleaved=interleaved), interleaved)


@torch.compiler.disable
def asked_keys(
    layer: nn.Module, original: nn.Module, reading: Reading, turning: Turning, x: Tensor, beside: Mapping[str, Any]
) -> Tensor | None:
    """What comes of keys (b, h, n, d) that are one in the first channel of each pair, and zero in the second.

    Args:
        layer: has the parts that are used: a layer itself, or ours in its place.
        original: the layer whose code is run.
        reading: how its projections give keys.
        turning: which channels are pairs, and whether one image is asked about.
        x: tokens (b, n, c).
        beside: what else it is called with, by name.

    Returns:
        None where no such keys are multiplied with anything.
    """
    asked, beside = turning.for_one(x, beside)
    asked = asked if asked.dtype == torch.float64 else asked.float()
    # channels that add up to one
    asked = asked.new_full((), 1 / x.shape[-1]).expand(asked.shape)
    stub = _standing_in(layer, original, reading, turning.group, asked)
    shape = (*asked.shape[:1], reading.num_heads, x.shape[1], reading.width)
    # tables keep their precision, whatever is computed with them; the meta device has none to lower
    as_it_is = nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
    with as_it_is, _ListeningForKeys(shape):
        try:
            # not a call of the layer's, to which somebody may listen
            stub.forward(asked, **beside)
        except _KeysMetError as met:
            return met.keys
    return None


def turnings(width: int, images: int, beside: Mapping[str, Any]) -> Iterator[Turning]:
    """All that may turn heads of so many channels, in a call of so many images, the usual first."""
    even = [group for group in range(2, width + 1, 2) if width % group == 0]
    by_image = {name for name, one in beside.items() if isinstance(one, Tensor) and one.shape[:1] == (images,)}
    for names in dict.fromkeys((frozenset(), frozenset(by_image), None)):
        for group in sorted(even, key=lambda group: (group != width, group != 2, -group)):
            yield Turning(group, by_image=names)


def turns(keys: Tensor, turning: Turning) -> bool:
    """Whether keys that were asked for are cosines and sines, those of all images alike, and not all of angle zero.

    Of what does not turn nobody knows which channels are pairs.
    """
    first, second = keys.unflatten(-1, (-1, 2, turning.group // 2)).unbind(-2)
    ones = first.square() + second.square()
    are_on_circles = bool(torch.allclose(ones, torch.ones_like(ones), atol=1e-4))
    return are_on_circles and bool(second.any()) and are_of_one(keys)


def are_of_one(keys: Tensor) -> bool:
    """Whether keys are those of one image, for all of a batch."""
    return torch.equal(keys, keys[:1].expand_as(keys))


def are_alike(keys: Tensor) -> bool:
    """Whether keys (b, h, n, d) of all heads are turned alike."""
    return torch.equal(keys, keys[:, :1].expand_as(keys))


class _Gives(nn.Module):
    """Stands in the place of a projection of tokens whose channels add up to one, and gives the same row of each."""

    def __init__(self, row: Tensor, channels: int) -> None:
        super().__init__()
        self.row, self.channels = row, channels

    @property
    def weight(self) -> Tensor:
        """What gives that row, for code that does not call the projection."""
        return self.row[:, None].expand(-1, self.channels)

    @property
    def bias(self) -> Tensor:
        return torch.zeros_like(self.row)

    def forward(self, x: Tensor) -> Tensor:
        # a tensor of its own, which some write to
        return self.row.expand(*x.shape[:-1], -1).clone()


class _AsTheyAre(nn.Module):
    """Stands in the place of a norm, whose answers are tensors of their own."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def _standing_in(layer: nn.Module, original: nn.Module, reading: Reading, group: int, like: Tensor) -> Any:
    """A layer of the same code and parts whose projections give what turns into cosines and sines, of tokens `like`."""
    stub: Any = copy.copy(original)
    pattern = torch.zeros(reading.width // group, 2, group // 2)
    pattern[:, 0] = 1
    of_heads = pattern.flatten().expand(reading.num_heads, -1)
    parts = dict(layer._modules)
    norms = (reading.norm, *(reading.qk_norms or ()))
    parts |= {name: _AsTheyAre() for name in norms if name is not None}
    count = {1: (3,), 2: (1, 2), 3: (1, 1, 1)}[len(reading.projections)]
    for name, several in zip(reading.projections, count, strict=True):
        axis = dict(zip(ORDERS, (0, 1, 2), strict=True))[reading.order]
        rows = torch.stack([of_heads] * several, dim=axis)
        parts[name] = _Gives(rows.flatten().to(like), like.shape[-1])
    stub._modules = parts
    stub._buffers = dict(layer._buffers)
    stub._parameters = dict(layer._parameters)
    stub._parameters |= {name: like.new_zeros(reading.num_heads * reading.width) for name in reading.biases}
    stub.training = layer.training
    return stub


class _KeysMetError(Exception):
    """Keys are about to be multiplied."""

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self.keys = keys


class _ListeningForKeys(TorchFunctionMode):
    """Ends a computation where keys (b, h, n, d) are multiplied with something."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        keys = _keys_in(getattr(func, "__name__", ""), (*args, *named.values()))
        if keys is not None and keys.ndim == 3 and keys.shape[0] == prod(self.shape[:2]):
            keys = keys.unflatten(0, self.shape[:2])
        if keys is not None and tuple(keys.shape) == self.shape:
            raise _KeysMetError(keys)
        return func(*args, **named)


def _keys_in(name: str, args: tuple[Any, ...]) -> Tensor | None:
    """Keys (…, n, d) that are multiplied with queries by a function of PyTorch, if that may be such a product."""
    tensors = [one for one in args if isinstance(one, Tensor)]
    if name == "einsum":
        # the operands may be a list
        operands = tensors or [one for one in args[-1] if isinstance(one, Tensor)]
        return _keys_of_einsum(args[0], operands)
    if len(tensors) < 2:
        return None
    if name == "scaled_dot_product_attention":
        return tensors[1]
    if name == "baddbmm":
        return tensors[2].mT
    return tensors[1].mT if name in MATMULS and tensors[1].ndim > 2 else None


def _keys_of_einsum(equation: Any, operands: list[Tensor]) -> Tensor | None:
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation:
        return None
    operand, answer = equation.replace(" ", "").split("->") if "->" in equation else (equation, "")
    queries, keys = operand.split(",")
    summed = [letter for letter in keys if letter in queries and letter not in answer]
    tokens = [letter for letter in keys if letter not in queries]
    if len(summed) != 1 or len(tokens) != 1:
        return None
    order = [letter for letter in keys if letter not in (*summed, *tokens)] + tokens + summed
    return operands[1].permute(*(keys.index(letter) for letter in order))
