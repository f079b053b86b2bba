"""The explicit attention of every layer of a network, for given images. Quadratic in the number of tokens."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from subquad.analysis.probes import LayerAttention, probing

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

    def see(layer: LayerAttention) -> None:
        visit(layer)

    with probing(model, images, lambda count: see), torch.no_grad():
        model.eval()
        model(images)
