"""What is to be found in a trained classifier: all measures of its layers, confused queries, keys removed, powers.

    python scripts/findings.py RUN [--count 256]         # as JSON

`scripts/evidence.py --analyze` keeps it of every network that it has trained.
"""

import argparse
import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.analysis import check_removal, count_confusions, count_hits, measure_network, removal_shares
from subquad.attention import PolaAttention
from subquad.errors import SubquadError
from subquad.runs import open_trained
from subquad.tasks.classification import images_of

BATCH = 32
POWERS = (1.0, 3.0, 5.0)


def main() -> None:
    """Print what is found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder of a classifier")
    parser.add_argument("--count", type=int, default=256, help="held-out images")
    parser.add_argument("--data-dir", type=Path, help="where its data are, if not where they were in training")
    arguments = parser.parse_args()
    try:
        print(json.dumps(findings_of(arguments.run, arguments.count, arguments.data_dir), indent=1))
    except SubquadError as error:
        raise SystemExit(f"findings: {error}") from None


def findings_of(run: Path, count: int, data_dir: Path | None = None) -> dict[str, Any]:
    """What a classifier shows on so many held-out images: by measure a number for each layer, None where it has none.

    Beside the measures of `subquad.analysis` these are `confused`, pairs of an image; `removed`, top-1 in percent by
    what is removed; and `entropy_with_power`, PolaFormer's with others in the place of its powers. What a mechanism
    does not show is left out.
    """
    trained = open_trained(run)
    images = images_of(trained, data_dir=None if data_dir is None else str(data_dir))
    step = max(1, len(images) // count)
    pairs = [pair for k in range(0, len(images), step) if (pair := images[k]) is not None][:count]
    batches = torch.stack([image for image, _ in pairs]).to(trained.device).split(BATCH)
    labels = torch.tensor([label for _, label in pairs], device=trained.device).split(BATCH)
    model = trained.model
    found: dict[str, Any] = {"images": len(pairs)}
    for part, look in {
        "measures": lambda: by_layer(model, batches),
        "confused": lambda: counted(count_confusions(model), batches, labels)["confused"],
        "removed": lambda: removed(model, batches, labels),
    }.items():
        try:
            found[part] = look()
        except SubquadError as error:
            # a mechanism without weights, queries or a rule for removed keys
            found.setdefault("not_shown", {})[part] = str(error)
    if "confused" in found:
        found["confused"] = sum(found["confused"]) / len(found["confused"])
    if any(isinstance(module, PolaAttention) for module in model.modules()):
        found["entropy_with_power"] = {f"{power:g}": entropy_with(model, batches, power) for power in POWERS}
    return found


def by_layer(model: Any, batches: Sequence[Tensor], *measures: str) -> dict[str, list[float | None]]:
    """By measure the mean over heads and images of each layer."""
    rows = [row for row in measure_network(model, batches, *([measures] if measures else [])) if row.head == 0]
    layers = max(row.layer for row in rows)
    found: dict[str, list[float | None]] = {row.measure: [None] * layers for row in rows}
    for row in rows:
        found[row.measure][row.layer - 1] = row.mean
    return found


def entropy_with(model: Any, batches: Sequence[Tensor], power: float) -> list[float | None]:
    """The entropy of each layer with PolaFormer's powers all alike, nothing else changed."""
    model = deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, PolaAttention):
            # powers are 1 + alpha·sigmoid(0)
            layer.alpha = 2 * (power - 1)
            layer.power.data.zero_()
    return by_layer(model, batches, "entropy")["entropy"]


def removed(model: Any, batches: Sequence[Tensor], labels: Sequence[Tensor]) -> dict[str, float]:
    """Top-1 in percent without the keys around each query, and without others, by what is removed."""
    check_removal(model)
    return removal_shares(counted(count_hits(model), batches, labels))


def counted(count: Any, batches: Sequence[Tensor], labels: Sequence[Tensor]) -> dict[str, list[float]]:
    """A number an image by name, over all batches."""
    found: dict[str, list[float]] = {}
    for images, classes in zip(batches, labels, strict=True):
        for name, values in count(images, classes).items():
            found.setdefault(name, []).extend(values)
    return found


if __name__ == "__main__":
    main()
