"""The whole way from a trained network to a converted one: replace, align, choose blocks, distil, judge, keep.

The folder has what was decided (`conversion.json`), the changes (`delta.safetensors`), the whole network
(`student.safetensors`), and while it goes on the state of each fit. The same call goes on where it was broken off.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from subquad.benchmarks import describe_device
from subquad.conversion.aligning import align
from subquad.conversion.conversion_record import REPORT, Record
from subquad.conversion.delta_files import save_converted, save_delta
from subquad.conversion.distilling import TRAINED, distil
from subquad.conversion.hybrids import blocks_but, blocks_for, blocks_within, hybrid, sensitivity, trade_off
from subquad.conversion.judging import Comparison, compare_networks
from subquad.conversion.labelled_features import compare_on_labels, labelled_sets
from subquad.conversion.measured_costs import check_sizes, measure_costs
from subquad.conversion.replacing import conversion_of, convert
from subquad.conversion.unlabelled_images import Drawn, open_images, views
from subquad.data import InputConfig, create_loader
from subquad.data.dataset import PictureDataset
from subquad.errors import SubquadError, unknown_name
from subquad.holding import holding
from subquad.runs import open_trained
from subquad.tasks.classification.trained_classifier import images_of
from subquad.text import columns
from subquad.writing import write_json

Log = Callable[[str], None]

DELTA, STUDENT = "delta.safetensors", "student.safetensors"
"""What is in the folder at the end, beside the record."""

PLAN, ALIGNED, DISTILLED = "plan.json", "aligning.pt", "distilling.pt"
"""What is in it on the way."""

LOOKED_AT = 4
"""Batches of images that blocks are chosen by."""


@dataclass(frozen=True)
class Plan:
    """How a network is converted.

    Attributes:
        source: see `subquad.open_trained`.
        images: the name of a data set, or a folder or archive of images; their labels are not looked at.
        data_dir: where the images of a named data set are.
        attention: the mechanism, with its settings.
        blocks: numbers of blocks; all, or those that the family means, if None.
        keep: keep so many blocks as they were, those that cost most.
        tolerance: keep as many as it takes for a relative error of the last features of at most so much, after
            alignment.
        speedup: keep as many as still make the network so many times as fast at `at`, measured on this machine.
        at: pixels of both sides of the image that speed is measured on.
        img_size: pixels of both sides; as the network was trained if None.
        align_updates, distil_updates: of the two fits; 0 for none.
        align_lr, distil_lr: their rates.
        train: what distillation trains, one of `TRAINED`.
        batch_size: images of an update.
        crop_padding: images are shifted by up to so many pixels, instead of parts of them being taken.
        scale: the least share of an image that is taken.
        amp: compute in bf16 where it can be.
        seed: of the images' order.
    """

    source: str
    images: str
    data_dir: str | None = None
    attention: str = "agent"
    blocks: tuple[int, ...] | None = None
    keep: int | None = None
    tolerance: float | None = None
    speedup: float | None = None
    at: int | None = None
    img_size: int | None = None
    align_updates: int = 500
    distil_updates: int = 500
    align_lr: float = 1e-3
    distil_lr: float = 3e-4
    train: str = "all"
    batch_size: int = 64
    crop_padding: int = 0
    scale: float = 0.5
    amp: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.train not in TRAINED:
            raise unknown_name("train", self.train, TRAINED)
        if min(self.align_updates, self.distil_updates) < 0 or self.batch_size < 1:
            raise SubquadError("updates are at least 0, and images of an update at least 1")
        if sum(choice is not None for choice in (self.blocks, self.keep, self.tolerance, self.speedup)) > 1:
            raise SubquadError("blocks, keep, tolerance and speedup each choose the blocks: give one of them")
        if (self.speedup is None) != (self.at is None):
            raise SubquadError("a speedup is measured at a size: give both speedup and at, or neither")
        if self.chooses and not self.align_updates:
            raise SubquadError("which blocks cost most is known after alignment: give align_updates")

    @property
    def chooses(self) -> bool:
        """Whether blocks are chosen by what they cost."""
        return bool(self.keep) or self.tolerance is not None or self.speedup is not None


@dataclass(frozen=True)
class Converted:
    """What `convert_run` made.

    Attributes:
        student: the converted network.
        teacher: the network as it was.
        blocks: numbers of its converted blocks.
        steps: what the student was like behind each step, by its name.
        seconds: that each step took.
        record: all that is kept of it.
    """

    student: nn.Module
    teacher: nn.Module
    blocks: tuple[int, ...]
    steps: dict[str, Comparison]
    seconds: dict[str, float]
    record: Record

    @property
    def text(self) -> str:
        """A table for a terminal."""
        rows = [["", "top-1", "kept", "agreement", "features' error", "time"]]
        for name, step in self.steps.items():
            shares = [step.student_top1, step.kept, step.agreement]
            shown = ["" if share is None else f"{share:.2%}" for share in shares]
            rows.append([name, *shown, f"{step.error:.4f}", f"{self.seconds.get(name, 0):.0f} s"])
        return columns(rows)


@dataclass(frozen=True)
class Judging:
    """What is measured of a conversion beside its steps; none of it changes the student.

    Attributes:
        max_judged: held-out images that the student is compared with its teacher on, evenly chosen.
        curve: measure what each block costs, and the hybrids, though no blocks are chosen by it.
        sizes: pixels of both sides of images that both networks are timed on.
        labelled: data with labels, for simple classifiers of the features; see `load_dataset`.
        labelled_dir: where the images of `labelled` are; where those of the plan are, if both are of one data set.
    """

    max_judged: int = 2000
    curve: bool = False
    sizes: tuple[int, ...] = ()
    labelled: str | None = None
    labelled_dir: str | None = None


def convert_run(
    plan: Plan, output: Path | str, *, command: str = "", log: Log = lambda line: None, **judging: Any
) -> Converted:
    """Convert a trained network with images alone, and keep it in a folder.

    Args:
        plan: how.
        output: the folder; one that holds the same plan's unfinished work is gone on with.
        command: that is kept in the record.
        log: gets a line for each step.
        judging: fields of `Judging`: `max_judged=500`, `sizes=(224, 448)`, …

    Raises:
        SubquadError: in one line: something can't be opened or converted, or the folder holds something else.
    """
    folder = Path(output)
    with holding(folder):
        _check_folder(folder, plan)
        return _convert(plan, folder, Judging(**judging), command, log)


def open_plan(plan: Plan) -> tuple[Any, InputConfig, PictureDataset, dict[int, Drawn]]:
    """The trained teacher, how it takes images, and the images of a plan, drawn for each of the two fits.

    Raises:
        SubquadError: one of them can't be opened.
    """
    opened = open_trained(plan.source, img_size=plan.img_size)
    config = opened.image_network(plan.img_size).input
    pictures = open_images(plan.images, plan.data_dir)
    transform = views(config, scale=(plan.scale, 1.0), crop_padding=plan.crop_padding)
    drawn = {seed: Drawn(pictures, transform, batch_size=plan.batch_size, seed=plan.seed + seed) for seed in range(2)}
    return opened, config, pictures, drawn


def _convert(plan: Plan, folder: Path, judging: Judging, command: str, log: Log) -> Converted:
    opened, config, pictures, drawn = open_plan(plan)
    teacher = opened.model
    labelled = None
    if judging.labelled is not None:
        same = plan.data_dir if judging.labelled == plan.images else None
        folder_of_labels = judging.labelled_dir or same
        labelled = labelled_sets(judging.labelled, config, data_dir=folder_of_labels, max_images=judging.max_judged)
    check_sizes(teacher, judging.sizes)
    judged = list(held_out(opened, plan, drawn[0], judging.max_judged))
    student = convert(teacher, plan.attention, blocks=plan.blocks, img_size=plan.img_size)
    count = len(conversion_of(student).paths)
    if plan.keep is not None and plan.keep >= count:
        raise SubquadError(f"{count} blocks can be converted: keep from 0 to {count - 1}, got {plan.keep}")
    write_json(folder / PLAN, asdict(plan))
    log(f"{count} of {conversion_of(student).num_blocks} blocks of {plan.source} converted")
    steps, seconds = {"swapped": compare_networks(student, teacher, judged)}, {}
    log(f"swapped: {steps['swapped'].text}")
    damages: Any = []
    hybrids: Any = []
    before: dict[int, float] = {}
    after: dict[int, float] = {}
    history: dict[str, Any] = {}
    if plan.align_updates:
        start = time.monotonic()
        aligned = align(
            student,
            drawn[0],
            teacher=teacher,
            updates=plan.align_updates,
            lr=plan.align_lr,
            amp=plan.amp,
            state_file=folder / ALIGNED,
        )
        steps["aligned"], seconds["aligned"] = compare_networks(student, teacher, judged), aligned.progress.seconds
        before, after, history["aligned"] = aligned.before, aligned.after, aligned.progress.history
        log(f"aligned: {steps['aligned'].text}")
        if plan.chooses or judging.curve:
            damages, hybrids = _looked_at(plan, student, teacher, drawn[0], log)
        if plan.chooses:
            student = hybrid(student, _chosen(plan, damages, hybrids))
            steps["some blocks kept"] = compare_networks(student, teacher, judged)
            seconds["some blocks kept"] = time.monotonic() - start - aligned.progress.seconds
            log(f"converted are {_numbers(student)}: {steps['some blocks kept'].text}")
    if plan.distil_updates:
        progress = distil(
            student,
            drawn[1],
            teacher=teacher,
            train=plan.train,
            updates=plan.distil_updates,
            lr=plan.distil_lr,
            amp=plan.amp,
            state_file=folder / DISTILLED,
        )
        steps["distilled"], seconds["distilled"] = compare_networks(student, teacher, judged), progress.seconds
        history["distilled"] = progress.history
        log(f"distilled: {steps['distilled'].text}")
    costs = measure_costs(student, teacher, judging.sizes)
    for row in costs:
        log(f"{row.px}×{row.px}: {row.student_ms:.1f} ms for {row.teacher_ms:.1f}, {row.gain:.2f} times as fast")
    readable = None
    if labelled is not None:
        readable = compare_on_labels(student, teacher, labelled, batch_size=plan.batch_size)
        log(readable.text)
    record = Record(
        asdict(plan),
        conversion_of(student).as_note(),
        steps,
        seconds,
        blocks=list(damages),
        hybrids=list(hybrids),
        broken=pictures.broken_paths(),
        before=before,
        after=after,
        history=history,
        costs=costs,
        labelled=readable,
        command=command,
        machine=f"{describe_device(opened.device)}, torch {torch.__version__}",
    )
    save_delta(student, folder / DELTA, teacher=teacher)
    save_converted(student, folder / STUDENT)
    record.save(folder)
    for name in (ALIGNED, DISTILLED):
        (folder / name).unlink(missing_ok=True)
    return Converted(student, teacher, tuple(conversion_of(student).paths), steps, seconds, record)


def _check_folder(folder: Path, plan: Plan) -> None:
    if (folder / REPORT).exists():
        raise SubquadError(f"{folder} holds a converted network already: take another output")
    if not (folder / PLAN).exists():
        return
    try:
        before = json.loads((folder / PLAN).read_text())
    except (OSError, ValueError):
        raise SubquadError(f"{folder / PLAN} is damaged: take another output") from None
    now = json.loads(json.dumps(asdict(plan)))
    if different := [one.name for one in fields(Plan) if before.get(one.name) != now[one.name]]:
        raise SubquadError(
            f"{folder} holds unfinished work with {different[0]} = {before.get(different[0])}: go on with that, or "
            "take another output"
        )


def _looked_at(plan: Plan, student: nn.Module, teacher: nn.Module, drawn: Drawn, log: Log) -> tuple[Any, Any]:
    """What each converted block costs alone, and what they cost together, those that cost least first."""
    device = next(student.parameters()).device
    images = [drawn(plan.align_updates + place).to(device) for place in range(LOOKED_AT)]
    damages = sensitivity(student, teacher, images)
    for row in damages:
        log(f"block {row.block} alone: error {row.damage:.4f}")
    at = None if plan.at is None else (plan.at, plan.at)
    rows = trade_off(student, teacher, images, damages, at=at)
    for hybrid_row in rows:
        time_taken = "" if hybrid_row.ms is None else f", {hybrid_row.ms:.1f} ms"
        log(f"{len(hybrid_row.converted)} blocks converted: error {hybrid_row.damage:.4f}{time_taken}")
    return damages, rows


def _chosen(plan: Plan, damages: Any, hybrids: Any) -> tuple[int, ...]:
    """The blocks that stay converted."""
    if plan.keep is not None:
        return blocks_but(damages, keep=plan.keep)
    if plan.tolerance is not None:
        return blocks_within(hybrids, tolerance=plan.tolerance)
    assert plan.speedup is not None
    return blocks_for(hybrids, speedup=plan.speedup)


def held_out(opened: Any, plan: Plan, drawn: Drawn, most: int) -> Any:
    """Batches of held-out images with labels, where the network's own data are there; else of the images alone."""
    device = opened.device
    if opened.task == "classify" and opened.data is not None:
        images = images_of(opened, data_dir=plan.data_dir if opened.data_dir is None else None)
        step = max(len(images) // most, 1)
        subset = torch.utils.data.Subset(images, range(0, len(images), step)[:most])
        for batch, labels in create_loader(subset, batch_size=plan.batch_size):
            yield batch.to(device), labels
        return
    # of an order of its own, so that few of them were trained on
    for update in range(min(8, max(most // drawn.batch_size, 1))):
        yield drawn(10**6 + update).to(device), None


def _numbers(student: nn.Module) -> str:
    return ", ".join(map(str, conversion_of(student).paths))
