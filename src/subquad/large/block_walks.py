"""A block over some rows of the grid at a time: what its mechanism sums up of them, and what becomes of them.

A block of the plain host is taken apart (`PlainBlock`): each walk projects what it needs and no more. Any other is
called whole on some rows, with its mechanism in other hands (`WholeBlock`): whatever a host or another library has
around attention stays as it is there. So many more rows as its convolutions look at go with them, and are cut off.

Letters: b batch, n tokens, c channels, y x rows and columns.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from subquad.attention.bricks import LocalConv
from subquad.attention.sweeps import Streaming, Sweep, streaming_of
from subquad.errors import SubquadError
from subquad.grid import GridRows, TokenGrid, rows_beside
from subquad.models.layers import AttentionSteps, Block, SelfAttention
from subquad.rope import Rotation

Call = Callable[[Any, Tensor, GridRows], Tensor]
"""Calls a block with the tokens (1, n, c) of some rows, as its network does."""
RotationOf = Callable[[Any, GridRows], Rotation | None]
"""How tokens of some rows turn in a block; None where they do not."""


class BlockWalk(Protocol):
    """A block, ready to be walked through.

    Attributes:
        streaming: how its mechanism answers the grid.
        reach: how many rows above and below the block looks at, beside what its mechanism does.
    """

    streaming: Streaming
    reach: int

    def sums(self, sweep: Sweep, states: Sequence[Any], rows: GridRows, seen: GridRows, x: Tensor) -> Any:
        """What a sweep makes of some rows, from the tokens (1, n, c) of all rows that are seen."""

    def behind(self, states: Sequence[Any], rows: GridRows, seen: GridRows, x: Tensor) -> Tensor:
        """The tokens (1, n, c) of some rows behind the block."""


class PlainBlock:
    """A block of the plain host, without its convolution of positions."""

    reach = 0

    def __init__(self, block: Any, grid: TokenGrid, rotation: RotationOf) -> None:
        self.block, self.rotation = block, rotation
        self.streaming = streaming_of(block.attn.inner, grid)

    def sums(self, sweep: Sweep, states: Sequence[Any], rows: GridRows, seen: GridRows, x: Tensor) -> Any:
        if (steps := self._steps(rows)) is not None and (sums := steps.sums(self.block, x)) is not None:
            return (sums,)
        return self._swept(sweep, states, rows, seen, x)

    def behind(self, states: Sequence[Any], rows: GridRows, seen: GridRows, x: Tensor) -> Tensor:
        block = self.block
        if (steps := self._steps(rows)) is not None:
            y = steps.answers(block, x, states[0][0], rows.whole.num_tokens)
            if y is not None:
                return block.feed_forward(y, rows)
        y = self._swept(self.streaming.answers, states, rows, seen, x).transpose(1, 2).flatten(2)
        return block.feed_forward(rows.of(seen, x) + block.drop_path(block.ls1(block.attn.proj(y))), rows)

    def _steps(self, rows: GridRows) -> AttentionSteps | None:
        """What takes the first half in two steps, of a network that is made ready for that: see `subquad.optimize`."""
        steps: AttentionSteps | None = self.block.fused_attention
        return steps if steps is not None and self.rotation(self.block, rows) is None else None

    def _swept(self, sweep: Sweep, states: Sequence[Any], rows: GridRows, seen: GridRows, x: Tensor) -> Any:
        return sweep.compute(rows, *states, **self._supply(sweep, rows, seen, x))

    def _supply(self, sweep: Sweep, rows: GridRows, seen: GridRows, x: Tensor) -> dict[str, Any]:
        """What a sweep wants of some rows, from the tokens (b, n, c) of all rows that it sees."""
        attention: SelfAttention = self.block.attn
        x = self.block.norm1(x)
        x = x if attention.pre_norm is None else attention.pre_norm(x)
        supply: dict[str, Any] = {}
        for reach in sorted(set(sweep.wanted.values())):
            here = rows.widened(reach)
            names = [name for name, own in sweep.wanted.items() if own == reach]
            tokens = here.of(seen, x)
            given = {"x": tokens, "rotation": self.rotation(self.block, here)}
            parts = attention.some_heads(tokens, [name for name in names if name in attention.projected])
            parts = attention.between(given | parts)
            supply |= {name: parts[name] for name in names}
        return supply


class WholeBlock:
    """A block that is called as its network calls it, while its mechanism sums up or answers some rows."""

    def __init__(self, block: Any, grid: TokenGrid, call: Call) -> None:
        self.block, self.call = block, call
        self.attention = attention_of(block)
        self.inner = self.attention.inner
        self.streaming = streaming_of(self.inner, grid)
        self.reach = reach_of(block, without=self.inner)

    def sums(self, sweep: Sweep, states: Sequence[Any], rows: GridRows, seen: GridRows, x: Tensor) -> Any:
        def take(**inputs: Any) -> Tensor:
            raise _EnoughError(sweep.compute(rows, *states, **_supply(sweep, rows, seen, inputs)))

        try:
            self._called(take, seen, x)
        except _EnoughError as enough:
            return enough.state
        raise SubquadError(f"{type(self.block).__name__} can't be streamed: it did not ask its mechanism")

    def behind(self, states: Sequence[Any], rows: GridRows, seen: GridRows, x: Tensor) -> Tensor:
        sweep = self.streaming.answers
        # rows that convolutions behind attention look at; those farther off are wrong, and nothing that stays sees them
        wider = rows.widened(self.reach)

        def answer(**inputs: Any) -> Tensor:
            y = sweep.compute(wider, *states, **_supply(sweep, wider, seen, inputs))
            if wider == seen:
                return y
            whole = y.new_zeros(*y.shape[:2], seen.num_tokens, y.shape[-1])
            wider.of(seen, whole).copy_(y)
            return whole

        return rows.of(seen, self._called(answer, seen, x))

    def _called(self, instead: Callable[..., Tensor], seen: GridRows, x: Tensor) -> Tensor:
        # layers of other libraries are not handed the grid, and are told of it
        told = getattr(self.attention, "standing_on", None)
        with in_forwards_place(self.inner, instead), nullcontext() if told is None else told(seen):
            return self.call(self.block, x, seen)


class _InPlace:
    """What a module's `forward` is while threads let it compute something else: each its own, others what it does."""

    def __init__(self, own: Callable[..., Tensor]) -> None:
        self.own, self.by_thread = own, dict[int, Callable[..., Tensor]]()

    @property
    def computes_the_same(self) -> bool:
        """Whether this thread is none of them."""
        return threading.get_ident() not in self.by_thread

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.by_thread.get(threading.get_ident(), self.own)(*args, **kwargs)


_CHANGING = threading.Lock()
"""Held while something is put in a forward's place, or taken away: several threads may walk through one network."""


@contextmanager
def in_forwards_place(module: nn.Module, instead: Callable[..., Tensor]) -> Iterator[None]:
    """Let a module compute something else inside this context, in this thread alone, its hooks as they are."""
    here = threading.get_ident()
    with _CHANGING:
        place = vars(module).get("forward")
        if not isinstance(place, _InPlace):
            place = module.forward = _InPlace(module.forward)
        before = place.by_thread.get(here)
        place.by_thread[here] = instead
    try:
        yield
    finally:
        with _CHANGING:
            del place.by_thread[here]
            if before is not None:
                place.by_thread[here] = before
            if not place.by_thread:
                _take_away(module, place)


def _take_away(module: nn.Module, place: _InPlace) -> None:
    """Give a module the forward back that it had before."""
    del module.forward
    if getattr(place.own, "__func__", None) is not type(module).forward:
        module.forward = place.own


class _EnoughError(Exception):
    """Leaves a block behind its mechanism, with what that has summed up."""

    def __init__(self, state: Any) -> None:
        self.state = state


def _supply(sweep: Sweep, rows: GridRows, seen: GridRows, inputs: dict[str, Any]) -> dict[str, Any]:
    """What a sweep wants of some rows, of the inputs of all that are seen."""
    return {name: part_of(inputs[name], rows.widened(reach), seen) for name, reach in sweep.wanted.items()}


def part_of(value: Any, rows: GridRows, seen: TokenGrid) -> Any:
    """What stands on some rows, of tokens (…, n, d), or a rotation of them, that stand on more rows or all."""
    if isinstance(value, Rotation):
        return value._replace(cos=rows.of(seen, value.cos), sin=rows.of(seen, value.sin))
    return None if value is None else rows.of(seen, value)


def walk_of(block: Any, grid: TokenGrid, call: Call, rotation: RotationOf) -> BlockWalk:
    """How to walk through a block that stands on `grid`, whose network calls it as `call` does.

    Raises:
        SubquadError: its mechanism can't be streamed, in one line that says why.
    """
    attention: Any = attention_of(block)
    is_plain = type(block) is Block and type(attention) is SelfAttention
    if is_plain and not any(map(is_heard_by_others, (block, attention, attention.inner))):
        return PlainBlock(block, grid, rotation)
    if not hasattr(attention, "inner"):
        what = f"{type(block).__name__}'s {type(attention).__name__}"
        raise SubquadError(f"{what} can't be streamed: a mechanism with a state can, subquad.convert(model, 'linear')")
    if getattr(attention, "reduce", None) is not None:
        raise SubquadError(
            f"keys that are reduced {attention.sr_ratio} times can't be streamed: make the network with sr_ratio=1"
        )
    if has_own_forward(attention.inner):
        raise SubquadError(
            f"a {type(attention.inner).__name__} with a forward of its own can't be streamed: undo that, or make it a "
            "mechanism"
        )
    return WholeBlock(block, grid, call)


def attention_of(block: Any) -> Any:
    """The attention layer of a block, as libraries call it; None where it has none."""
    return next((part for name in ("attn", "attention") if (part := getattr(block, name, None)) is not None), None)


def is_heard_by_others(module: nn.Module) -> bool:
    """Whether a stranger listens to a module, or has put a forward of another result in its forward's place."""
    kinds = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    hooks = [hook for hooks in kinds for hook in hooks.values()]
    own = (str(getattr(hook, "__module__", "")).startswith("subquad.") for hook in hooks)
    return has_own_forward(module) or not all(own)


def has_own_forward(module: nn.Module) -> bool:
    """Whether something of another result stands in the place of a module's forward."""
    return "forward" in vars(module) and not getattr(module.forward, "computes_the_same", False)


def check_is_not_heard(module: nn.Module) -> None:
    """Raise where a stranger listens to a module that a walk does not call, because it would see all tokens at once."""
    if is_heard_by_others(module):
        raise SubquadError(
            f"{type(module).__name__} has a hook or a forward of its own, which sees the whole image, and can't be "
            "streamed so: take it away, or put it on a layer within"
        )


def reach_of(module: nn.Module, *, without: nn.Module | None = None) -> int:
    """How many rows of what a module gives look beyond some of them, by all of its convolutions together, at most."""
    left_out = set() if without is None else set(without.modules())
    reach = 0
    for part in module.modules():
        if part in left_out:
            continue
        if isinstance(part, LocalConv):
            reach += part.reach
        elif isinstance(part, nn.Conv2d):
            padding = part.padding[0] if isinstance(part.padding, tuple) else None
            stride = part.stride[0]
            reach += -(-max(rows_beside(part.kernel_size[0], stride, padding, part.dilation[0])) // stride)
    return reach
