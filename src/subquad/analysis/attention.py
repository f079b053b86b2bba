"""The explicit attention of every layer of a network, for given images. Quadratic in the number of tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from subquad.attention import ATTENTION
from subquad.grid import TokenGrid


@dataclass(frozen=True)
class LayerAttention:
    """One layer's attention.

    Attributes:
        name: the mechanism's module within the network.
        mechanism: its name in `ATTENTION`, else its class's.
        weights: (b, h, s, n_q, n_k), see `ATTENTION`; entries can be negative.
        grid: of the queries.
        kv_grid: of the keys.
    """

    name: str
    mechanism: str
    weights: Tensor
    grid: TokenGrid
    kv_grid: TokenGrid


def attention_weights(model: nn.Module, images: Tensor) -> list[LayerAttention]:
    """The attention of all layers, from the first to the last, in one pass over `images` (b, c, height, width).

    The network is left as it was: its mode, its parameters, its hooks.
    """
    layers: list[LayerAttention] = []
    visit_attention(model, images, layers.append)
    return layers


def visit_attention(model: nn.Module, images: Tensor, visit: Callable[[LayerAttention], None]) -> None:
    """Hand each layer's attention to `visit` while `images` pass through the network: one map is held at a time.

    The network is left as it was, and computes what it would have.
    """
    names = {cls: name for name, cls in ATTENTION.items()}

    def record(name: str, module: Any, supply: dict[str, Any]) -> None:
        given = {word: value for word, value in supply.items() if word != "v"}
        kind = names.get(type(module), type(module).__name__)
        visit(LayerAttention(name, kind, module.weights(**given), supply["grid"], supply["kv_grid"]))

    modes = [(module, module.training) for module in model.modules()]
    hooks = [
        module.register_forward_pre_hook(
            lambda module, _, supply, name=name: record(name, module, supply), with_kwargs=True
        )
        for name, module in model.named_modules()
        if hasattr(module, "inputs") and hasattr(module, "weights")
    ]
    try:
        model.eval()
        with torch.no_grad():
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training
