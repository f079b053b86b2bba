"""The explicit attention of every layer of a network, for given images. Quadratic in the number of tokens."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from subquad.analysis.spectra import Ranks, ranks
from subquad.attention import ATTENTION
from subquad.grid import TokenGrid
from subquad.models.less_attention import LessAttention, ScoreAttention

NAMES: dict[type, str] = {cls: name for name, cls in ATTENTION.items()} | {
    ScoreAttention: "softmax",
    LessAttention: "less",
}
"""What a layer's class is called."""


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
    """

    name: str
    mechanism: str
    weights: Tensor
    grid: TokenGrid
    kv_grid: TokenGrid
    module: nn.Module | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def ranks(self) -> Ranks:
        """Of the weights, (b, h, s) each; several measures are made of them, and they are cubic in the tokens."""
        return ranks(self.weights)


Visit = Callable[[LayerAttention], None]


def attention_weights(model: nn.Module, images: Tensor) -> list[LayerAttention]:
    """The attention of all layers, from the first to the last, in one pass over `images` (b, c, height, width).

    The network is left as it was: its mode, its parameters, its hooks.
    """
    layers: list[LayerAttention] = []
    visit_attention(model, images, layers.append)
    return layers


def visit_attention(model: nn.Module, images: Tensor, visit: Visit) -> None:
    """Hand each layer's attention to `visit` while `images` pass through the network: one map is held at a time.

    Reads our networks, and those of timm whose attention gives its weights to a dropout `attn_drop`, as its ViTs and
    Swins do. The network is left as it was, and computes what it would have.
    """
    with ExitStack() as hooks, kept_modes(model), torch.no_grad():
        for name, module in model.named_modules():
            if is_mechanism(module):
                hooks.enter_context(_mechanism(name, module, visit))
            elif isinstance(module, ScoreAttention | LessAttention):
                hooks.enter_context(_scores(name, module, visit))
            elif gives_weights(module):
                hooks.enter_context(_timm(name, module, visit, lambda count: timm_grid(model, images, count)))
        model.eval()
        model(images)


def is_mechanism(module: Any) -> bool:
    """Whether a module keeps the contract of `ATTENTION`."""
    return hasattr(module, "inputs") and hasattr(module, "weights")


def gives_weights(module: Any) -> bool:
    """Whether a module of timm's hands its weights to a dropout, once its fused form is off."""
    return isinstance(getattr(module, "attn_drop", None), nn.Module) and hasattr(module, "fused_attn")


@contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Afterwards every module trains, or does not, as before."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def unfused(module: Any) -> Iterator[None]:
    """A layer of timm's that computes its weights."""
    before, module.fused_attn = module.fused_attn, False
    try:
        yield
    finally:
        module.fused_attn = before


@contextmanager
def _mechanism(name: str, module: Any, visit: Visit) -> Iterator[None]:
    def record(_: Any, __: Any, supply: dict[str, Any]) -> None:
        inputs = {word: value for word, value in supply.items() if word not in ("grid", "kv_grid")}
        weights = module.weights(**{word: value for word, value in supply.items() if word != "v"})
        kind = NAMES.get(type(module), type(module).__name__)
        visit(LayerAttention(name, kind, weights, supply["grid"], supply["kv_grid"], module, inputs))

    with module.register_forward_pre_hook(record, with_kwargs=True):
        yield


@contextmanager
def _scores(name: str, module: Any, visit: Visit) -> Iterator[None]:
    """LaViT's layers, whose scores come out of them where a later layer needs them."""

    def record(_: Any, given: tuple[Any, ...], supply: dict[str, Any], found: tuple[Any, Any]) -> None:
        scores = found[1]
        if scores is None:
            scores = module.scores(*given[:2])
        grid = supply["grid"]
        visit(LayerAttention(name, NAMES[type(module)], scores.softmax(-1)[:, :, None], grid, grid, module))

    with module.register_forward_hook(record, with_kwargs=True):
        yield


@contextmanager
def _timm(name: str, module: Any, visit: Visit, grid_of: Callable[[int], TokenGrid]) -> Iterator[None]:
    inputs: dict[str, Tensor] = {}

    def read(_: Any, __: Any, projected: Tensor) -> None:
        parts = projected.unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
        inputs.update(zip("qkv", parts.unbind(0), strict=True))

    def record(_: Any, given: tuple[Tensor]) -> None:
        weights = given[0]
        grid = window_grid(module, weights.shape[-1]) or grid_of(weights.shape[-1])
        visit(LayerAttention(name, "softmax", weights[:, :, None], grid, grid, module, dict(inputs)))

    with ExitStack() as stack:
        stack.enter_context(unfused(module))
        if isinstance(getattr(module, "qkv", None), nn.Linear):
            stack.enter_context(module.qkv.register_forward_hook(read))
        stack.enter_context(module.attn_drop.register_forward_pre_hook(record))
        yield


def window_grid(module: Any, count: int) -> TokenGrid | None:
    """The window that a layer of timm's attends in, if it has one of `count` tokens."""
    window = getattr(module, "window_size", None)
    height, width = window if isinstance(window, tuple | list) else (window, window)
    if not isinstance(height, int) or not isinstance(width, int) or height * width != count:
        return None
    return TokenGrid(height, width)


def timm_grid(model: Any, images: Tensor, count: int) -> TokenGrid:
    """Where the tokens of a plain network of timm's stand; in a row where its patches do not tell."""
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if isinstance(patch, tuple | list):
        height, width = (-(-side // step) for side, step in zip(images.shape[-2:], patch, strict=True))
        if 0 <= count - height * width < 32:
            return TokenGrid(height, width, count - height * width)
    return TokenGrid(1, count)
