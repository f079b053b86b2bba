"""Every measure on every layer of a network: one row a layer, measure and head, over all images."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from subquad.analysis.attention import LayerAttention, is_mechanism, visit_attention
from subquad.analysis.maps import diagonality, map_similarity, symmetry
from subquad.analysis.rows import attention_distance, entropy, local_mass, negative_mass, uniform_weights
from subquad.analysis.spectra import centred, ranks
from subquad.errors import SubquadError, unknown_name
from subquad.grid import TokenGrid

MOST_TOKENS = 1024
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


@dataclass(frozen=True)
class MeasureRow:
    """One measure of one head, or of all heads together, in one layer, over all images (and windows, and streams).

    Attributes:
        network: as the caller calls it.
        layer: counted from 1.
        name: the module.
        head: from 1; 0 for all together.
        mean, low, high: mean, and where 5 and 95 % of the maps lie.
        baseline: of attention that looks everywhere alike, or by chance.
    """

    network: str
    layer: int
    name: str
    mechanism: str
    measure: str
    head: int
    mean: float
    low: float
    high: float
    baseline: float | None


def measure_network(
    model: nn.Module,
    batches: Iterable[Tensor],
    measures: Sequence[str] = tuple(ALL_MEASURES),
    *,
    network: str = "",
) -> list[MeasureRow]:
    """Measure the attention of all layers of a network, a batch and a layer at a time.

    Args:
        model: any of ours.
        batches: of images (b, c, height, width).
        measures: names of `ALL_MEASURES`.
        network: what to call it in the rows.

    Raises:
        SubquadError: a measure is not known, or the network has no attention that can be seen.
    """
    for name in measures:
        if name not in ALL_MEASURES:
            raise unknown_name("measure", name, ALL_MEASURES)
    found: dict[tuple[int, str], list[Tensor]] = {}
    layers: list[LayerAttention] = []
    for images in batches:
        watcher = _Watcher(measures, found)
        visit_attention(model, images, watcher)
        layers = watcher.layers
    if not layers:
        raise SubquadError(f"{type(model).__name__} shows no attention: none of its layers gives its weights")
    rows = []
    for (number, measure), values in sorted(found.items()):
        layer = layers[number]
        every = torch.cat(values).double()
        baseline = ALL_MEASURES[measure].baseline(layer.grid)
        for head, of in enumerate([every.flatten(), *every.unbind(1)]):
            low, high = torch.quantile(of.flatten(), torch.tensor([0.05, 0.95], dtype=torch.float64)).tolist()
            about = (network, number + 1, layer.name, layer.mechanism, measure, head)
            rows.append(MeasureRow(*about, float(of.mean()), low, high, baseline))
    return rows


class _Watcher:
    """Measures each layer as it comes, and keeps the last one's map only."""

    def __init__(self, measures: Sequence[str], found: dict[tuple[int, str], list[Tensor]]) -> None:
        self.measures, self.found = measures, found
        self.layers: list[LayerAttention] = []
        self.before: Tensor | None = None

    def __call__(self, layer: LayerAttention) -> None:
        number = len(self.layers)
        values = {name: MEASURES[name].of(layer) for name in self.measures if name in MEASURES}
        if "similarity" in self.measures:
            alike = self.before is not None and self.before.shape == layer.weights.shape
            values["similarity"] = map_similarity(self.before, layer.weights) if alike else None  # type: ignore[arg-type]
            self.before = layer.weights
        for name, value in values.items():
            if value is not None:
                # streams beside images: both are maps of a head
                self.found.setdefault((number, name), []).append(value.movedim(2, 1).flatten(0, 1).cpu())
        # without the map and what it was made of, which are large
        self.layers.append(LayerAttention(layer.name, layer.mechanism, layer.weights[:0], layer.grid, layer.kv_grid))
