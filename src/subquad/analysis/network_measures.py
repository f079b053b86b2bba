"""Every measure on every layer of a network: one row a layer, measure and head, over all images."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from subquad.analysis.explicit_attention import visit_attention
from subquad.analysis.maps import map_similarity
from subquad.analysis.measures import ALL_MEASURES, MEASURES
from subquad.analysis.probes import LayerAttention, without_weights
from subquad.errors import SubquadError, unknown_name


@dataclass(frozen=True)
class MeasureRow:
    """One measure of one head, or of all heads together, in one layer, over all images (and windows, and streams).

    Windows that are filled up at a border of the map are left out where others are whole.

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
    measured: dict[tuple[int, str], list[Tensor]] = {}
    layers: list[LayerAttention] = []
    for images in batches:
        watcher = _Watcher(measures, measured, len(images))
        visit_attention(model, images, watcher)
        layers = watcher.layers
    if not layers:
        reason = without_weights(model) or "none of its layers gives its weights"
        raise SubquadError(f"{type(model).__name__} shows no attention: {reason}")
    rows = []
    for (number, measure), values in sorted(measured.items()):
        layer = layers[number]
        every = torch.cat(values).double()
        baseline = ALL_MEASURES[measure].baseline(layer.grid)
        for head, of in enumerate([every.flatten(), *every.unbind(1)]):
            low, high = torch.quantile(of.flatten(), torch.tensor([0.05, 0.95], dtype=torch.float64)).tolist()
            about = (network, number + 1, layer.name, layer.mechanism, measure, head)
            rows.append(MeasureRow(*about, float(of.mean()), low, high, baseline))
    return rows


class _Watcher:
    """Measures each layer as it comes, and keeps the last one only."""

    def __init__(self, measures: Sequence[str], measured: dict[tuple[int, str], list[Tensor]], images: int) -> None:
        self.measures, self.measured, self.images = measures, measured, images
        self.layers: list[LayerAttention] = []
        self.before: LayerAttention | None = None

    def __call__(self, layer: LayerAttention) -> None:
        number, layer = len(self.layers), _whole_windows(layer)
        values = {name: MEASURES[name].of(layer) for name in self.measures if name in MEASURES}
        if "similarity" in self.measures:
            values["similarity"] = self._similarity(layer)
            self.before = layer
        for name, value in values.items():
            if value is not None:
                # streams beside images: both are maps of a head
                self.measured.setdefault((number, name), []).append(value.movedim(2, 1).flatten(0, 1).cpu())
        # without the map and what it was made of, which are large
        self.layers.append(LayerAttention(layer.name, layer.mechanism, layer.weights[:0], layer.grid, layer.kv_grid))

    def _similarity(self, layer: LayerAttention) -> Tensor | None:
        """To the layer before, where both attend to the same tokens: windows move from layer to layer."""
        before = self.before
        if before is None or (before.grid, before.kv_grid) != (layer.grid, layer.kv_grid):
            return None
        whole = before.weights.shape == layer.weights.shape and len(layer.weights) == self.images
        return map_similarity(before.weights, layer.weights) if whole else None


def _whole_windows(layer: LayerAttention) -> LayerAttention:
    """A layer without the windows that are filled up, if some are whole: what fills them neither asks nor is seen."""
    padding = layer.inputs.get("padding")
    if padding is None or not padding.any() or padding.any(1).all():
        return layer
    whole = ~padding.any(1)
    inputs = {
        word: value[whole] if isinstance(value, Tensor) and len(value) == len(whole) else value
        for word, value in layer.inputs.items()
    }
    return replace(layer, weights=layer.weights[whole], inputs=inputs | {"padding": None})
