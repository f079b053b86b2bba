"""A network over an image whose tokens are too many for memory at once: some rows of the grid at a time, exactly.

A layer is two walks over the tokens. The first adds up what its mechanism needs of all of them (`Streaming.sums`), the
second answers the queries of some rows, and goes on with them through the projection and the MLP. What is kept is the
tokens, n·c numbers, and something constant: rows at work, and states.

Letters: b batch, n tokens, c channels, y x rows and columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subquad.grid import GridRows, TokenGrid, cut_into_rows
from subquad.large.block_walks import BlockWalk, Call, PlainBlock, RotationOf, walk_of
from subquad.large.token_store import TokenStore
from subquad.models.stages import ImageRows

MOST_TOKENS = 8_192
"""Tokens at work at a time unless told otherwise: what a layer makes of them fits into a processor's cache."""
ROWS_FOR_EACH_BESIDE = 8
"""How many rows are at work, unless told otherwise, for each that is looked at above: those are computed twice."""

Watch = Callable[[int], None]
"""Hears of so many tokens that were gone through once more."""


@dataclass(frozen=True)
class StreamedBlocks:
    """Blocks on one grid, as their host has them.

    Attributes:
        grid: of the image at hand.
        dim: channels of a token.
        blocks: in turn.
        embed: the tokens (1, n, c) that go into the first of them, of some rows, from what is read by rows: the image,
            or the map of the blocks before.
        call: calls a block as the network does.
        rotation: how tokens turn.
        norm: of the tokens behind the last block.
        reach: rows of this grid that the embedding looks at above and below, in excess of its own.
    """

    grid: TokenGrid
    dim: int
    blocks: Sequence[Any]
    embed: Callable[[ImageRows, GridRows], Tensor]
    call: Call
    rotation: RotationOf
    norm: Callable[[Tensor], Tensor]
    reach: int = 0

    def walks(self) -> list[BlockWalk]:
        """How to walk through each block; raises a SubquadError where one can't be streamed, in a line."""
        return [walk_of(block, self.grid, self.call, self.rotation) for block in self.blocks]

    @property
    def num_steps(self) -> int:
        """Steps of a walk, each of which replaces all tokens once: the embedding, blocks, convolutions of positions."""
        return 1 + sum(1 + (_position_of(walk) is not None) for walk in self.walks())

    @property
    def total(self) -> int:
        """Tokens that the steps go through, each as often as it is looked at."""
        return self.grid.num_tokens * (self.num_steps + sum(len(walk.streaming.sums) for walk in self.walks()))


class StreamedStage:
    """Blocks over tokens in a store.

    Args:
        about: the blocks.
        store: gets the tokens, and those behind each block.
        dtype: what is computed in, that of the parameters.
        most_tokens: at work at a time; `MOST_TOKENS`, or more where rows beside are looked at, if left out.
        watch: hears of progress, once for each sweep over a part.
    """

    def __init__(
        self,
        about: StreamedBlocks,
        store: TokenStore,
        dtype: torch.dtype,
        *,
        most_tokens: int | None = None,
        watch: Watch = lambda tokens: None,
    ) -> None:
        self.about, self.grid, self.store, self.dtype, self.watch = about, about.grid, store, dtype, watch
        self.most_tokens = most_tokens
        self.walks = about.walks()
        self.shape = self.grid.shape

    def parts(self, reach: int = 0) -> list[GridRows]:
        """The grid in parts, of which each looks at `reach` rows above and below."""
        if self.most_tokens is not None:
            return cut_into_rows(self.grid, self.most_tokens)
        return cut_into_rows(self.grid, max(MOST_TOKENS, ROWS_FOR_EACH_BESIDE * reach * self.grid.width))

    def steps(self) -> list[Callable[[], None]]:
        """What takes the tokens through all blocks: each step replaces all tokens once."""
        steps: list[Callable[[], None]] = []
        for walk in self.walks:
            if (cpe := _position_of(walk)) is not None:
                steps.append(partial(self._position, cpe))
            steps.append(partial(self._mix, walk))
        return steps

    def rows(self, first: int, behind: int) -> Tensor:
        """Rows of the map (1, c, y, x) behind the blocks and their norm: what the next blocks' embedding reads."""
        rows = self.grid.rows(first, behind)
        return rows.to_image(self.normed(rows))

    def normed(self, rows: GridRows) -> Tensor:
        """The tokens (1, n, c) of some rows behind the blocks and their norm."""
        return self.about.norm(self.store.read(rows.tokens).to(self.dtype))

    def embed(self, image: ImageRows) -> None:
        """Make tokens of an image, or of the map of the blocks before."""
        for rows in self.parts(self.about.reach):
            self.store.write(rows.tokens, self.about.embed(image, rows))
            self.watch(rows.num_tokens)
        self.store.turn()

    def _position(self, cpe: Any) -> None:
        """Add the position that a block's convolution makes of the tokens."""
        self._replace(1, lambda rows, seen, x: rows.of(seen, cpe(x, grid=seen)))

    def _mix(self, walk: BlockWalk) -> None:
        """Take the tokens through a block, or the rest of it."""
        states = self.states(walk)
        self._replace(walk.reach + walk.streaming.answers.reach, partial(walk.behind, states))

    def states(self, walk: BlockWalk) -> list[Any]:
        """Sum up what a block's mechanism needs of all tokens."""
        states: list[Any] = []
        for sweep in walk.streaming.sums:
            state = None
            for rows in self.parts(reach := walk.reach + sweep.reach):
                seen = rows.widened(reach)
                x = self.store.read(seen.tokens).to(self.dtype)
                part = walk.sums(sweep, states, rows, seen, x)
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


def _position_of(walk: BlockWalk) -> Any:
    """The convolution of positions of a block that is walked through by its parts."""
    return walk.block.cpe if isinstance(walk, PlainBlock) else None
