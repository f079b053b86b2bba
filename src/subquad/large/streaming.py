"""A network over an image whose tokens are too many for memory at once: some rows of the grid at a time, exactly.

A layer is two walks over the tokens. The first adds up what its mechanism needs of all of them (`Streaming.sums`), the
second answers the queries of some rows, and goes on with them through the projection and the MLP. What is kept is the
tokens, n·c numbers, and something constant: rows at work, and states.

Letters: b batch, n tokens, c channels, y x rows and columns.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from subquad.attention.sweeps import Streaming, Sweep, streaming_of
from subquad.errors import SubquadError
from subquad.grid import GridRows, TokenGrid, cut_into_rows
from subquad.large.token_store import TokenStore
from subquad.models.layers import Block, SelfAttention
from subquad.models.stages import Stage, feature_width_of

MOST_TOKENS = 8_192
"""Tokens at work at a time unless told otherwise: what a layer makes of them fits into a processor's cache."""
ROWS_FOR_EACH_BESIDE = 8
"""How many rows are at work, unless told otherwise, for each that is looked at above: those are computed twice."""

Watch = Callable[[int], None]
"""Hears of so many tokens that were gone through once more."""


def check_streamable(blocks: Sequence[nn.Module], grid: TokenGrid) -> None:
    """Raise a SubquadError where one of the blocks can't answer some rows at a time, in a line that says why."""
    for block in blocks:
        attention = getattr(block, "attn", None)
        if type(block) is not Block or type(attention) is not SelfAttention:
            what = type(block).__name__ if type(block) is not Block else type(attention).__name__
            raise SubquadError(f"{what} can't be streamed: blocks of the plain host can (deit_tiny and its like)")
        streaming_of(attention.inner, grid)


class StreamedStage:
    """The blocks of a stage over tokens in a store.

    Args:
        stage: in evaluation mode.
        grid: the tokens' grid.
        store: has the tokens, and gets those behind each block.
        dtype: what is computed in, that of the parameters.
        most_tokens: at work at a time; `MOST_TOKENS`, or more where rows beside are looked at, if left out.
        watch: hears of progress, once for each sweep over a part.
    """

    def __init__(
        self,
        stage: Stage,
        grid: TokenGrid,
        store: TokenStore,
        dtype: torch.dtype,
        *,
        most_tokens: int | None = None,
        watch: Watch = lambda tokens: None,
    ) -> None:
        check_streamable(list(stage.blocks), grid)
        self.stage, self.grid, self.store, self.dtype, self.watch = stage, grid, store, dtype, watch
        self.most_tokens = most_tokens

    def parts(self, reach: int = 0) -> list[GridRows]:
        """The grid in parts, of which each looks at `reach` rows above and below."""
        if self.most_tokens is not None:
            return cut_into_rows(self.grid, self.most_tokens)
        return cut_into_rows(self.grid, max(MOST_TOKENS, ROWS_FOR_EACH_BESIDE * reach * self.grid.width))

    def steps(self) -> list[Callable[[], None]]:
        """What takes the tokens through all blocks: each step replaces all tokens once."""
        steps: list[Callable[[], None]] = []
        for block in self.stage.blocks:
            steps += [partial(self._position, block)] if block.cpe is not None else []
            steps.append(partial(self._mix, block))
        return steps

    @property
    def total(self) -> int:
        """Tokens that the steps go through, each as often as it is looked at."""
        blocks: Any = self.stage.blocks
        sweeps = sum(1 + len(streaming_of(block.attn.inner, self.grid).sums) for block in blocks)
        return self.grid.num_tokens * (sweeps + sum(block.cpe is not None for block in blocks))

    def _position(self, block: Any) -> None:
        """Add the position that a block's convolution makes of the tokens."""
        self._replace(1, lambda rows, seen, x: rows.of(seen, block.cpe(x, grid=seen)))

    def _mix(self, block: Any) -> None:
        """Take the tokens through the rest of a block."""
        streaming = streaming_of(block.attn.inner, self.grid)
        states = self.states(block, streaming)
        sweep = streaming.answers

        def through(rows: GridRows, seen: GridRows, x: Tensor) -> Tensor:
            supply = self._supply(block, sweep, rows, seen, x)
            y = sweep.compute(rows, *states, **supply).transpose(1, 2).flatten(2)
            own = rows.of(seen, x)
            return block.feed_forward(own + block.ls1(block.attn.proj(y)))

        self._replace(sweep.reach, through)

    def states(self, block: Any, streaming: Streaming) -> list[Any]:
        """Sum up what a block's mechanism needs of all tokens."""
        states: list[Any] = []
        for sweep in streaming.sums:
            state = None
            for rows in self.parts(sweep.reach):
                seen = rows.widened(sweep.reach)
                x = self.store.read(seen.tokens).to(self.dtype)
                part = sweep.compute(rows, *states, **self._supply(block, sweep, rows, seen, x))
                state = part if state is None else sweep.merge(state, part)
                self.watch(rows.num_tokens)
            states.append(state)
        return states

    def _replace(self, reach: int, function: Callable[[GridRows, GridRows, Tensor], Tensor]) -> None:
        """Let `function` of the rows, the rows that it sees, and the tokens of these, take the tokens' place."""
        before: Tensor | None = None
        parts = self.parts(reach)
        for rows, following in zip(parts, [*parts[1:], None], strict=True):
            seen = rows.widened(reach)
            x = self.store.read(slice(rows.tokens.start, seen.tokens.stop)).to(self.dtype)
            # rows above as they were: the store may have what became of them
            x = x if before is None else torch.cat([before, x], dim=1)
            if reach and following is not None:
                start = following.widened(reach).tokens.start - seen.tokens.start
                before = x[:, start : rows.tokens.stop - seen.tokens.start].clone()
            self.store.write(rows.tokens, function(rows, seen, x))
            self.watch(rows.num_tokens)
        self.store.turn()

    def _supply(self, block: Any, sweep: Sweep, rows: GridRows, seen: GridRows, x: Tensor) -> dict[str, Any]:
        """What a sweep wants of some rows, from the tokens (b, n, c) of all rows that it sees."""
        attention: SelfAttention = block.attn
        x = block.norm1(x)
        x = x if attention.pre_norm is None else attention.pre_norm(x)
        supply: dict[str, Any] = {}
        wanted = dict.fromkeys(sweep.inputs, 0) | sweep.beside
        for reach in sorted(set(wanted.values())):
            here = rows.widened(reach)
            names = [name for name, own in wanted.items() if own == reach]
            tokens = here.of(seen, x)
            given = {"x": tokens, "rotation": self._rotation(block, here)}
            parts = attention.some_heads(tokens, [name for name in names if name in attention.projected])
            parts = attention.between(given | parts)
            supply |= {name: parts[name] for name in names}
        return supply

    def _rotation(self, block: Any, rows: GridRows) -> Any:
        rope = self.stage.rope
        if rope is None:
            return None
        device = next(block.parameters()).device
        return rope(rows, device, self.dtype, feature_width=feature_width_of(block))


def embedded(stage: Stage, image: Any, grid: TokenGrid, parts: Sequence[GridRows]) -> Iterator[tuple[GridRows, Tensor]]:
    """The tokens (1, n, c) that go into a stage's blocks, some rows at a time, with the rows.

    `image` is read by rows: `image.rows(first, behind)` gives (1, channels, y, x), as a network takes it.
    """
    embed: Any = stage.embed
    for rows in parts:
        yield rows, stage.placed(embed.of_rows(image, rows.first, rows.behind), rows)
