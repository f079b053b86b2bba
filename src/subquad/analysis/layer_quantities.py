"""What a layer's attention gives for each of its maps, (b, h, s), or None where it has nothing of the kind."""

from collections.abc import Callable

import torch
from torch import Tensor

from subquad.analysis.probes import LayerAttention, is_mechanism
from subquad.analysis.soft_kernels import half_correlation, newton_convergence
from subquad.analysis.spectra import centred, ranks
from subquad.attention import PolaAttention, SoftAttention, traits_of
from subquad.attention.soft import soft_scale
from subquad.grid import TokenGrid
from subquad.ops.soft_formula import gaussian_kernel, newton_start

OfLayer = Callable[[LayerAttention], Tensor | None]

MOST_TOKENS = 2048
"""Of a map whose singular values are computed: their cost is cubic."""


def on_map(measure: Callable[[Tensor, TokenGrid], Tensor]) -> OfLayer:
    """What `measure` gives for tokens of a map that attend to themselves, its mean over them."""

    def of(layer: LayerAttention) -> Tensor | None:
        if not layer.on_its_map:
            return None
        return measure(layer.weights, layer.grid).mean(-1)

    return of


def if_square(measure: Callable[[Tensor], Tensor]) -> OfLayer:
    """What `measure` gives for tokens that attend to themselves."""

    def of(layer: LayerAttention) -> Tensor | None:
        # a token alone, as in the last stage for small images, has no others
        alone = layer.weights.shape[-1] < 2
        return measure(layer.weights) if layer.grid == layer.kv_grid and not alone else None

    return of


def map_rank(kind: str) -> OfLayer:
    """A rank of the map by its name in `Ranks`, as a share of the shorter side."""

    def of(layer: LayerAttention) -> Tensor | None:
        count = min(layer.weights.shape[-2:])
        return getattr(layer.ranks, kind) / count if count <= MOST_TOKENS else None

    return of


def feature_rank(kind: str, *, branch: bool) -> OfLayer:
    """A rank of what a head gives (`mixed`), the mean token taken off, as a share of its channels."""

    def of(layer: LayerAttention) -> Tensor | None:
        features = mixed(layer, branch=branch)
        if features is None or min(features.shape[-2:]) > MOST_TOKENS:
            return None
        return (getattr(ranks(centred(features)), kind) / min(features.shape[-2:]))[:, :, None]

    return of


def mixed(layer: LayerAttention, *, branch: bool = True) -> Tensor | None:
    """What a layer makes of its values, (b, h, n_q, d), with its local branch or without; gates are open."""
    v = layer.inputs.get("v")
    if v is None or layer.module is None:
        return None
    streams = v.unflatten(-1, (layer.weights.shape[2], -1)).movedim(-2, 2)
    whole = (layer.weights @ streams).movedim(2, -2).flatten(-2)
    if not branch or not is_mechanism(layer.module):
        return whole
    opened = {word: open_gate_of(layer) if word == "g" else value for word, value in layer.inputs.items()}
    # not by a call: the hook that shows the layer would come again
    return layer.module.forward(**opened, grid=layer.grid, kv_grid=layer.kv_grid)


def open_gate_of(layer: LayerAttention) -> Tensor:
    """The gate of a layer that has one, (b, h, n_q, d), with all of it open."""
    return torch.full_like(layer.inputs["g"], traits_of(layer.module).open_gate)


def gate_correlation(layer: LayerAttention) -> Tensor | None:
    """Give the mean correlation of the channels of the two halves of PolaFormer's gates."""
    gates = layer.inputs.get("g")
    if gates is None or not isinstance(layer.module, PolaAttention):
        return None
    of_images = [half_correlation(of_image.transpose(0, 1).flatten(1), gates.shape[1])["cross"] for of_image in gates]
    return torch.stack(of_images)[:, :, None]


def power(layer: LayerAttention) -> Tensor | None:
    """Give the mean power of each of PolaFormer's heads."""
    if not isinstance(layer.module, PolaAttention):
        return None
    return layer.module.powers().mean((1, 2))[None, :, None].expand(len(layer.weights), -1, 1)


def left_by_newton(layer: LayerAttention) -> Tensor | None:
    """Give what SOFT's steps leave of the identity; of those that invert by another way nothing."""
    if not isinstance(layer.module, SoftAttention):
        return None
    landmarks, _ = layer.module.landmarks(layer.inputs["q"], None, layer.grid)
    gram = gaussian_kernel(landmarks, landmarks)
    if (start := newton_start(layer.module.inverse, gram)) is None:
        return None
    ridge, alpha = start
    steps = newton_convergence(gram, layer.module.newton_steps, ridge=ridge, alpha=alpha)
    return steps.identity[..., -1:]


def kernel_error(layer: LayerAttention) -> Tensor | None:
    """Of SOFT: ‖S − W‖ / ‖S‖ of its weights W and the Gaussian kernel S of its tokens that they stand for."""
    if not isinstance(layer.module, SoftAttention):
        return None
    tokens = layer.inputs["q"].float()
    tokens = tokens * soft_scale(tokens)
    kernel = gaussian_kernel(tokens, tokens)[:, :, None]
    return (kernel - layer.weights).norm(dim=(-2, -1)) / kernel.norm(dim=(-2, -1))
