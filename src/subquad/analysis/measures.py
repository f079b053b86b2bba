"""What can be measured on a layer's attention: each measure with what it says and what it is by chance."""

from collections.abc import Callable
from dataclasses import dataclass

from subquad.analysis.layer_quantities import (
    OfLayer,
    feature_rank,
    gate_correlation,
    if_square,
    kernel_error,
    left_by_newton,
    map_rank,
    on_map,
    power,
)
from subquad.analysis.maps import diagonality, symmetry
from subquad.analysis.rows import attention_distance, entropy, local_mass, negative_mass, uniform_weights
from subquad.grid import TokenGrid


@dataclass(frozen=True)
class Measure:
    """A measure of maps.

    Attributes:
        of: a layer's attention to a number for each map, (b, h, s), or None where it has none.
        unit: what it is called on an axis.
        says: what it is, in two sentences.
        baseline: its value for attention that looks everywhere alike, on the map of a layer, or by chance.
    """

    of: OfLayer
    unit: str
    says: str
    baseline: Callable[[TokenGrid], float | None] = lambda grid: None


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
        on_map(local_mass),
        "share in 3×3",
        "How much of its weight a query has within one place around it. InLine sees it as what linear attention lacks, "
        "and adds a local branch, which is not in these weights.",
        lambda grid: float(local_mass(uniform_weights(grid), grid).mean()),
    ),
    "distance": Measure(
        on_map(attention_distance),
        "places",
        "How far from itself a query looks on average, in places of the layer's map. Windows bound it.",
        lambda grid: float(attention_distance(uniform_weights(grid), grid).mean()),
    ),
    "rank": Measure(
        map_rank("effective"),
        "effective rank, of N",
        "How many directions a map has, by the entropy of its singular values, as a share of its side. Linear "
        "attention has at most as many as a head has channels, which a depthwise branch makes good.",
    ),
    "numerical": Measure(
        map_rank("numerical"),
        "numerical rank, of N",
        "How many singular values of a map are above a thousandth of the largest, as a share of its side. It counts "
        "directions however little is in them, where the effective rank weighs them.",
    ),
    "diagonal": Measure(
        if_square(lambda weights: diagonality(weights).rank),
        "share below the diagonal",
        "How many of the other weights of a query are below its own: ½ by chance, 1 where it looks most at itself. "
        "LaViT holds its maps to it.",
        lambda grid: 0.5,
    ),
    "symmetry": Measure(
        if_square(symmetry),
        "symmetry",
        "Whether two tokens look at each other alike: 1 where they do, 0 by chance, −1 where the opposite holds; the "
        "mean is taken off first. LaViT holds its maps to it.",
        lambda grid: 0.0,
    ),
    "features": Measure(
        feature_rank("effective", branch=True),
        "effective rank, of a head's channels",
        "How many directions the tokens that a layer gives differ in, their mean taken off, with the local branch "
        "where it has one. PolaFormer and FLatten add the branch to raise it.",
    ),
    "global": Measure(
        feature_rank("effective", branch=False),
        "effective rank, of a head's channels",
        "The same without the local branch: what attention alone gives. The difference from the measure before is what "
        "the branch is worth.",
    ),
    "directions": Measure(
        feature_rank("numerical", branch=True),
        "numerical rank, of a head's channels",
        "How many singular values of what a layer gives, with the local branch where it has one, are above a "
        "thousandth of the largest, the mean token taken off.",
    ),
    "gates": Measure(
        gate_correlation,
        "correlation of G's halves",
        "How PolaFormer's gates of the same-sign half go with those of the opposite-sign half, over the tokens of an "
        "image: the mean correlation of their channels. The paper calls it negative, its own figure shows about +0.06.",
        lambda grid: 0.0,
    ),
    "power": Measure(
        power,
        "power of the features",
        "What PolaFormer raises its features to, which is learned for each channel: the mean of a head, 3 before "
        "training. It is there to lower the entropy.",
        lambda grid: 3.0,
    ),
    "inverse": Measure(
        left_by_newton,
        "largest singular value of I − BY",
        "What SOFT's Newton steps leave of the identity when they invert the kernel of the landmarks: 0 where they "
        "have converged, near 1 where a direction has hardly been inverted. The paper finds 20 steps enough.",
    ),
    "kernel": Measure(
        kernel_error,
        "‖S − W‖ / ‖S‖",
        "How far SOFT's weights W are from the Gaussian kernel S of its tokens, which they are derived from. 0 where "
        "the landmarks stand for all tokens; learned landmarks need not, and 1 is as far as zeros are.",
        lambda grid: 1.0,
    ),
}
"""Measures of one layer, by name."""

SIMILARITY = Measure(
    lambda layer: None,
    "correlation with the layer before",
    "How alike whole maps of consecutive layers of one shape are, column by column, their means taken off: 1 where "
    "nothing changes. Windows and stripes, which move from layer to layer, have none. LaViT starts from its rise in "
    "deep layers.",
    lambda grid: 0.0,
)
"""The measure that needs two layers."""

ALL_MEASURES: dict[str, Measure] = {**MEASURES, "similarity": SIMILARITY}
