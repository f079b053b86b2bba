"""A whole network over an image that is too large for it: from pixels by rows to logits and maps.

What is to be had at the end: the logits of the image; for each token its features; and what the head says of each token
by itself, the class with the largest logit (labels) and the logit of one class (heat). Where the head reads the mean of
the tokens and norms in front of it, an image's logits are the mean of its heat.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.attention.bricks import is_heard
from subquad.errors import SubquadError, unknown_name
from subquad.grid import GridRows, TokenGrid
from subquad.inference import in_evaluation
from subquad.large.map_files import WriteRows, check_map, map_file
from subquad.large.resuming import tokens_in_folder
from subquad.large.streamed_hosts import StreamedHost
from subquad.large.streaming import StreamedBlocks, StreamedStage, Watch
from subquad.large.token_store import DTYPES, InMemory, Stores
from subquad.large.walking_along import watching
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

    @property
    def paths(self) -> dict[str, Path]:
        """Those that are asked for, by kind."""
        asked = {"features": self.features, "labels": self.labels, "heat": self.heat}
        return {kind: path for kind, path in asked.items() if path is not None}

    def check_files(self, read: Mapping[str, Path]) -> None:
        """Raise where a map can't be written, or would be over another one or what is read, or in or around it."""
        seen: dict[str, Path] = {}
        for kind, path in [*read.items(), *self.paths.items()]:
            own = path.resolve()
            for other, there in seen.items():
                if kind in self.paths and (own == there or own in there.parents or _is_in(own, there)):
                    raise SubquadError(f"{path} is to be the {kind}, and is the {other} as well: name another file")
            seen[kind] = own
        for kind, path in self.paths.items():
            check_map(path, kind == "labels")


def _is_in(path: Path, folder: Path) -> bool:
    """Whether a file lies in a folder that is one image or map."""
    return folder in path.parents and folder.suffix.lower() == ".zarr"


@dataclass(frozen=True)
class Streamed:
    """What a network makes of a large image.

    Attributes:
        grid: the grid of its tokens.
        logits: (num_classes,) in fp32 or wider, or what a network without a head gives; empty if that is all tokens.
        has_head: whether these are logits.
        heat_class: the class that heat is of; None without heat.
        files: the maps that were written, by kind.
        classes: their names, where they are known.
        label_shares: of each class, the share of places with its label; empty where no labels were written.
    """

    grid: TokenGrid
    logits: Tensor
    has_head: bool
    heat_class: int | None = None
    files: dict[str, Path] = field(default_factory=dict)
    classes: Sequence[str] = ()
    label_shares: Sequence[float] = ()

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

    def most_labels(self, count: int) -> list[tuple[str, float]]:
        """The classes that most places have as their labels, with their shares; none where no labels were written."""
        numbers = sorted(range(len(self.label_shares)), key=lambda number: -self.label_shares[number])[:count]
        return [(self.name_of(number), self.label_shares[number]) for number in numbers if self.label_shares[number]]


def stream_network(
    host: StreamedHost,
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
        host: a network that can be streamed, of `host_of`; it is evaluated, whatever mode it is in.
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
    _check_outputs(host, outputs)
    check_kept(keep)
    dtype = next(host.model.parameters()).dtype
    kept = dtype if keep is None else DTYPES[keep]
    with torch.inference_mode(), in_evaluation(host.model), watching(progress) as watch, ExitStack() as stack:
        image = host.image(image)
        stages = host.stages(image.shape)
        sizes = [(stage.grid.num_tokens, stage.dim) for stage in stages]
        stores: Stores = InMemory(sizes, kept)
        if tokens_in is not None:
            stores = stack.enter_context(tokens_in_folder(tokens_in, identity, sizes, kept))
        # those that can't be streamed say so here, before anything is computed
        walked = sum(stage.total for stage in stages)
        hear = watch(walked + stages[-1].grid.num_tokens * (1 + (outputs.heat is not None)))
        with ExitStack() as files:
            # in front of all work: what can't be written is said, and the disk keeps a place for the rest
            writers = {
                kind: files.enter_context(map_file(path, *_format(kind, host, stages[-1].grid)))
                for kind, path in outputs.paths.items()
            }
            last = _walk(stages, image, stores, partial(StreamedStage, dtype=dtype, most_tokens=most_tokens), hear)
            streamed = _answer(host, last, outputs, writers)
        stores.finished()
        return replace(streamed, classes=classes)


def check_kept(keep: str | None) -> None:
    """Raise where tokens are to be kept in what they can't be kept in."""
    if keep is not None and keep not in DTYPES:
        raise unknown_name("kept dtype", keep, DTYPES)


def _walk(
    stages: Sequence[StreamedBlocks],
    image: ImageRows,
    stores: Stores,
    make: Callable[..., StreamedStage],
    hear: Watch,
) -> StreamedStage:
    """Take an image through all blocks that are not done yet, and give the last, whose store has the tokens behind."""
    source, number = image, 0
    for index, about in enumerate(stages):
        first, number = number, number + about.num_steps
        if stores.done > number:
            continue
        stage = make(about, stores.store(index), watch=hear)
        if stores.done <= first:
            stage.embed(source)
            stores.reached(first + 1, index)
        # the tokens that these were made of are let go
        source = stage
        for done, step in enumerate(stage.steps(), first + 2):
            if done > stores.done:
                step()
                stores.reached(done, index)
    return stage


def _check_outputs(host: StreamedHost, outputs: Outputs) -> None:
    if host.global_pool is None and not any((outputs.features, outputs.labels, outputs.heat)):
        raise SubquadError("this network tells the places of an image, not the image: ask for labels, heat or features")
    if host.global_pool is None and outputs.heat is not None and outputs.heat_class is None:
        raise SubquadError("heat is of one class, and no class is the image's: say which by its name or number")
    if host.global_pool == "" and (outputs.features is None or host.num_classes):
        raise SubquadError("the head reads all tokens (global_pool=''): ask for features, of a network without classes")
    wants_head = outputs.labels is not None or outputs.heat is not None
    if wants_head and host.num_classes and not host.heads:
        raise SubquadError(
            "the head reads the first token beside the mean of all places, and none alone: ask for features"
        )
    if wants_head and not host.num_classes:
        raise SubquadError("labels and heat are what a head says, and this network has none: ask for features")
    if wants_head and host.num_classes > MOST_CLASSES:
        raise SubquadError(f"labels tell up to {MOST_CLASSES:,} classes apart, not {host.num_classes:,}")
    if outputs.heat_class is not None and outputs.heat is None:
        raise SubquadError("a class is that of the heat: name a file to write it to, or leave the class out")
    if outputs.heat_class is not None and not 0 <= outputs.heat_class < host.num_classes:
        raise SubquadError(f"class {outputs.heat_class} is not among 0 to {host.num_classes - 1}")


def _answer(host: StreamedHost, stage: StreamedStage, outputs: Outputs, writers: Mapping[str, WriteRows]) -> Streamed:
    """The head over the last tokens: pooled, and for each token."""
    grid, pool = stage.grid, Pool(host.global_pool, stage.grid)
    # on the network's device, whatever PyTorch's default is
    counts = torch.zeros(host.num_classes, dtype=torch.long, device="cpu")
    for rows, tokens in _normed(host, stage):
        pool.add(rows, tokens)
        places = tokens[0, rows.prefix :]
        if "features" in writers:
            writers["features"](rows.first, _as_rows(places.float(), rows))
        if "labels" in writers:
            labels = _said(host, places).argmax(dim=-1)
            counts += torch.bincount(labels, minlength=host.num_classes)
            writers["labels"](rows.first, _as_rows(labels, rows).astype(_format("labels", host, grid)[1]))
    # where all tokens are what the network gives
    nothing = counts.new_empty(0, dtype=torch.float32)
    logits = host.logits(pool.result().to(stage.dtype))[0] if host.global_pool else nothing
    shown = outputs.heat_class
    if outputs.heat is not None:
        shown = int(logits.argmax()) if shown is None else shown
        for rows, tokens in _normed(host, stage):
            heat = _said(host, tokens[0, rows.prefix :], shown)
            writers["heat"](rows.first, _as_rows(heat.float(), rows))
    wide = logits if logits.dtype == torch.float64 else logits.float()
    shares = tuple((counts / grid.num_places).tolist()) if "labels" in writers else ()
    has_head = bool(host.num_classes and host.global_pool)
    return Streamed(grid, wide, has_head, shown, outputs.paths, label_shares=shares)


def _format(kind: str, host: StreamedHost, grid: TokenGrid) -> tuple[tuple[int, ...], Any]:
    """Shape and type of a map."""
    if kind == "features":
        return (*grid.shape, host.num_features), np.float32
    of_labels = np.uint8 if host.num_classes <= 256 else np.uint16
    return grid.shape, of_labels if kind == "labels" else np.float32


def _normed(host: StreamedHost, stage: StreamedStage) -> Iterator[tuple[GridRows, Tensor]]:
    """Rows, and their tokens (1, n, c) behind the network's last norm."""
    for rows in stage.parts():
        yield rows, host.normed(stage.normed(rows))
        stage.watch(rows.num_tokens)


def _said(host: StreamedHost, places: Tensor, only: int | None = None) -> Tensor:
    """What the head says of tokens (n, c), each by itself: (n, classes), or (n,) of one class alone."""
    normed = host.fc_norm(places)
    if only is None:
        logits = [head(normed) for head in host.heads]
    else:
        logits = [_logit(head, normed, only) for head in host.heads]
    return torch.stack(logits).mean(dim=0) if len(logits) > 1 else logits[0]


def _logit(head: Any, places: Tensor, number: int) -> Tensor:
    """What a head says of places (n, c) for one class, (n,)."""
    if type(head) is not nn.Linear or head.bias is None or is_heard(head):
        # adapters and hooks are not in its weight
        logits: Tensor = head(places)[:, number]
        return logits
    one = slice(number, number + 1)
    return F.linear(places, head.weight[one], head.bias[one])[:, 0]


def _as_rows(places: Tensor, rows: GridRows) -> Any:
    """Tokens (n, …) as rows (y, x, …) of numpy."""
    return places.view(*rows.shape, *places.shape[1:]).numpy()


class Pool:
    """What a head reads of all tokens, from parts of them: prefix tokens, and one place that stands for all."""

    def __init__(self, kind: str | None, grid: TokenGrid) -> None:
        self.kind, self.grid = kind, grid
        self.prefix: Tensor | None = None
        self.place: Tensor | None = None

    def add(self, rows: GridRows, tokens: Tensor) -> None:
        """Take in the tokens (1, n, c) of some rows."""
        wide = tokens if tokens.dtype == torch.float64 else tokens.float()
        if rows.first == 0:
            self.prefix = wide[:, : rows.prefix].clone()
        if self.kind not in ("avg", "max"):
            return
        places = wide[:, rows.prefix :]
        if self.kind == "avg":
            part = places.sum(dim=1, keepdim=True)
            self.place = part if self.place is None else self.place + part
        else:
            part = places.amax(dim=1, keepdim=True)
            self.place = part if self.place is None else torch.maximum(self.place, part)

    def result(self) -> Tensor:
        """Prefix tokens and the place (1, p + 1, c): a head makes of them what it makes of all tokens."""
        assert self.prefix is not None
        if self.place is None:
            return self.prefix
        place = self.place / self.grid.num_places if self.kind == "avg" else self.place
        return torch.cat([self.prefix, place], dim=1)
