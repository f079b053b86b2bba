"""A whole network over an image that is too large for it: from pixels by rows to logits and maps.

What is to be had at the end: the logits of the image; for each token its features; and what the head says of each token
by itself, the class with the largest logit (labels) and the logit of one class (heat). Where the head reads the mean of
the tokens and norms in front of it, an image's logits are the mean of its heat.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from subquad.errors import SubquadError, unknown_name
from subquad.grid import GridRows, TokenGrid
from subquad.large.map_files import map_file
from subquad.large.resuming import Progress, tokens_in_folder
from subquad.large.streaming import StreamedStage, embedded
from subquad.large.token_store import DTYPES, TokensInMemory, TokenStore
from subquad.large.walking_along import evaluating, watching
from subquad.models.backbone import Backbone
from subquad.models.stages import ImageRows

MOST_CLASSES = 2**16
"""Classes that labels are told apart up to."""


@dataclass(frozen=True)
class Outputs:
    """Which maps are written where: the ending of a file says its format, see `map_files.WRITERS`.

    Attributes:
        features: (y, x, c) in fp32, behind the last norm.
        labels: (y, x), for each token the class with the largest logit.
        heat: (y, x) in fp32, the logit of one class for each token.
        heat_class: the number of this class; the image's own if left out.
    """

    features: Path | None = None
    labels: Path | None = None
    heat: Path | None = None
    heat_class: int | None = None


@dataclass(frozen=True)
class Streamed:
    """What a network makes of a large image.

    Attributes:
        grid: the grid of its tokens.
        logits: (num_classes,) in fp32 or wider, or what a network without a head gives.
        has_head: whether these are logits.
        heat_class: the class that heat is of; None without heat.
        files: the maps that were written, by kind.
        classes: their names, where they are known.
    """

    grid: TokenGrid
    logits: Tensor
    has_head: bool
    heat_class: int | None = None
    files: dict[str, Path] = field(default_factory=dict)
    classes: Sequence[str] = ()

    def name_of(self, number: int | None) -> str:
        """What a class is called."""
        known = number is not None and number < len(self.classes)
        return self.classes[number] if known else f"class {number}"  # type: ignore[index]

    def most_likely(self, count: int) -> list[tuple[str, float]]:
        """The classes of the image with the largest shares, with these; none without a head."""
        if not self.has_head:
            return []
        shares, numbers = self.logits.softmax(dim=-1).topk(min(count, len(self.logits)))
        return [(self.name_of(number), share) for number, share in zip(numbers.tolist(), shares.tolist(), strict=True)]


def stream_network(
    model: nn.Module,
    image: ImageRows,
    outputs: Outputs = Outputs(),
    classes: Sequence[str] = (),
    *,
    most_tokens: int | None = None,
    keep: str | None = None,
    tokens_in: Path | None = None,
    identity: str = "",
    progress: bool = False,
) -> Streamed:
    """Take an image through a network, some rows of its tokens at a time.

    Args:
        model: a plain host of mechanisms that can be streamed; it is evaluated, whatever mode it is in.
        image: as the network takes it.
        outputs: the maps to write.
        classes: their names, where they are known.
        most_tokens: tokens at work at a time; some thousands if left out.
        keep: what tokens are kept in between two layers, a name of `DTYPES`; what the network computes in if left out.
        tokens_in: a folder that tokens are kept in instead of memory; a walk that was broken off goes on from there.
        identity: what says whose tokens these are, in such a folder.
        progress: whether a bar shows on a terminal how far it is.

    Raises:
        SubquadError: the network can't be streamed, or files can't be written, in one line.
    """
    stage = check_network(model)
    backbone: Any = model
    _check_outputs(backbone, outputs)
    dtype = next(model.parameters()).dtype
    if keep is not None and keep not in DTYPES:
        raise unknown_name("kept dtype", keep, DTYPES)
    kept = dtype if keep is None else DTYPES[keep]
    height, width = backbone.grids(image.shape)[0].shape
    grid = TokenGrid(height, width, stage.grid.prefix)
    with torch.inference_mode(), evaluating(model), watching(progress) as watch, ExitStack() as stack:
        record: Progress | None = None
        store: TokenStore
        if tokens_in is None:
            store = TokensInMemory(grid.num_tokens, backbone.num_features, kept)
        else:
            store, record = stack.enter_context(
                tokens_in_folder(tokens_in, identity, grid.num_tokens, backbone.num_features, kept)
            )
        steps = StreamedStage(stage, grid, store, dtype, most_tokens=most_tokens)
        steps.watch = watch(steps.total + grid.num_tokens * (2 + (outputs.heat is not None)))
        for number, step in enumerate([lambda: _embed(steps, image), *steps.steps()]):
            if record is None:
                step()
            elif number >= record.done:
                step()
                record.reached(number + 1)
        streamed = _answer(backbone, steps, outputs)
        if record is not None:
            record.finished()
        return replace(streamed, classes=classes)


def check_network(model: nn.Module) -> Any:
    """The one stage of a network that can be streamed; raise a SubquadError that says why it can't be."""
    if not isinstance(model, Backbone):
        raise SubquadError(
            f"{type(model).__name__} can't be streamed: classifiers and features of our plain hosts can (deit_tiny, "
            "dinov2_base and their like), of a mechanism with a state"
        )
    if not model.is_plain or not hasattr(model.stages[0].embed, "of_rows"):
        raise SubquadError(f"{type(model).__name__} can't be streamed: it is no plain host (deit_tiny and its like)")
    return model.stages[0]


def _check_outputs(model: Any, outputs: Outputs) -> None:
    wants_head = outputs.labels is not None or outputs.heat is not None
    if wants_head and not model.num_classes:
        raise SubquadError("labels and heat are what a head says, and this network has none: ask for features")
    if wants_head and model.num_classes > MOST_CLASSES:
        raise SubquadError(f"labels tell up to {MOST_CLASSES:,} classes apart, not {model.num_classes:,}")
    if outputs.heat_class is not None and not 0 <= outputs.heat_class < model.num_classes:
        raise SubquadError(f"class {outputs.heat_class} is not among 0 to {model.num_classes - 1}")


def _embed(steps: StreamedStage, image: ImageRows) -> None:
    for rows, tokens in embedded(steps.stage, image, steps.grid, steps.parts()):
        steps.store.write(rows.tokens, tokens)
        steps.watch(rows.num_tokens)
    steps.store.turn()


def _answer(model: Any, steps: StreamedStage, outputs: Outputs) -> Streamed:
    """The head over the last tokens: pooled, and for each token."""
    grid, pool = steps.grid, Pool(model.global_pool, steps.grid)
    dtypes = {"features": np.float32, "labels": np.uint8 if model.num_classes <= 256 else np.uint16}
    shapes = {"features": (*grid.shape, model.num_features), "labels": grid.shape}
    with ExitStack() as stack:
        paths = {name: getattr(outputs, name) for name in dtypes if getattr(outputs, name) is not None}
        writers = {
            name: stack.enter_context(map_file(path, shapes[name], dtypes[name])) for name, path in paths.items()
        }
        for rows, tokens in _normed(model, steps):
            pool.add(rows, tokens)
            places = tokens[0, rows.prefix :]
            if "features" in writers:
                writers["features"](rows.first, _as_rows(places.float(), rows))
            if "labels" in writers:
                labels = model.head(model.fc_norm(places)).argmax(dim=-1)
                writers["labels"](rows.first, _as_rows(labels, rows).astype(dtypes["labels"]))
    logits = model.head(model.fc_norm(pool.result().to(steps.dtype)))[0]
    shown = outputs.heat_class
    if outputs.heat is not None:
        shown = int(logits.argmax()) if shown is None else shown
        paths["heat"] = outputs.heat
        _write_heat(model, steps, outputs.heat, shown)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return Streamed(grid, wide, bool(model.num_classes), shown, paths)


def _write_heat(model: Any, steps: StreamedStage, path: Path, shown: int) -> None:
    weight, bias = model.head.weight[shown : shown + 1], model.head.bias[shown : shown + 1]
    with map_file(path, steps.grid.shape, np.float32) as write:
        for rows, tokens in _normed(model, steps):
            heat = nn.functional.linear(model.fc_norm(tokens[0, rows.prefix :]), weight, bias)
            write(rows.first, _as_rows(heat[:, 0].float(), rows))


def _normed(model: Any, steps: StreamedStage) -> Iterator[tuple[GridRows, Tensor]]:
    """Rows, and their tokens (1, n, c) behind the network's last norm."""
    for rows in steps.parts():
        tokens = steps.store.read(rows.tokens).to(steps.dtype)
        yield rows, model.norm(steps.stage.norm(tokens))
        steps.watch(rows.num_tokens)


def _as_rows(places: Tensor, rows: GridRows) -> Any:
    """Tokens (n, …) as rows (y, x, …) of numpy."""
    return places.view(*rows.shape, *places.shape[1:]).numpy()


class Pool:
    """What a head reads of all tokens, from parts of them: see `Backbone`."""

    def __init__(self, kind: str, grid: TokenGrid) -> None:
        if not kind:
            raise SubquadError("the head reads all tokens (global_pool=''): ask for features, with global_pool='avg'")
        self.kind, self.grid = kind, grid
        self.value: Tensor | None = None

    def add(self, rows: GridRows, tokens: Tensor) -> None:
        """Take in the tokens (1, n, c) of some rows."""
        wide = tokens if tokens.dtype == torch.float64 else tokens.float()
        if self.kind == "token":
            self.value = wide[:, 0] if rows.first == 0 else self.value
            return
        places = wide[:, rows.prefix :]
        part = places.sum(dim=1) if self.kind == "avg" else places.amax(dim=1)
        if self.value is None:
            self.value = part
        else:
            self.value = self.value + part if self.kind == "avg" else torch.maximum(self.value, part)

    def result(self) -> Tensor:
        """What the head reads, (1, c)."""
        assert self.value is not None
        return self.value / self.grid.num_places if self.kind == "avg" else self.value
