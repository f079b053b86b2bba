"""Attention layers of anybody's classes, of which numbers prove that they compute softmax attention: `readings.py`."""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NoReturn

from torch import Tensor, nn

from subquad.conversion.converted_attention import ConvertedAttention
from subquad.conversion.families.patches_recorder import PatchesRecorder
from subquad.conversion.families.readings import Reading, holds_at, linear_of, reading_of
from subquad.conversion.families.twins import attributes_of
from subquad.conversion.grid_recorder import GridRecorder
from subquad.errors import SubquadError


class ProvenLayer(ConvertedAttention):
    """What all have in common that are read, of tokens or of maps; no masks, no positions.

    Attributes:
        read_as: what the layer's parts are.
    """

    is_anybodys: ClassVar[bool] = True
    read_as: Reading

    def __init__(self, original: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        self.usual = usual_arguments(original)
        self.unknown = frozenset(attributes_of(original)) - vars(self).keys() - set(type(self).__dict__)

    def __setattr__(self, name: str, value: Any) -> None:
        # what the layer that stood here may have read in its forward
        if name in vars(self).get("unknown", ()):
            raise SubquadError(
                f"{name} is set on a converted {type(self.original).__name__}, which does not know it: leave its block "
                "out of `blocks`, or register a family (docs/convert.md)"
            )
        super().__setattr__(name, value)

    @classmethod
    def is_self_attention(cls, original: nn.Module, block: nn.Module, path: str) -> bool:
        # which computes the same where it is handed the same tokens twice
        return "cross" not in f"{path.rpartition('.')[2]} {type(original).__name__}".lower()

    def scale_of(self, original: nn.Module) -> float | None:
        return self.read_as.scale

    def sizes(self, original: nn.Module) -> tuple[int, int]:
        return self.read_as.num_heads, self.read_as.width

    def kept(self, original: nn.Module) -> Iterable[tuple[str, nn.Module | nn.Parameter]]:
        return ((name, part) for name, part in super().kept(original) if name in self.read_as.parts)

    def tokens_of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The tokens, or the map, that a call is about.

        Raises:
            SubquadError: it brings more, or other keys than queries.
        """
        given = dict(zip(self.usual, args, strict=False)) | kwargs
        inputs = [given.pop(name) for name in list(self.usual)[: self.read_as.num_inputs] if name in given]
        more = [name for name, value in given.items() if not is_nothing(value, self.usual.get(name))]
        others = len(inputs) < self.read_as.num_inputs or any(one is not inputs[0] for one in inputs)
        if more or others or len(args) > len(self.usual):
            what = (
                f"{', '.join(more)} beside tokens" if more else "queries, keys and values that are not the same tokens"
            )
            raise SubquadError(
                f"this layer is called with {what}, which a converted {type(self.original).__name__} can't honour: "
                "leave its block out of `blocks`, or register a family (docs/convert.md)"
            )
        tokens: Tensor = inputs[0]
        return tokens


class ProvenAttention(ProvenLayer):
    """Tokens (b, n, c) to tokens, alone or with what stood beside them."""

    listener: ClassVar[type[GridRecorder]] = PatchesRecorder

    def __init__(self, original: nn.Module, *args: Any, **kwargs: Any) -> None:
        self.read_as = self.read(original, int(kwargs["grid"].num_tokens))
        super().__init__(original, *args, **kwargs)

    def read(self, original: nn.Module, num_tokens: int) -> Reading:
        """How the layer computes of so many tokens.

        Raises:
            SubquadError: otherwise than of fewer.
        """
        reading = reading_of(original)
        if reading is None or not holds_at(original, num_tokens):
            refuse_number(original, num_tokens)
        return reading

    def tokens_width(self, original: nn.Module) -> int:
        first = linear_of(original.get_submodule(self.read_as.projections[0]))
        assert first is not None
        return first.in_features

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        reading = self.read_as
        x = self.tokens_of_call(args, kwargs)
        tokens = x if reading.norm is None else self.through(reading.norm, x)
        projected = [self.through(name, tokens) for name in reading.projections]
        y = self.mixed(reading.heads_of(projected, self), tokens, args, kwargs)
        y = self.through(reading.proj, y if reading.norm_behind is None else self.through(reading.norm_behind, y))
        if reading.answers_beside is None:
            return y
        return y, *(NO_MAPS if formed else None for formed in reading.answers_beside)

    def mixed(self, heads: Sequence[Tensor], x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """What the mechanism makes of queries, keys and values (b, h, n, d) of tokens x (b, n, c), in some call."""
        q, k, v = heads
        return self.mix(q, k, v, x)


def refuse_number(original: nn.Module, num_tokens: int) -> NoReturn:
    """Say that a layer computes something else of so many tokens."""
    raise SubquadError(
        f"a {type(original).__name__} computes softmax attention of a few tokens, and something else of "
        f"{num_tokens}: leave its block out of `blocks`, or register a family (docs/convert.md)"
    )


def usual_arguments(layer: nn.Module) -> dict[str, Any]:
    """What a layer can be called with by name, and what each argument is where it is left out."""
    parameters = inspect.signature(layer.forward).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is not one.VAR_KEYWORD}


def is_nothing(value: Any, usual: Any) -> bool:
    """Whether an argument asks for nothing: it is what it is where it is left out, `usual`."""
    asks_nothing = (value is None or value is False) and not isinstance(usual, Tensor) and not usual
    return asks_nothing or value is usual or (isinstance(value, int | float | str) and value == usual)


class NoMaps:
    """What stands in the place of attention maps, which a converted layer does not form: whoever reads it is told."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse()

    def __getitem__(self, place: Any) -> NoReturn:
        _refuse()

    def __iter__(self) -> NoReturn:
        _refuse()

    def __len__(self) -> NoReturn:
        _refuse()

    def __bool__(self) -> NoReturn:
        _refuse()

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse()

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse()


def _refuse() -> NoReturn:
    raise SubquadError("a converted layer forms no attention maps: ask the network that was converted")


NO_MAPS = NoMaps()
