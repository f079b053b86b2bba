"""What is counted image by image over a whole data set: kept as it goes, and gone on with after an interruption."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset
from tqdm import tqdm

from subquad.analysis.explicit_attention import visit_attention
from subquad.analysis.indistinct_queries import confused_queries
from subquad.analysis.probes import LayerAttention, without_weights
from subquad.analysis.removal import Removal, removing
from subquad.data import create_loader
from subquad.errors import SubquadError
from subquad.tasks.accuracy import check_finite
from subquad.writing import json_text, write_json

Counts = dict[str, list[float]]
"""By name, a number for each image."""

EVERY = 15.0
"""Seconds between two times that the counts are kept."""

USUAL_REMOVALS = (
    Removal(),
    *(Removal(kind, window) for window in (3, 5, 7) for kind in ("local", "random")),
)


class NoQueriesError(SubquadError):
    """A network whose weights are not computed from queries that could be compared."""


def survey(
    images: Any,
    count: Callable[[Tensor, Tensor], Counts],
    *,
    about: dict[str, Any],
    batch_size: int,
    device: torch.device,
    file: Path | None = None,
    title: str = "",
) -> Counts:
    """What `count` says of batches of (images, labels), over a whole data set.

    Args:
        images: a data set of pairs, None for broken images, which are left out.
        count: gives a number an image under each of its names.
        about: what is counted of what, as JSON holds it: counts in `file` that are about something else begin anew.
        batch_size: images at a time.
        device: where `count` wants them.
        file: where counts are kept meanwhile, and afterwards.
        title: of the progress bar.
    """
    done, counts = 0, Counts()
    # through JSON, as the file has it
    about = json.loads(json_text(about | {"images": len(images)}))
    if file is not None and (kept := _kept(file, about)) is not None:
        done, counts = kept

    def keep() -> None:
        if file is not None:
            write_json(file, {"about": about, "done": done, "counts": counts})

    rest = Subset(images, range(done, len(images)))
    saved = time.monotonic()
    with tqdm(total=len(images), initial=done, desc=title, unit=" images", leave=False, disable=None) as bar:
        try:
            for batch, labels in create_loader(rest, batch_size=batch_size):
                if len(labels):
                    for name, values in count(batch.to(device), labels.to(device)).items():
                        counts.setdefault(name, []).extend(values)
                step = min(batch_size, len(images) - done)
                done += step
                bar.update(step)
                if time.monotonic() - saved > EVERY:
                    keep()
                    saved = time.monotonic()
        finally:
            keep()
    if not counts:
        raise SubquadError("there are no images to count")
    return counts


def _kept(file: Path, about: dict[str, Any]) -> tuple[int, Counts] | None:
    """How many images a file has counts of, and those; None where it is damaged or about something else."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        done, counts = int(kept["done"]), {name: [float(v) for v in values] for name, values in kept["counts"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    whole = 0 <= done <= about["images"] and all(len(values) <= done for values in counts.values())
    return (done, counts) if whole and kept["about"] == about else None


def count_hits(
    model: nn.Module, removals: Sequence[Removal] = USUAL_REMOVALS, *, branches: bool = True
) -> Callable[[Tensor, Tensor], Counts]:
    """Counts whether the class is right without each of these keys: 1 or 0, by the name of the removal.

    Counting raises where answers are no finite numbers, and where no layer has keys to lose.
    """

    def count(images: Tensor, labels: Tensor) -> Counts:
        counts = Counts()
        for removal in removals:
            with removing(model, removal, images, branches=branches), torch.no_grad():
                model.eval()
                answers = model(images)
            # the largest of what is no number is the first class
            check_finite(answers, f"{len(images)} images (keys removed: {removal})")
            counts[str(removal)] = (answers.argmax(-1) == labels).double().tolist()
        return counts

    return count


def count_confusions(model: nn.Module, **thresholds: Any) -> Callable[[Tensor, Tensor], Counts]:
    """Counts the pairs of queries of an image that are confused, see `confused_queries`, over heads and layers.

    Layers that attend in windows count the pairs of a window. Counting raises where no layer shows its queries, as in
    LaViT, whose later layers have none.
    """

    def count(images: Tensor, labels: Tensor) -> Counts:
        total = torch.zeros(len(images), dtype=torch.float64, device=images.device)
        layers = 0

        def visit(layer: LayerAttention) -> None:
            nonlocal layers
            queries = layer.inputs.get("q")
            if queries is None:
                return
            layers += 1
            # both streams of a query have to be those of another one
            rows = layer.weights.transpose(2, 3).flatten(3)
            pairs = confused_queries(rows, queries, **thresholds).double().sum(1)
            total.add_(pairs.unflatten(0, (len(images), -1)).sum(1))

        visit_attention(model, images, visit)
        if not layers:
            reason = without_weights(model)
            raise NoQueriesError(
                f"no layer of {type(model).__name__} shows its queries: confusion can't be counted"
                + (f" ({reason})" if reason else "")
            )
        return {"confused": total.tolist()}

    return count
