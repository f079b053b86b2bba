"""Blocks in training some rows at a time: what they make of these is computed again in the backward pass.

A block is walked through as a stream does it (`block_walks.py`), with gradients: sums over all rows, then the answers
of some rows with projection and MLP behind them. What is held for the backward pass is the tokens in front of a block
and behind it, and the states; of what lies between only that of the rows at work is ever there.

Letters: b batch, n tokens, c channels.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from subquad.besides import Network
from subquad.errors import SubquadError
from subquad.grid import GridRows, TokenGrid, cut_into_rows
from subquad.large.block_walks import BlockWalk, PlainBlock, has_own_forward, in_forwards_place, part_of, walk_of
from subquad.models.backbone import Backbone
from subquad.models.computed_again import computed_again
from subquad.ranges import checks_arguments
from subquad.rope import Rotation

DRAWS = 2
"""How often a block asks its stochastic depth: for attention and for the MLP."""


@checks_arguments
def chunk_blocks(model: Network, most_tokens: int = 8192) -> Network:
    """Let the blocks of a network take some rows of at most so many tokens of an image at a time, in place.

    Attention and MLPs are computed again in the backward pass, rows after rows, so that this stands for gradient
    checkpointing and `chunk_mlps` together. Results and gradients stay what they are; dropout of single elements
    (`drop_rate`) draws other ones.

    Args:
        model: a network of `create_model` whose blocks see all tokens by a mechanism with a state, or one that stands
            on such a backbone.
        most_tokens: of a chunk; one row at least.

    Returns:
        The network.

    Raises:
        SubquadError: for chunks of no tokens, and for networks that can't be computed so, in one line that says why.
    """
    if most_tokens < 1:
        raise SubquadError(f"a chunk has at least one token, got most_tokens={most_tokens}")
    backbones = [module for module in model.modules() if isinstance(module, Backbone)]
    if not backbones or not all(backbone.spreads for backbone in backbones):
        raise SubquadError(
            f"{type(model).__name__} has no blocks that could take some rows at a time: those of the plain host and "
            "of pyramids can; subquad.chunk_mlps is for others"
        )
    if any(hasattr(backbone, "exchange") for backbone in backbones):
        raise SubquadError("blocks of tokens that are spread over processes can't take chunks: take subquad.chunk_mlps")
    for backbone in backbones:
        for stage in backbone.stages:
            for block in stage.blocks:
                _check(block, stage.grid)
    for backbone in backbones:
        for stage in backbone.stages:
            for block in stage.blocks:
                block.forward = InChunks(block, most_tokens)
    return model


def _check(block: nn.Module, grid: TokenGrid) -> None:
    if has_own_forward(block):
        raise SubquadError(f"a {type(block).__name__} has a forward of its own, which chunks leave out: undo it")
    walk_of(block, grid, _never, _never)
    if norms := [type(part).__name__ for part in block.modules() if isinstance(part, _BatchNorm)]:
        raise SubquadError(f"a {norms[0]} in a {type(block).__name__} has to see all rows: it can't be taken in chunks")


def _never(*arguments: Any) -> Any:
    raise AssertionError("nothing is computed where a network is checked")


class InChunks:
    """What a block's `forward` is: an object, so that it is copied and pickled with the block."""

    computes_the_same = True
    """As what it stands for: a tape of its block holds."""

    def __init__(self, block: Any, most_tokens: int) -> None:
        self.block, self.most_tokens = block, most_tokens

    def __call__(self, x: Tensor, *, grid: TokenGrid, rotation: Rotation | None = None) -> Tensor:
        """(b, n, c) to (b, n, c)."""
        forward = type(self.block).forward
        # whose mechanism is in other hands is some rows of a walk already
        if x.shape[1] <= self.most_tokens or has_own_forward(self.block.attn.inner):
            return _whole(forward, self.block, x, grid, rotation)

        def call(block: Any, x: Tensor, rows: GridRows) -> Tensor:
            return _whole(forward, block, x, rows, part_of(rotation, rows, grid))

        walk = walk_of(self.block, grid, call, lambda block, rows: part_of(rotation, rows, grid))
        if isinstance(walk, PlainBlock) and self.block.cpe is not None:
            x = self.block.cpe(x, grid=grid)
        return _through(walk, _Chunks(self.block, x, cut_into_rows(grid, self.most_tokens)), _drops(self.block, x))


def _whole(forward: Callable[..., Tensor], block: Any, x: Tensor, grid: TokenGrid, rotation: Any) -> Tensor:
    turned = {} if rotation is None else {"rotation": rotation}
    return forward(block, x, grid=grid, **turned)


class _Chunks:
    """Tokens (b, n, c) of a block, cut into parts once, so that their gradients are put together once."""

    def __init__(self, block: nn.Module, x: Tensor, parts: list[GridRows]) -> None:
        self.block, self.parts = block, parts
        self.pieces = x.split([rows.num_tokens for rows in parts], dim=1)

    def again(self, function: Callable[[Tensor], Any], rows: GridRows) -> Any:
        """What a function makes of the tokens of some rows, computed again for the gradient, where there is one.

        What is kept for it are the parts themselves, and no copy of those rows.
        """
        wanted = rows.tokens
        cuts = [(max(wanted.start, part.tokens.start), min(wanted.stop, part.tokens.stop)) for part in self.parts]
        kept = [number for number, (first, behind) in enumerate(cuts) if first < behind]

        def joined(*pieces: Tensor) -> Any:
            own = [
                piece.narrow(1, cuts[number][0] - self.parts[number].tokens.start, cuts[number][1] - cuts[number][0])
                for number, piece in zip(kept, pieces, strict=True)
            ]
            return function(own[0] if len(own) == 1 else torch.cat(own, dim=1))

        pieces = [self.pieces[number] for number in kept]
        return computed_again(self.block, joined, *pieces) if torch.is_grad_enabled() else joined(*pieces)


def _through(walk: BlockWalk, chunks: _Chunks, drops: Callable[[], Any]) -> Tensor:
    """What a block makes of all tokens (b, n, c)."""
    states: list[Any] = []
    for sweep in walk.streaming.sums:
        state = None
        for rows in chunks.parts:
            seen = rows.widened(walk.reach + sweep.reach)
            part = chunks.again(partial(walk.sums, sweep, tuple(states), rows, seen), seen)
            state = part if state is None else sweep.merge(state, part)
        states.append(state)

    def behind(rows: GridRows, seen: GridRows, x: Tensor) -> Tensor:
        with drops():
            return walk.behind(states, rows, seen, x)

    reach = walk.reach + walk.streaming.answers.reach
    wide = [(rows, rows.widened(reach)) for rows in chunks.parts]
    return torch.cat([chunks.again(partial(behind, rows, seen), seen) for rows, seen in wide], dim=1)


def _drops(block: nn.Module, x: Tensor) -> Callable[[], Any]:
    """A context in which stochastic depth, which leaves out branches of whole images, does in each chunk the same."""
    drawn: dict[DropPath, list[Tensor]] = {}
    for path in block.modules():
        if isinstance(path, DropPath) and path.training and path.drop_prob > 0:
            keep = 1 - path.drop_prob
            scale = keep if path.scale_by_keep and keep > 0 else 1.0
            drawn[path] = [x.new_empty(len(x), 1, 1).bernoulli_(keep).div_(scale) for _ in range(DRAWS)]

    @contextmanager
    def same() -> Iterator[None]:
        with ExitStack() as stack:
            for path, masks in drawn.items():
                left = iter(masks)
                stack.enter_context(in_forwards_place(path, lambda y, left=left: y * next(left)))
            yield

    return same
