"""Probes: the explicit weights of every layer of a network while images pass through it, seen or replaced.

Three kinds of layers show their weights: those that keep the contract of `ATTENTION`, LaViT's, and those of timm that
hand their weights to a dropout `attn_drop`, as its ViTs and Swins do.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from subquad.analysis.spectra import Ranks, ranks
from subquad.attention import ATTENTION, Traits, traits_of
from subquad.attention.key_removal import renormalised
from subquad.grid import TokenGrid
from subquad.models.less_attention import LessAttention, ScoreAttention

SOFTMAX = Traits(quadratic=True, key_removal=renormalised)
"""Of layers that are no mechanism of ours: their weights come out of a softmax."""


@dataclass(frozen=True)
class LayerAttention:
    """One layer's attention.

    Attributes:
        name: the mechanism's module within the network.
        mechanism: its name in `ATTENTION`, "less" for LaViT's layers that transform scores, else its class's.
        weights: (b, h, s, n_q, n_k), see `ATTENTION`; entries can be negative.
        grid: of the queries.
        kv_grid: of the keys.
        module: the mechanism itself; of LaViT and timm the layer, projections included.
        inputs: what it was given, by the names of `ATTENTION`; of LaViT nothing, of timm q, k and v where they are
            read off its projection.
        traits: of the mechanism.
        placed: whether it is known where tokens stand; else `grid` has them in a row.
    """

    name: str
    mechanism: str
    weights: Tensor
    grid: TokenGrid
    kv_grid: TokenGrid
    module: nn.Module | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    traits: Traits = SOFTMAX
    placed: bool = True

    @property
    def on_its_map(self) -> bool:
        """Whether several places of a map, or of a window of it, attend to themselves."""
        return self.placed and self.grid == self.kv_grid and self.grid.num_places > 1

    @cached_property
    def ranks(self) -> Ranks:
        """Of the weights, (b, h, s) each; several measures are made of them, and they are cubic in the tokens."""
        return ranks(self.weights)


Change = Callable[[LayerAttention], Tensor | None]
"""Sees a layer's attention; returns other weights to mix its values with, or None to leave it as it is."""


@contextmanager
def probing(
    model: nn.Module, images: Tensor, change_of: Callable[[int], Change], *, branches: bool = True
) -> Iterator[None]:
    """Inside, every layer of `model` that shows its weights hands them over when tokens pass through it.

    Afterwards the network is as it was: its modes, its parameters, its hooks.

    Args:
        model: ours, or one of timm's.
        images: (b, c, height, width), such as will pass through it: their size says where timm's tokens stand.
        change_of: makes what a layer is handed to, from the number of layers before it.
        branches: whether local branches stay where weights are replaced.
    """
    with ExitStack() as stack, _kept_modes(model):
        count = 0
        for name, module in model.named_modules():
            probe = probe_of(module)
            if probe is not None:
                stack.enter_context(probe(name, module, change_of(count), model, images, branches))
                count += 1
        yield


def is_mechanism(module: Any) -> bool:
    """Whether a module keeps the contract of `ATTENTION`."""
    return hasattr(module, "inputs") and hasattr(module, "weights")


def without_weights(model: nn.Module) -> str:
    """Why some layers of a network show no weights, where mechanisms have none: "…: …"; else empty."""
    for module in model.modules():
        if is_mechanism(module) and (reason := traits_of(module).no_weights):
            return f"{type(module).__name__} has no explicit weights: {reason}"
    return ""


Probe = Callable[[str, Any, Change, nn.Module, Tensor, bool], AbstractContextManager[None]]


def probe_of(module: nn.Module) -> Probe | None:
    """What looks into a module of this kind, if it shows weights."""
    if is_mechanism(module):
        return None if traits_of(module).no_weights else _mechanism
    if isinstance(module, ScoreAttention | LessAttention):
        return _scores
    if isinstance(getattr(module, "attn_drop", None), nn.Module) and hasattr(module, "fused_attn"):
        return _timm
    return None


@contextmanager
def _mechanism(
    name: str, module: Any, change: Change, model: nn.Module, images: Tensor, branches: bool
) -> Iterator[None]:
    """What keeps the contract: its forward gives the branch and the gate that the weights do not have."""
    kind = ATTENTION.name_of(type(module)) or type(module).__name__

    def hand_over(_: Any, __: Any, supply: dict[str, Any], y: Tensor) -> Tensor | None:
        weights = module.weights(**{word: value for word, value in supply.items() if word != "v"})
        grid, kv_grid = supply["grid"], supply["kv_grid"]
        inputs = {word: value for word, value in supply.items() if word not in ("grid", "kv_grid")}
        changed = change(LayerAttention(name, kind, weights, grid, kv_grid, module, inputs, traits_of(module)))
        if changed is None:
            return None
        streams = supply["v"].unflatten(-1, (weights.shape[2], -1)).movedim(-2, 2)
        # with its branch the whole stays, and what changes is added
        mixed = (changed - weights if branches else changed).to(streams.dtype) @ streams
        mixed = mixed.movedim(2, -2).flatten(-2)
        if (gate := supply.get("g")) is not None:
            opening = traits_of(module).gate
            mixed = mixed * (gate if opening is None else opening(gate))
        return y + mixed if branches else mixed

    with module.register_forward_hook(hand_over, with_kwargs=True):
        yield


@contextmanager
def _scores(name: str, module: Any, change: Change, model: nn.Module, images: Tensor, branches: bool) -> Iterator[None]:
    """LaViT's layers; the scores that they hand on stay whole."""
    kind = "less" if isinstance(module, LessAttention) else "softmax"

    def hand_over(_: Any, given: tuple[Any, ...], supply: dict[str, Any], result: Any) -> tuple[Tensor, Any] | None:
        (x, scores), grid, kept = given, supply["grid"], result[1]
        own = module.scores(x, scores) if kept is None else kept
        changed = change(LayerAttention(name, kind, own.softmax(-1)[:, :, None], grid, grid, module))
        if changed is None:
            return None
        return module.proj((changed[:, :, 0] @ module.values(x)).transpose(1, 2).flatten(2)), kept

    with module.register_forward_hook(hand_over, with_kwargs=True):
        yield


@contextmanager
def _timm(name: str, module: Any, change: Change, model: nn.Module, images: Tensor, branches: bool) -> Iterator[None]:
    inputs: dict[str, Tensor] = {}
    given_to_layer: tuple[Any, ...] = ()

    def begin(_: Any, given: tuple[Any, ...]) -> None:
        nonlocal given_to_layer
        given_to_layer = given
        inputs.clear()

    def read(_: Any, __: Any, projected: Tensor) -> None:
        parts = projected.flatten(1, -2).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
        inputs.update(zip("qkv", parts.unbind(0), strict=True))

    def hand_over(_: Any, given: tuple[Tensor]) -> Tensor | None:
        weights = given[0]
        grids = _timm_grids(module, model, images, given_to_layer, weights)
        if grids is None:
            return None
        grid, kv_grid = (one or TokenGrid(1, count) for one, count in zip(grids, weights.shape[-2:], strict=True))
        own = dict(inputs) if weights.shape[-2] == weights.shape[-1] else {}
        placed = None not in grids
        changed = change(
            LayerAttention(name, "softmax", weights[:, :, None], grid, kv_grid, module, own, placed=placed)
        )
        return None if changed is None else changed[:, :, 0]

    with ExitStack() as stack:
        stack.enter_context(_unfused(module))
        stack.enter_context(module.register_forward_pre_hook(begin))
        # others project each head's queries, keys and values next to each other, or the places of several windows
        if isinstance(getattr(module, "qkv", None), nn.Linear) and not getattr(module, "head_first", False):
            stack.enter_context(module.qkv.register_forward_hook(read))
        stack.enter_context(module.attn_drop.register_forward_pre_hook(hand_over))
        yield


@contextmanager
def _kept_modes(model: nn.Module) -> Iterator[None]:
    """Afterwards every module trains, or does not, as before."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _unfused(module: Any) -> Iterator[None]:
    """A layer of timm's that computes its weights."""
    before, module.fused_attn = module.fused_attn, False
    try:
        yield
    finally:
        module.fused_attn = before


def _timm_grids(
    module: Any, model: nn.Module, images: Tensor, given: tuple[Any, ...], weights: Tensor
) -> tuple[TokenGrid | None, TokenGrid | None] | None:
    """Where queries and keys of a layer of timm's stand, which was `given` tokens; None where no tokens see tokens.

    That is so of channels that see channels (XCiT) and of a class token alone that looks (CaiT); and nothing is said of
    layers that compute all windows at once (Twins), or images and heads as one (SAM). Each grid is None where tokens
    see tokens and nothing tells where they stand.
    """
    if weights.dim() != 4 or not given or not isinstance(given[0], Tensor) or hasattr(module, "temperature"):
        return None
    tokens, size = given[0].shape[1:-1], given[1] if len(given) > 1 else None
    queries, keys = weights.shape[-2:]
    sides = [tokens, given[0].shape[2:], size if isinstance(size, tuple | list) else ()]
    placed = (TokenGrid(*map(int, pair)) for pair in sides if len(pair) == 2 and math.prod(pair) == queries)
    if queries != keys:
        # keys of a map that is smaller by a whole number, as PVT's and Twins' are
        grid = next(placed, None)
        step = math.isqrt(queries // keys)
        if grid is None or (grid.height // step) * (grid.width // step) != keys:
            return None
        return grid, TokenGrid(grid.height // step, grid.width // step)
    if queries not in (math.prod(tokens), math.prod(given[0].shape[2:])):
        return None
    grid = _window_grid(module, keys) or next(placed, None) or _plain_grid(model, images, keys)
    return grid, grid


def _window_grid(module: Any, count: int) -> TokenGrid | None:
    """The window that a layer of timm's attends in, if it has one of `count` tokens."""
    window = getattr(module, "window_size", None)
    height, width = window if isinstance(window, tuple | list) else (window, window)
    if not isinstance(height, int) or not isinstance(width, int) or height * width != count:
        return None
    return TokenGrid(height, width)


def _plain_grid(model: Any, images: Tensor, count: int) -> TokenGrid | None:
    """Where the tokens of a plain network of timm's stand; None where its patches do not tell."""
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if isinstance(patch, tuple | list):
        height, width = (-(-side // step) for side, step in zip(images.shape[-2:], patch, strict=True))
        if 0 <= count - height * width < 32:
            return TokenGrid(height, width, count - height * width)
    return None
