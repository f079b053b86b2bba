"""Keys that a query does not see any more: its neighbourhood, or as many at random (InLine, arXiv 2412.06590, table 2).

The network is not retrained. How weights are made good depends on the mechanism, see `REMOVALS`; agents' two softmaxes
can't be told apart from their product, which is what is masked. Local branches are no attention: they stay, or are
switched off. Rows and columns of prefix tokens are untouched.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from subquad.analysis.explicit_attention import (
    NAMES,
    gives_weights,
    is_mechanism,
    kept_modes,
    timm_grid,
    unfused,
    window_grid,
)
from subquad.errors import SubquadError, unknown_name
from subquad.grid import TokenGrid
from subquad.models.less_attention import LessAttention, ScoreAttention

KINDS = ("none", "local", "random")


@dataclass(frozen=True)
class Removal:
    """What each query loses.

    Attributes:
        kind: "none", "local" for the window around it, "random" for as many keys outside of that window.
        window: side of the neighbourhood, odd; at borders it is cut, and as few are removed at random.
        seed: of the random keys, which differ from layer to layer.
    """

    kind: str = "none"
    window: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown_name("removal", self.kind, KINDS)
        if self.window < 1 or self.window % 2 == 0:
            raise SubquadError(f"a neighbourhood around a query has an odd side, got {self.window}")

    def __str__(self) -> str:
        return "none" if self.kind == "none" else f"{self.kind} {self.window**2}"


def removed_pairs(grid: TokenGrid, removal: Removal, layer: int = 0) -> Tensor:
    """Which keys (columns) each query (row) loses, (n, n) bool."""
    pairs = torch.zeros(grid.num_tokens, grid.num_tokens, dtype=torch.bool)
    if removal.kind == "none":
        return pairs
    place = torch.arange(grid.num_places)
    y, x = place // grid.width, place % grid.width
    half = removal.window // 2
    near = ((y[:, None] - y).abs() <= half) & ((x[:, None] - x).abs() <= half)
    if removal.kind == "random":
        draws = torch.rand(near.shape, generator=torch.Generator().manual_seed(1000 * removal.seed + layer))
        rank = draws.masked_fill(near, 2).argsort(1).argsort(1)
        near = (rank < near.sum(1, keepdim=True)) & ~near
    pairs[grid.prefix :, grid.prefix :] = near
    return pairs


def renormalised(weights: Tensor, removed: Tensor) -> Tensor:
    """Rows without what is removed, brought back to their sums: what softmax and divisions do."""
    left = weights.masked_fill(removed, 0)
    total = left.sum(-1, keepdim=True)
    return left * (weights.sum(-1, keepdim=True) / total.where(total != 0, 1))


def recentred(weights: Tensor, removed: Tensor) -> Tensor:
    """InLine's rows over the keys that are left: their mean and number are those of what is left."""
    count, kept = weights.shape[-1], (~removed).sum(-1, keepdim=True).clamp(min=1).to(weights)
    mean = weights.masked_fill(removed, 0).sum(-1, keepdim=True) / kept
    return (1 / kept + (weights - mean) * (count / kept)).masked_fill(removed, 0)


def cut(weights: Tensor, removed: Tensor) -> Tensor:
    """Rows without what is removed, nothing else."""
    return weights.masked_fill(removed, 0)


REMOVALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": renormalised,
    "linear": renormalised,
    "focused": renormalised,
    "pola": renormalised,
    "agent": renormalised,
    "inline": recentred,
    "soft": cut,
}
"""What a mechanism's weights become: exact for all but agents."""


@contextmanager
def removing(model: nn.Module, removal: Removal, images: Tensor, *, branches: bool = True) -> Iterator[None]:
    """Inside, tokens of `model` do not see what is removed, where a whole map attends to itself.

    Args:
        model: ours, or one of timm's that `visit_attention` reads.
        removal: what is removed.
        images: such as will pass through it: their size says where timm's tokens stand.
        branches: False switches local branches off as well.

    Raises:
        SubquadError: nothing of it can be removed.
    """
    with ExitStack() as changes, kept_modes(model):
        count = 0
        for module in model.modules():
            if is_mechanism(module):
                changes.enter_context(_mechanism(module, removal, count, branches))
            elif isinstance(module, ScoreAttention | LessAttention):
                changes.enter_context(_scores(module, removal, count))
            elif gives_weights(module):
                changes.enter_context(_timm(module, removal, count, model, images))
            else:
                continue
            count += 1
        if not count:
            raise SubquadError(f"{type(model).__name__} shows no attention that keys could be removed from")
        yield


@contextmanager
def _replaced(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """A module that computes something else meanwhile."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


@contextmanager
def _mechanism(module: Any, removal: Removal, layer: int, branches: bool) -> Iterator[None]:
    whole, change = module.forward, REMOVALS.get(NAMES.get(type(module), ""), renormalised)

    def forward(*, v: Tensor, grid: TokenGrid, kv_grid: TokenGrid, **inputs: Any) -> Tensor:
        y = whole(v=v, grid=grid, kv_grid=kv_grid, **inputs)
        if grid != kv_grid or grid.height < 2:
            return y
        weights = module.weights(**inputs, grid=grid, kv_grid=kv_grid)
        # where nothing is removed nothing is touched, not by a rounding either
        left = weights
        if removal.kind != "none":
            left = change(weights, removed_pairs(grid, removal, layer).to(weights.device))
        if branches:
            left = left - weights
        streams = v.unflatten(-1, (weights.shape[2], -1)).movedim(-2, 2)
        mixed = (left.to(v.dtype) @ streams).movedim(2, -2).flatten(-2)
        gate = inputs.get("g")
        mixed = mixed if gate is None else mixed * gate
        return y + mixed if branches else mixed

    with _replaced(module, forward):
        yield


@contextmanager
def _scores(module: Any, removal: Removal, layer: int) -> Iterator[None]:
    """LaViT's layers; the scores that they hand on stay whole."""
    whole = module.forward

    def forward(x: Tensor, scores: Tensor | None, *, grid: TokenGrid) -> tuple[Tensor, Tensor | None]:
        y, kept = whole(x, scores, grid=grid)
        if removal.kind == "none" or grid.height < 2:
            return y, kept
        own = module.scores(x, scores) if kept is None else kept
        left = renormalised(own.softmax(-1), removed_pairs(grid, removal, layer).to(x.device))
        return module.proj((left @ module.values(x)).transpose(1, 2).flatten(2)), kept

    with _replaced(module, forward):
        yield


@contextmanager
def _timm(module: Any, removal: Removal, layer: int, model: nn.Module, images: Tensor) -> Iterator[None]:
    def without(_: Any, __: Any, weights: Tensor) -> Tensor:
        count = weights.shape[-1]
        grid = window_grid(module, count) or timm_grid(model, images, count)
        return renormalised(weights, removed_pairs(grid, removal, layer).to(weights.device))

    with unfused(module), module.attn_drop.register_forward_hook(without):
        yield
