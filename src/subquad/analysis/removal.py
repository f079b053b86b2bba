"""Keys that a query does not see any more: its neighbourhood, or as many at random (InLine, arXiv 2412.06590, table 2).

The network is not retrained. How weights are made good is said by the mechanism, `Traits.key_removal`: exactly for all
of ours but agents, whose two softmaxes can't be told apart from their product, which is what is masked, and those that
divide turned products by what does not turn, whose rows keep their sums. MALA's are refused: they do not tell enough.
Local branches are no attention: they stay, or are switched off. Rows and columns of prefix tokens are untouched.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from subquad.analysis.probes import Change, LayerAttention, is_mechanism, probe_of, probing, without_weights
from subquad.attention import traits_of
from subquad.errors import SubquadError, unknown_name
from subquad.grid import TokenGrid

KINDS = ("none", "local", "random")


@dataclass(frozen=True)
class Removal:
    """What each query loses.

    Attributes:
        kind: "none", "local" for the window around it, "random" for as many keys outside of that window, or all of
            them where they are fewer: compare the two by `removed_pairs` on maps that hold few windows.
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


def check_removal(model: nn.Module) -> None:
    """Raise a SubquadError where nothing can be removed from `model`, or a mechanism does not say how."""
    if reason := without_weights(model):
        raise SubquadError(f"no keys can be removed from {type(model).__name__}: {reason}")
    layers = [module for module in model.modules() if probe_of(module) is not None]
    if not layers:
        raise SubquadError(f"{type(model).__name__} shows no attention that keys could be removed from")
    for module in layers:
        if is_mechanism(module) and traits_of(module).key_removal is None:
            raise SubquadError(
                f"{type(module).__name__} does not say what its weights become without some keys: "
                "give its traits a key_removal (docs/adding-a-mechanism.md)"
            )


@contextmanager
def removing(model: nn.Module, removal: Removal, images: Tensor, *, branches: bool = True) -> Iterator[None]:
    """Inside, tokens of `model` do not see what is removed, where a whole map attends to itself.

    Args:
        model: ours, or one of timm's that `visit_attention` reads.
        removal: what is removed.
        images: such as will pass through it: their size says where timm's tokens stand.
        branches: False switches local branches off as well.

    Raises:
        SubquadError: nothing of it can be removed, or a mechanism does not say how; behind the passes, where none of
            their layers had keys to lose.
    """
    check_removal(model)
    on_maps: list[bool] = []

    def change_of(count: int) -> Change:
        def change(layer: LayerAttention) -> Tensor | None:
            on_maps.append(layer.on_its_map)
            return _without(layer, removal, count, branches)

        return change

    with probing(model, images, change_of, branches=branches):
        yield
    if removal.kind != "none" and on_maps and not any(on_maps):
        raise SubquadError(
            f"no layer of {type(model).__name__} lost keys: they stand on a smaller map than the queries or on one "
            "place, or nothing tells where they stand"
        )


def _without(layer: LayerAttention, removal: Removal, count: int, branches: bool) -> Tensor | None:
    """A layer's weights without what is removed; None where it stays as it is, not touched by a rounding either."""
    if not layer.on_its_map:
        return None
    if removal.kind == "none":
        return None if branches else layer.weights
    assert layer.traits.key_removal is not None
    removed = removed_pairs(layer.grid, removal, count).to(layer.weights.device)
    padding = layer.inputs.get("padding")
    if padding is None:
        return layer.traits.key_removal(layer.weights, removed)
    changed = torch.zeros_like(layer.weights)
    # what fills up a window is no key, so that it counts in no mean; the windows of an image are of few kinds
    for absent in padding.unique(dim=0):
        alike = (padding == absent).all(1)
        own = changed[alike]
        own[..., ~absent] = layer.traits.key_removal(layer.weights[alike][..., ~absent], removed[:, ~absent])
        changed[alike] = own
    return changed
