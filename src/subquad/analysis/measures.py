"""What can be measured on a layer's attention: each measure with what it says and what it is by chance."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.analysis.attention import LayerAttention, is_mechanism
from subquad.analysis.kernels import half_correlation, newton_convergence
from subquad.analysis.maps import diagonality, symmetry
from subquad.analysis.rows import attention_distance, entropy, local_mass, negative_mass, uniform_weights
from subquad.analysis.spectra import centred, ranks
from subquad.attention import PolaAttention, SoftAttention
from subquad.grid import TokenGrid
from subquad.ops.gaussian import gaussian_kernel

MOST_TOKENS = 2048
"""Of a map whose singular values are computed: their cost is cubic."""


@dataclass(frozen=True)
class Measure:
    """A measure of maps.

    Attributes:
        of: a layer's attention to a number for each map, (b, h, s), or None where it has none.
        unit: what it is called on an axis.
        says: what it is, in two sentences.
        baseline: its value for attention that looks everywhere alike, on the map of a layer, or by chance.
    """

    of: Callable[[LayerAttention], Tensor | None]
    unit: str
    says: str
    baseline: Callable[[TokenGrid], float | None] = lambda grid: None


def _is_map(layer: LayerAttention) -> bool:
    """Whether tokens of a map attend to themselves."""
    return layer.grid == layer.kv_grid and layer.grid.height > 1


def _on_map(measure: Callable[[Tensor, TokenGrid], Tensor]) -> Callable[[LayerAttention], Tensor | None]:
    return lambda layer: measure(layer.weights, layer.grid).mean(-1) if _is_map(layer) else None


def _if_square(measure: Callable[[Tensor], Tensor]) -> Callable[[LayerAttention], Tensor | None]:
    return lambda layer: measure(layer.weights) if layer.grid == layer.kv_grid else None


def _effective_rank(layer: LayerAttention) -> Tensor | None:
    count = min(layer.weights.shape[-2:])
    return ranks(layer.weights).effective / count if count <= MOST_TOKENS else None


def mixed(layer: LayerAttention, *, branch: bool = True) -> Tensor | None:
    """What a layer makes of its values, (b, h, n_q, d), with its local branch or without; gates are open."""
    v = layer.inputs.get("v")
    if v is None or layer.module is None:
        return None
    streams = v.unflatten(-1, (layer.weights.shape[2], -1)).movedim(-2, 2)
    whole = (layer.weights @ streams).movedim(2, -2).flatten(-2)
    if not branch or not is_mechanism(layer.module):
        return whole
    opened = {word: torch.ones_like(value) if word == "g" else value for word, value in layer.inputs.items()}
    # not by a call: the hook that shows the layer would come again
    return layer.module.forward(**opened, grid=layer.grid, kv_grid=layer.kv_grid)


def _feature_rank(branch: bool) -> Callable[[LayerAttention], Tensor | None]:
    def measure(layer: LayerAttention) -> Tensor | None:
        features = mixed(layer, branch=branch)
        if features is None or min(features.shape[-2:]) > MOST_TOKENS:
            return None
        return (ranks(centred(features)).effective / min(features.shape[-2:]))[:, :, None]

    return measure


def _gate_correlation(layer: LayerAttention) -> Tensor | None:
    gates = layer.inputs.get("g")
    if gates is None:
        return None
    of_images = [half_correlation(of_image.transpose(0, 1).flatten(1), gates.shape[1])["cross"] for of_image in gates]
    return torch.stack(of_images)[:, :, None]


def _left_by_newton(layer: LayerAttention) -> Tensor | None:
    if not isinstance(layer.module, SoftAttention):
        return None
    landmarks, _ = layer.module.landmarks(layer.inputs["q"], None, layer.grid)
    steps = newton_convergence(gaussian_kernel(landmarks, landmarks), layer.module.newton_steps)
    return steps.identity[..., -1:]


def _powers(layer: LayerAttention) -> Tensor | None:
    if not isinstance(layer.module, PolaAttention):
        return None
    return layer.module.powers().mean((1, 2))[None, :, None].expand(len(layer.weights), -1, 1)


MEASURES: dict[str, Measure] = {
    "entropy": Measure(
        lambda layer: entropy(layer.weights, normalised=True).mean(-1),
        "entropy, of ln N",
        "How spread the weights of a query are: 1 where it looks everywhere alike, 0 where it looks at one token. "
        "PolaFormer holds that linear attention's is too high.",
        lambda grid: 1.0,
    ),
    "negative": Measure(
        lambda layer: negative_mass(layer.weights).mean(-1),
        "share of negative weight",
        "How much of the absolute weight of a query is negative. Softmax and linear attention have none, InLine and "
        "SOFT do.",
        lambda grid: 0.0,
    ),
    "local": Measure(
        _on_map(local_mass),
        "share in 3×3",
        "How much of its weight a query has within one place around it. InLine sees it as what linear attention lacks, "
        "and adds a local branch, which is not in these weights.",
        lambda grid: float(local_mass(uniform_weights(grid), grid).mean()),
    ),
    "distance": Measure(
        _on_map(attention_distance),
        "places",
        "How far from itself a query looks on average, in places of the layer's map. Windows bound it.",
        lambda grid: float(attention_distance(uniform_weights(grid), grid).mean()),
    ),
    "rank": Measure(
        _effective_rank,
        "effective rank, of N",
        "How many directions a map has, by the entropy of its singular values, as a share of its side. Linear "
        "attention has at most as many as a head has channels, which a depthwise branch makes good.",
    ),
    "diagonal": Measure(
        _if_square(lambda weights: diagonality(weights).rank),
        "share below the diagonal",
        "How many of the other weights of a query are below its own: ½ by chance, 1 where it looks most at itself. "
        "LaViT holds its maps to it.",
        lambda grid: 0.5,
    ),
    "symmetry": Measure(
        _if_square(symmetry),
        "symmetry",
        "Whether two tokens look at each other alike: 1 where they do, 0 by chance, −1 where the opposite holds; the "
        "mean is taken off first. LaViT holds its maps to it.",
        lambda grid: 0.0,
    ),
    "features": Measure(
        _feature_rank(True),
        "effective rank, of a head's channels",
        "How many directions the tokens that a layer gives differ in, their mean taken off, with the local branch "
        "where it has one. PolaFormer and FLatten add the branch to raise it.",
    ),
    "global": Measure(
        _feature_rank(False),
        "effective rank, of a head's channels",
        "The same without the local branch: what attention alone gives. The difference from the measure before is what "
        "the branch is worth.",
    ),
    "gates": Measure(
        _gate_correlation,
        "correlation of G's halves",
        "How PolaFormer's gates of the same-sign half go with those of the opposite-sign half, over the tokens of an "
        "image: the mean correlation of their channels. The paper calls it negative, its own figure shows about +0.06.",
        lambda grid: 0.0,
    ),
    "power": Measure(
        _powers,
        "power of the features",
        "What PolaFormer raises its features to, which is learned for each channel: the mean of a head, 3 before "
        "training. It is there to lower the entropy.",
        lambda grid: 3.0,
    ),
    "inverse": Measure(
        _left_by_newton,
        "largest singular value of I − BY",
        "What SOFT's Newton steps leave of the identity when they invert the kernel of the landmarks: 0 where they "
        "have converged, near 1 where a direction has hardly been inverted. The paper finds 20 steps enough.",
    ),
}
"""Measures of one layer, by name."""

SIMILARITY = Measure(
    lambda layer: None,
    "correlation with the layer before",
    "How alike maps of consecutive layers of one shape are, column by column, their means taken off: 1 where nothing "
    "changes. LaViT starts from its rise in deep layers.",
    lambda grid: 0.0,
)
"""The measure that needs two layers."""

ALL_MEASURES: dict[str, Measure] = {**MEASURES, "similarity": SIMILARITY}
