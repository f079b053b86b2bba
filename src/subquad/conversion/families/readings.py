"""How an attention layer of anybody's class computes: readings of its parts, told apart by numbers.

Layers of one layer to queries, keys and values, or of two or three, and one behind them, are written anew in every
repository, under other names. What they answer is held against softmax attention, reading by reading: in which order a
projection gives its parts, in how many heads, with which norms and which scale. A twin is asked: `twins.py`.

Letters: b batch, n tokens, c channels, h heads, d channels of a head, m = h·d.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations, product
from math import isclose
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from subquad.conversion.families.twins import (
    OF_LIBRARIES,
    Remembered,
    are_equal,
    attributes_of,
    random_tokens,
    twin_if_any,
    twin_of,
)

ORDERS = "parts", "heads", "channels"
"""What the rows of a projection to several parts are, from outside: (p, h, d), (h, p, d) or (h, d, p)."""

BIASES = "q_bias", "k_bias", "v_bias"
"""Parameters (m) that VideoMAE's layers, and others of that school, add to a projection's rows themselves."""

ASKED = (2, 11), (3, 6), (1, 196)
"""Numbers of images and tokens: what holds of one may be luck, or a mask of its own; 196 may be cut into windows."""

MOST_HEADS = 64


@dataclass(frozen=True)
class Reading:
    """What an attention layer's parts are.

    Attributes:
        projections: names of the linear layers to queries, keys and values: one to all, one and one to both others, or
            three.
        proj: the name of the one behind, or of what begins with it.
        num_heads: h.
        width: d.
        order: one of `ORDERS`.
        norm: the name of a norm of the tokens, or none.
        norm_behind: the name of a norm of the answers in front of `proj`, or none.
        biases: which of `BIASES` the layer has, beside a projection without.
        qk_norms: names of the norms of queries and keys, or none.
        norms_heads: whether these are of a head's channels, and not of all.
        scale: what scores are multiplied by.
        num_inputs: how often a call hands over the tokens: once, or as queries, keys and values.
        answers_beside: what stands behind the tokens in an answer: none if it is tokens alone, else for each whether
            it is more than None.
    """

    projections: tuple[str, ...]
    proj: str
    num_heads: int
    width: int
    order: str = ORDERS[0]
    norm: str | None = None
    norm_behind: str | None = None
    biases: tuple[str, ...] = ()
    qk_norms: tuple[str, str] | None = None
    norms_heads: bool = True
    scale: float = 0.0
    num_inputs: int = 1
    answers_beside: tuple[bool, ...] | None = None

    @property
    def usual_scale(self) -> float:
        """1/√d."""
        return self.width**-0.5

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of all that has weights."""
        some = (self.norm, *self.projections, *self.biases, *(self.qk_norms or ()), self.norm_behind, self.proj)
        return tuple(name for name in some if name is not None)

    def heads_of(self, projected: Sequence[Tensor], layer: Any) -> list[Tensor]:
        """Queries, keys and values (b, h, n, d) of what a layer's projections give, (b, n, m) or (b, n, p·m) each."""
        dim, whole = self.num_heads * self.width, []
        for rows in projected:
            parts = rows.shape[-1] // dim
            axes = {"parts": (parts, self.num_heads, self.width), "heads": (self.num_heads, parts, self.width)}
            cut = rows.unflatten(-1, axes.get(self.order, (self.num_heads, self.width, parts)))
            whole += cut.unbind({"parts": -3, "heads": -2}.get(self.order, -1))
        for name in self.biases:
            place = BIASES.index(name)
            whole[place] = whole[place] + getattr(layer, name).view(self.num_heads, self.width)
        if self.qk_norms is not None:
            for place, name in enumerate(self.qk_norms):
                heads = whole[place]
                whole[place] = getattr(layer, name)(heads if self.norms_heads else heads.flatten(2)).view_as(heads)
        return [heads.transpose(1, 2) for heads in whole]


def reading_of(layer: nn.Module) -> Reading | None:
    """How a layer computes softmax attention of one map's tokens with each other; None where it does not, or not so."""
    if type(layer).__module__.partition(".")[0] in OF_LIBRARIES or parts_of(layer) is None:
        return None
    return _readings_found(layer)


def linear_of(part: nn.Module | None) -> nn.Linear | None:
    """The linear layer that a part is, or begins with, as one with dropout behind it."""
    if type(part) is nn.Sequential and len(part) and not any(True for one in part[1:] for _ in one.parameters()):
        return linear_of(part[0])
    return part if type(part) is nn.Linear else None


class Sized(Protocol):
    """A linear layer, or what else computes of each token alone."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


@dataclass(frozen=True)
class Parts:
    """What a layer has that may be attention.

    Attributes:
        linear: its linear layers, by name.
        norms: names of its norms.
        ways: which of the linear layers may be those to queries, keys and values, and which the one behind.
        biases: which of `BIASES` it has.
    """

    linear: Mapping[str, Sized]
    norms: tuple[str, ...]
    ways: tuple[tuple[tuple[str, ...], str], ...]
    biases: tuple[str, ...] = ()

    @property
    def tokens_width(self) -> int:
        """c, in which all ways agree."""
        return self.linear[self.ways[0][0][0]].in_features


def parts_of(layer: nn.Module, *, with_tables: bool = False) -> Parts | None:
    """The parts of a layer that may be attention; None where it can't be, or is more than its parts.

    Buffers, parameters and other modules are more, unless there may be tables of rotary positions.
    """
    with_weights = {name: part for name, part in layer.named_children() if any(True for _ in part.parameters())}
    linear = {name: one for name, part in with_weights.items() if (one := linear_of(part)) is not None}
    norms = tuple(name for name, part in with_weights.items() if name not in linear and is_norm(part))
    biases = tuple(name for name in BIASES if layer._parameters.get(name) is not None)
    own = [name for name, one in layer._parameters.items() if one is not None]
    # tables of positions, masks and factors are none of softmax attention as it is
    is_plain = len(linear) + len(norms) == len(with_weights) and len(own) == len(biases) and is_without_tables(layer)
    if not (with_tables or is_plain) or len(linear) not in (2, 3, 4) or len(norms) > 4 or "forward" in vars(layer):
        return None
    ways = tuple(ways_of(linear))
    fits = all(getattr(layer, one).shape == (linear[ways[0][1]].in_features,) for one in biases) if ways else False
    return Parts(linear, norms, ways, biases) if fits else None


def is_without_tables(layer: nn.Module) -> bool:
    """Whether all buffers are the zeros that some have in the place of a bias of keys, which moves no softmax."""
    buffers = dict(layer.named_buffers())
    return buffers.keys() <= {"k_bias"} and not any(one.is_meta or one.any() for one in buffers.values())


def is_norm(part: nn.Module) -> bool:
    """Whether a part has a number for each channel, and no more, as norms do; of maps (1, c, 1, 1), too."""
    weights = list(part.parameters())
    alike = all(one.numel() == max(one.shape, default=0) == weights[0].numel() for one in weights)
    return not list(part.children()) and alike


def ways_of(linear: Mapping[str, Sized]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Which layers may be those to queries, keys and values, and which the one behind, by their sizes."""
    for *first, last in permutations(linear):
        dim, width = linear[last].in_features, linear[first[0]].in_features
        rows = [linear[name].out_features for name in first]
        if rows in ([3 * dim], [dim, 2 * dim], [dim] * 3) and all(linear[one].in_features == width for one in first):
            yield tuple(first), last


@dataclass(frozen=True)
class Answered:
    """What a twin was asked, and what it answered: tokens (b, n, c) to others, and what stood beside these.

    Attributes:
        twin: who was asked.
        projected: what the twin's projections give of the tokens, by their names and that of a norm in front.
    """

    twin: Any
    x: Tensor
    y: Tensor
    num_inputs: int
    beside: tuple[bool, ...] | None
    projected: dict[tuple[str, str | None], Tensor] = field(default_factory=dict)


def _read(layer: nn.Module) -> Reading | None:
    """The reading by which a layer's twin computes, if there is one."""
    twin = twin_if_any(layer)
    parts = parts_of(twin) if twin is not None else None
    if twin is None or parts is None:
        return None
    asked = [_ask(twin, parts, shape) for shape in ASKED]
    if any(isinstance(value, Tensor) for value in attributes_of(layer).values()):
        twin = twin_of(layer, remembers=False)
        asked += [_ask(twin, parts, shape) for shape in ASKED]
    answered = [one for one in asked if one is not None]
    if len(answered) < len(asked) or len({one.beside for one in answered}) > 1:
        return None
    readings = all_readings(parts, answered[0])
    return next((one for one in readings if all(computes(one, each) for each in answered)), None)


_readings_found = Remembered(_read)


MOST_ASKED = 1600
"""Tokens of which an answer is asked: all pairs of more take too much memory and time."""


def holds_at(layer: nn.Module, num_tokens: int) -> bool:
    """Whether a layer that is known computes the same of so many tokens; of more than `MOST_ASKED` nobody knows."""
    return num_tokens > MOST_ASKED or bool(_holding(num_tokens)(layer))


@functools.cache
def _holding(num_tokens: int) -> Remembered[bool]:
    def find(layer: nn.Module) -> bool:
        twin, reading = twin_of(layer), reading_of(layer)
        parts = parts_of(twin)
        answered = None if parts is None else _ask(twin, parts, (1, num_tokens))
        return reading is not None and answered is not None and computes(reading, answered)

    return Remembered(find)


def _ask(twin: Any, parts: Parts, shape: tuple[int, int]) -> Answered | None:
    """What a twin answers to random tokens; None where it wants more than tokens, or answers with other things."""
    x = random_tokens(*shape, parts.tokens_width)
    needed = [
        one
        for one in inspect.signature(twin.forward).parameters.values()
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    try:
        (y, *beside), *others = (
            answer if isinstance(answer, tuple | list) else (answer,)
            for answer in (twin(*inputs) for inputs in _inputs(x, len(needed)))
        )
    except Exception:
        # that is somebody's code, which may say so in any way
        return None
    if not isinstance(y, Tensor) or y.shape[:2] != x.shape[:2] or y.dim() != 3 or len(needed) > 3:
        return None
    # arguments that nothing is made of are none of keys and values, but heights and widths, say
    if any(torch.equal(y, other) for other, *_ in others):
        return None
    return Answered(twin, x, y, max(len(needed), 1), tuple(one is not None for one in beside) if beside else None)


def _inputs(x: Tensor, count: int) -> Iterator[list[Tensor]]:
    """What a layer that needs so many is called with: the same tokens, and others in the place of one but the first."""
    yield [x] * max(count, 1)
    for place in range(1, count):
        yield [2 * x if one == place else x for one in range(count)]


def all_readings(parts: Parts, asked: Answered) -> Iterator[Reading]:
    """All that a layer might compute, the usual first."""
    twin = asked.twin
    for are_usual in (True, False):
        for first, last in parts.ways:
            dim = parts.linear[last].in_features
            for num_heads in _numbers_of_heads(twin, dim, more=are_usual):
                plain = Reading(first, last, num_heads, dim // num_heads, biases=parts.biases)
                in_calls = replace(plain, num_inputs=asked.num_inputs, answers_beside=asked.beside)
                for scale in [plain.usual_scale] if are_usual else _other_scales(twin, plain):
                    for order in ORDERS if len(first) < 3 else ORDERS[:1]:
                        for normed in _with_norms(in_calls, parts, twin):
                            yield replace(normed, order=order, scale=scale)


def _numbers_of_heads(layer: nn.Module, dim: int, *, more: bool) -> list[int]:
    """Those that divide the channels: first what the layer has as numbers, of heads or their widths, then all."""
    said = [value for value in vars(layer).values() if type(value) is int and value > 0 and dim % value == 0]
    widths = [dim // value for value in said]
    others = [heads for heads in range(1, MOST_HEADS + 1) if dim % heads == 0]
    return list(dict.fromkeys([*said, *widths, *(others if more or not said else [])]))


def _other_scales(layer: nn.Module, reading: Reading) -> list[float]:
    """What scores may be multiplied by besides the usual."""
    said = [float(value) for value in vars(layer).values() if type(value) is float and value]
    dim = reading.num_heads * reading.width
    others = [*said, *(1 / value for value in said), 1.0, 1 / reading.width, dim**-0.5]
    return [one for one in dict.fromkeys(others) if not isclose(one, reading.usual_scale)]


def _with_norms(reading: Reading, parts: Parts, layer: nn.Module) -> Iterator[Reading]:
    """The same with its norms where they may stand, by their sizes."""
    sizes = {name: next(layer.get_submodule(name).parameters()).numel() for name in parts.norms}
    dim = reading.num_heads * reading.width
    places = {None: True} | {name: size == parts.tokens_width for name, size in sizes.items()}
    places_behind = {None: True} | {name: size == dim for name, size in sizes.items()}
    for norm, behind in product(places, repeat=2):
        rest = [name for name in sizes if name not in (norm, behind)]
        taken = len(sizes) - len(rest) == sum(name is not None for name in (norm, behind))
        if taken and places[norm] and places_behind[behind]:
            normed = replace(reading, norm=norm, norm_behind=behind)
            yield from _with_qk_norms(normed, rest, sizes) if rest else [normed]


def _with_qk_norms(reading: Reading, names: Sequence[str], sizes: Mapping[str, int]) -> Iterator[Reading]:
    """The same with norms of queries and keys, where there are two of the sizes of one or of all heads."""
    for q_norm, k_norm in permutations(names) if len(names) == 2 else ():
        for norms_heads, size in ((True, reading.width), (False, reading.num_heads * reading.width)):
            if sizes[q_norm] == sizes[k_norm] == size:
                yield replace(reading, qk_norms=(q_norm, k_norm), norms_heads=norms_heads)


Turn = Callable[[Tensor], Tensor]
"""What becomes of queries and keys (b, h, n, d) before they are multiplied."""


def computes(reading: Reading, asked: Answered, turn: Turn | None = None) -> bool:
    """Whether that is what a twin answered."""
    try:
        return are_equal(_answer(reading, asked, turn), asked.y)
    except Exception:
        # its parts are somebody's, and may be called otherwise
        return False


def _answer(reading: Reading, asked: Answered, turn: Turn | None) -> Tensor:
    """What a reading gives of the tokens that a twin was asked about."""
    twin = asked.twin
    for name in reading.projections:
        if (name, reading.norm) not in asked.projected:
            x = asked.x if reading.norm is None else getattr(twin, reading.norm)(asked.x)
            asked.projected[name, reading.norm] = getattr(twin, name)(x)
    projected = [asked.projected[name, reading.norm] for name in reading.projections]

    def through(name: str, tokens: Tensor) -> Tensor:
        given: Tensor = getattr(twin, name)(tokens)
        return given

    return mixed_as(reading, twin, projected, through, turn)


def mixed_as(
    reading: Reading,
    twin: Any,
    projected: Sequence[Tensor],
    through: Callable[[str, Tensor], Tensor],
    turn: Turn | None = None,
    memory: Tensor | None = None,
) -> Tensor:
    """What a reading makes of what its projections give, each (b, n, m) or (b, n, p·m): answers (b, n, c).

    Args:
        reading: by which it is computed.
        twin: whose parts these are.
        projected: by each of its projections.
        through: gives tokens behind the part of a name.
        turn: what becomes of queries and keys.
        memory: keys and values (2, h, ., d) that every query sees as well.
    """
    q, k, v = reading.heads_of(projected, twin)
    if memory is not None:
        keys, values = (one.expand(len(k), *one.shape) for one in memory)
        k, v = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
    if turn is not None:
        q, k = turn(q), turn(k)
    y = (((q * reading.scale) @ k.mT).softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
    return through(reading.proj, y if reading.norm_behind is None else through(reading.norm_behind, y))
