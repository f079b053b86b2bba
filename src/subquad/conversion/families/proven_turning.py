"""Attention layers of anybody's classes with rotary positions, of which numbers prove what they compute.

What such a layer is handed beside tokens (tables, positions, a height and a width) is seen in a call of its network,
and with that it is held against softmax attention of turned queries and keys: how they are turned says its own code, in
each call (`asked_turning.py`).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import CodeType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.attention.bricks import is_heard
from subquad.conversion.converted_attention import ConvertedAttention
from subquad.conversion.example_calls import Call
from subquad.conversion.families.asked_turning import Turning, are_alike, are_of_one, asked_keys, turnings, turns
from subquad.conversion.families.proven_attention import ProvenAttention, is_nothing, usual_arguments
from subquad.conversion.families.readings import Answered, Reading, Turn, all_readings, computes, parts_of, reading_of
from subquad.conversion.families.twins import OF_LIBRARIES, random_tokens, twin_if_any
from subquad.errors import SubquadError, reason_without_path
from subquad.ops.turning import turned_tokens
from subquad.rope import Rotation
from subquad.tracing import is_traced, is_transformed

_SAYS_POSITIONS = re.compile(r"(^|_)(rope|rotary|rot|rotate|freqs?|cis|cos|pos|positions?)($|_|\d)", re.IGNORECASE)


class ProvenTurning(ProvenAttention):
    """Tokens (b, n, c) to tokens, with whatever positions are made of beside them.

    Args:
        original: the layer.
        call: what it was handed where its network was run.
        wrong: what went wrong there.
    """

    asks_for_calls: ClassVar[bool] = True

    def __init__(
        self, original: nn.Module, *args: Any, call: Call | None = None, wrong: Exception | None = None, **kwargs: Any
    ) -> None:
        usual = usual_arguments(original)
        beside = {} if call is None else _beside(usual, call.args, call.kwargs)
        self.handed = frozenset(beside)
        self.turning: Turning | None = None
        if not beside and reading_of(original) is not None:
            # positions that nobody hands over
            super().__init__(original, *args, **kwargs)
            return
        if call is None:
            why = "does not call it for images"
            if wrong is not None:
                why = f"can't be run so: {reason_without_path(wrong)[:200]} (`given` says what a call of it takes)"
            raise SubquadError(
                f"what a {type(original).__name__} is handed beside tokens can't be seen, as its network {why}; leave "
                "its block out of `blocks`, or register a family (docs/convert.md)"
            )
        self.turning, self.read_as = _proven(original, usual, call, beside)
        super().__init__(original, *args, **kwargs)
        _refuse_hooks_on_turning(original, self)
        for name, buffer in original._buffers.items():
            kept = None if buffer is None else buffer.clone()
            self.register_buffer(name, kept, persistent=name not in original._non_persistent_buffers_set)

    def read(self, original: nn.Module, num_tokens: int) -> Reading:
        return super().read(original, num_tokens) if self.turning is None else self.read_as

    def kept(self, original: nn.Module) -> Iterable[tuple[str, nn.Module | nn.Parameter]]:
        # what its code makes rotations of as well
        return super().kept(original) if self.turning is None else ConvertedAttention.kept(self, original)

    def mixed(self, heads: Sequence[Tensor], x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        turning = self.turning
        if turning is None:
            return super().mixed(heads, x, args, kwargs)
        rotation = self._rotation(turning, x, _beside(self.usual, args, kwargs))
        q, k, v = heads
        return self.mix(turning.in_pairs(q), turning.in_pairs(k), v, x, rotation=rotation)

    def _rotation(self, turning: Turning, x: Tensor, beside: Mapping[str, Any]) -> Rotation:
        keys = asked_keys(self, self.original, self.read_as, turning, x, beside)
        name = type(self.original).__name__
        if keys is None:
            raise SubquadError(f"the code of a {name} turns no keys of {x.shape[1]} tokens, as it did when converted")
        by_image = (beside[one] for one in turning.by_image or ())
        has_numbers = type(keys) is Tensor and not (keys.is_meta or is_traced() or is_transformed())
        if has_numbers and not all(map(are_of_one, (keys, *by_image))):
            raise SubquadError(
                f"tokens of this batch of {len(x)} images are turned by positions that differ from image to image: "
                f"call a converted {name} for those alone that stand alike"
            )
        if has_numbers and turning.heads_alike and not are_alike(keys):
            # as they were when converted, and have learned since
            turning = replace(turning, heads_alike=False)
        return turning.rotation(keys)

    def tokens_of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if self.turning is None:
            return super().tokens_of_call(args, kwargs)
        given = _beside(self.usual, args, kwargs).keys()
        if given != self.handed or len(args) > len(self.usual):
            now, before = (", ".join(sorted(some)) or "nothing" for some in (given, self.handed))
            raise SubquadError(
                f"this layer is called with {now} beside tokens, and was with {before} when it was converted: a "
                f"converted {type(self.original).__name__} can't honour that"
            )
        x: Tensor = args[0] if args else kwargs[next(iter(self.usual))]
        return x


def _refuse_hooks_on_turning(original: nn.Module, converted: ProvenTurning) -> None:
    """Raise where somebody listens to a part that is kept for the layer's code: what it hears is ours, or nothing."""
    asked = {name for name, _ in converted.named_children()} - set(converted.read_as.parts)
    for name, part in original.named_children():
        if name in asked and any(map(is_heard, part.modules())):
            raise SubquadError(
                f"somebody listens to the {name} of a {type(original).__name__}, which a converted layer does not call "
                "as that does: take the hook away"
            )


def stands_for_turning(layer: nn.Module) -> type[ConvertedAttention] | None:
    """The class that stands for a layer with the parts of attention whose code names positions; None for others.

    Whether it computes what is thought of it, shows a call of its network.
    """
    if type(layer).__module__.partition(".")[0] in OF_LIBRARIES or parts_of(layer, with_tables=True) is None:
        return None
    names = (*_names_in(getattr(type(layer).forward, "__code__", None)), *layer._modules, *layer._buffers)
    # relative ones are added to scores
    turns = (_SAYS_POSITIONS.search(name) for name in names if not re.search("bias|relative", name))
    return ProvenTurning if any(turns) else None


def _names_in(code: CodeType | None) -> Iterator[str]:
    """What code calls by name, and what stands within it, as comprehensions."""
    if code is not None:
        yield from (*code.co_names, *code.co_varnames)
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                yield from _names_in(inner)


def _beside(usual: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a call brings beside tokens, by name."""
    first, *_ = usual
    given = dict(zip(usual, args, strict=False)) | dict(kwargs)
    return {name: one for name, one in given.items() if name != first and not is_nothing(one, usual.get(name))}


def _proven(
    original: nn.Module, usual: Mapping[str, Any], call: Call, beside: Mapping[str, Any]
) -> tuple[Turning, Reading]:
    """How a layer turns and computes.

    Raises:
        SubquadError: it computes something else than softmax attention of turned queries and keys.
    """
    x = call.args[0] if call.args else call.kwargs.get(next(iter(usual)))
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
        torch.default_generator.manual_seed(0)
        found = _found(original, x.shape[:2], beside) if isinstance(x, Tensor) and x.ndim == 3 else None
    if found is None:
        raise SubquadError(
            f"a {type(original).__name__} computes something else than softmax attention of queries and keys that "
            "positions turn: leave its block out of `blocks`, or register a family (docs/convert.md)"
        )
    return found


def _found(original: nn.Module, shape: Sequence[int], beside: Mapping[str, Any]) -> tuple[Turning, Reading] | None:
    twin = twin_if_any(original)
    parts = parts_of(twin, with_tables=True) if twin is not None else None
    if twin is None or parts is None:
        return None
    answered = []
    for _ in range(2):
        x = random_tokens(shape[0], shape[1], parts.tokens_width)
        try:
            y, *more = given if isinstance(given := twin(x, **beside), tuple | list) else (given,)
        except Exception:
            # that is somebody's code, which may say so in any way
            return None
        if not isinstance(y, Tensor) or y.shape[:2] != x.shape[:2]:
            return None
        answered.append(Answered(twin, x, y, 1, tuple(one is not None for one in more) if more else None))
    x = answered[0].x
    ways: dict[Reading, list[tuple[Turning, Turn]]] = {}
    # whether keys have so many heads, in whichever order they are projected
    fits: dict[int, bool] = {}
    for reading in all_readings(parts, answered[0]):
        if reading.num_heads not in fits:
            of_all = Turning(2, by_image=None)
            fits[reading.num_heads] = _asked(twin, reading, of_all, x, beside) is not None
        # the scale has no part in how keys are turned
        unscaled = replace(reading, scale=0.0)
        if unscaled not in ways and fits[reading.num_heads]:
            ways[unscaled] = list(_ways_to_turn(twin, reading, x, beside))
        for turning, turn in ways.get(unscaled, ()):
            if all(computes(reading, one, turn) for one in answered):
                return turning, reading
    return None


def _ways_to_turn(twin: Any, reading: Reading, x: Tensor, beside: Mapping[str, Any]) -> Iterator[tuple[Turning, Turn]]:
    """How a twin's keys may be turned if that is how they are projected."""
    for turning in turnings(reading.width, x.shape[0], beside):
        keys = _asked(twin, reading, turning, x, beside)
        if keys is not None and turns(keys, turning):
            turning = replace(turning, heads_alike=are_alike(keys))
            yield turning, partial(_turned, turning, turning.rotation(keys))


def _asked(twin: Any, reading: Reading, turning: Turning, x: Tensor, beside: Mapping[str, Any]) -> Tensor | None:
    try:
        return asked_keys(twin, twin, reading, turning, x, beside)
    except Exception:
        # somebody's code, which may want other sizes, or more of its projections
        return None


def _turned(turning: Turning, rotation: Rotation, heads: Tensor) -> Tensor:
    return turned_tokens(rotation, turning.in_pairs(heads))
