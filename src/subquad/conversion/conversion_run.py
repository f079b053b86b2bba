"""The whole way from a trained network to a converted one: replace, align, choose blocks, distil, judge, keep.

The folder has what was decided (`conversion.json`), the changes (`delta.safetensors`), the whole network
(`student.safetensors`), and while it goes on the state of each fit. The same call goes on where it was broken off.
"""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from subquad.benchmarks import describe_device
from subquad.conversion.aligning import align
from subquad.conversion.conversion_plan import (
    UPDATES,
    Judging,
    Plan,
    check_began,
    check_folder,
    check_unfinished,
    is_of_plan,
    write_plan,
)
from subquad.conversion.conversion_record import REPORT, Record, beside, blocks_of, hybrids_of
from subquad.conversion.delta_files import DELTA, STUDENT, save_converted, save_delta
from subquad.conversion.distilling import check_trainable, distil
from subquad.conversion.drawn_images import Drawn, open_images, views
from subquad.conversion.hybrids import (
    BlockDamage,
    HybridRow,
    blocks_but,
    blocks_for,
    blocks_within,
    hybrid,
    sensitivity,
    trade_off,
)
from subquad.conversion.judged_steps import JudgedSteps
from subquad.conversion.judging import Comparison
from subquad.conversion.measured_costs import CostRow, check_sizes, measure_costs
from subquad.conversion.replacing import conversion_of, convert
from subquad.conversion.untrained_rows import judge_untrained, untrained_students
from subquad.data import InputConfig
from subquad.data.dataset import PictureDataset
from subquad.errors import SubquadError, UnknownSettingError, shown, unknown_name
from subquad.holding import holding
from subquad.instructions import slow_in_bf16
from subquad.ranges import height_and_width
from subquad.runs import open_trained
from subquad.tasks import ImageNetwork, Trained
from subquad.text import columns, counted
from subquad.writing import json_text, write_json

Log = Callable[[str], None]

MADE = "made"
"""The key of a student's note that says how its teacher is made, whose weights it does without."""

ALIGNED, DISTILLED, ROWS, CHOSEN = "aligning.pt", "distilling.pt", "untrained.json", "blocks.json"
"""What is in it on the way, beside the plan."""

CHOOSING_BATCHES = 4
"""Batches of images that blocks are chosen by."""


@dataclass(frozen=True)
class Converted:
    """What `convert_run` made.

    Attributes:
        student: the converted network.
        teacher: the network as it was.
        blocks: numbers of its converted blocks.
        steps: what the student was like behind each step, by its name, see `Record`.
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
        measure = next(iter(self.steps.values())).measure
        shares = {
            measure: [step.student_score for step in self.steps.values()],
            "kept": [step.kept for step in self.steps.values()],
            "agreement": [step.agreement for step in self.steps.values()],
        }
        # without labels there is nothing to be kept
        judged = {head: column for head, column in shares.items() if any(share is not None for share in column)}
        rows = [["", *judged, "features' error", "time"]]
        for (name, step), *some in zip(self.steps.items(), *judged.values(), strict=True):
            shown = ["" if share is None else f"{share:.2%}" for share in some]
            rows.append([name, *shown, f"{step.error:.4f}", f"{self.seconds.get(name, 0):.0f} s"])
        return columns(rows)


def convert_run(
    plan: Plan,
    output: Path | str,
    *,
    teacher: nn.Module | None = None,
    config: InputConfig | None = None,
    epochs: float | None = None,
    command: str = "",
    log: Log = lambda line: None,
    **judging: Any,
) -> Converted:
    """Convert a trained network with images alone, and keep it in a folder.

    Args:
        plan: how.
        output: the folder; one that holds the same plan's unfinished work is gone on with.
        teacher: the network itself, where nothing that `open_trained` takes makes it, as one of your own classes; it is
            put into evaluation, and `plan.source` is what it is called. Whoever opens the folder has to have it:
            `load_converted(folder / "delta.safetensors", teacher)`.
        config: how that takes images; ImageNet's mean and std at the plan's `img_size` if left out.
        epochs: in place of the plan's updates, those in which its images are seen so many times, by both fits together.
        command: that is kept in the record.
        log: gets a line for each step.
        judging: fields of `Judging`: `max_judged=500`, `sizes=(224, 448)`, …

    Raises:
        SubquadError: in one line: something can't be opened or converted, or the folder holds something else.
    """
    known = [field.name for field in fields(Judging)]
    for name in judging.keys() - known:
        raise unknown_name("argument of convert_run", name, known, UnknownSettingError)
    folder, judged = Path(output), Judging(**judging)
    if judged.curve and not plan.align_updates:
        raise SubquadError("what each block costs is measured after alignment: give align_updates, or no curve")
    with holding(folder):
        check_unfinished(folder, REPORT)
        opened = None
        given = None if teacher is None else _own_network(teacher, plan, config)
        if given is not None:
            # positions of the mechanism stand on the map of such images, whatever else the network says
            plan = replace(plan, img_size=plan.img_size or given.input.img_size)
        if epochs is not None:
            # how many images there are is known when they are open
            opened = open_plan(plan, given)
            plan = plan.lasting_epochs(epochs, len(opened.pictures))
            both = f"{plan.align_updates} updates of alignment, {plan.distil_updates} of distillation"
            log(f"{epochs:g} epochs are {both}")
        check_folder(folder, plan)
        return _Run(plan, folder, judged, log, opened or open_plan(plan, given)).converted(command)


def is_kept(folder: Path, plan: Plan, *, by_epochs: bool = False) -> bool:
    """Whether a folder holds the finished conversion of a plan; `by_epochs`, whatever updates these come to.

    What a process that was killed at the very end left of the way is removed.
    """
    if not (folder / REPORT).is_file() or not is_of_plan(folder, plan, but=UPDATES if by_epochs else ()):
        return False
    with holding(folder):
        _remove_states(folder)
    return True


def _remove_states(folder: Path) -> None:
    """Remove the files of the way."""
    for name in (ALIGNED, DISTILLED, ROWS, CHOSEN):
        (folder / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class OpenedPlan:
    """What a plan names, opened.

    Attributes:
        trained: the teacher.
        input: how it takes images.
        pictures: the images of the plan.
        drawn: they, in the order in which each of the two fits sees them.
    """

    trained: Trained
    input: InputConfig
    pictures: PictureDataset
    drawn: dict[int, Drawn]


def open_plan(plan: Plan, teacher: Trained | None = None) -> OpenedPlan:
    """The trained teacher and the images of a plan; `teacher` where there is one already.

    Raises:
        SubquadError: one of them can't be opened.
    """
    opened = open_trained(plan.source, img_size=plan.img_size) if teacher is None else teacher
    if getattr(opened.model, "takes_lists", False):
        raise SubquadError(
            f"{plan.source} is of `subquad {opened.task}`, whose networks are not fitted here, as they give lists of "
            "what they find: subquad.convert(network, …) replaces its layers in Python"
        )
    if opened.data is None and opened.knows_as_data(plan.images):
        opened = replace(opened, data=plan.images)
    config = opened.image_network(plan.img_size).input
    own = opened.training_images(data_dir=plan.data_dir) if plan.images == opened.data else None
    # where they were in training, unless told otherwise
    there = opened.data_dir if plan.data_dir is None and plan.images == opened.data else plan.data_dir
    pictures = open_images(plan.images, there) if own is None else own
    transform = views(config, scale=(plan.scale, 1.0), crop_padding=plan.crop_padding)
    drawn = {seed: Drawn(pictures, transform, batch_size=plan.batch_size, seed=plan.seed + seed) for seed in range(2)}
    return OpenedPlan(opened, config, pictures, drawn)


def _own_network(teacher: Any, plan: Plan, config: InputConfig | None) -> ImageNetwork:
    """A network that a caller holds, as one that was opened: nothing says its classes, its data or how it is made."""
    if not isinstance(teacher, nn.Module):
        raise SubquadError(f"teacher is to be a network, got {shown(teacher)}; what is to be opened is plan.source")
    if not isinstance(config, InputConfig | None):
        raise SubquadError(f"config is to be a subquad.data.InputConfig, got {shown(config)}")
    if config is None:
        if plan.img_size is None:
            raise SubquadError("say how the network takes images: config=subquad.data.InputConfig(…), or plan.img_size")
        config = InputConfig(height_and_width(plan.img_size))
    device = next((one.device for one in teacher.parameters()), torch.device("cpu"))
    # of no task: what it answers is compared with the student, and nothing else is known
    return ImageNetwork("", teacher.eval(), (), None, None, device, config)


def names_of(pictures: PictureDataset) -> str:
    """A digest of the images' names, wherever they lie."""
    names = "\n".join(Path(pictures.path(place)).name for place in range(len(pictures)))
    return hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest()


class _Run:
    """A conversion at work: what is open, and what was found out so far."""

    def __init__(self, plan: Plan, folder: Path, judging: Judging, log: Log, opened: OpenedPlan) -> None:
        self.plan, self.folder, self.judging, self.log = plan, folder, judging, log
        self.opened, self.pictures, self.drawn = opened.trained, opened.pictures, opened.drawn
        self.teacher, config = self.opened.model, opened.input
        check_sizes(self.teacher, [config.img_size], "--img-size says another")
        check_sizes(self.teacher, judging.sizes)
        if plan.at is not None:
            check_sizes(self.teacher, [plan.at], "--at says another")
        self.student = convert(self.teacher, plan.attention, blocks=plan.blocks, img_size=plan.img_size)
        count = len(conversion_of(self.student).paths)
        if plan.keep is not None and plan.keep >= count:
            raise SubquadError(f"{count} blocks can be converted: keep from 0 to {count - 1}, got {plan.keep}")
        if plan.distil_updates:
            # before the time that alignment takes
            check_trainable(self.student, plan.train)
        self.judged = JudgedSteps(self.opened, config, plan, judging, self.drawn[0], log)
        self.found: dict[str, Any] = {}
        self.history: dict[str, Any] = {}

    def converted(self, command: str) -> Converted:
        """All steps of the plan, one after the other."""
        plan = self.plan
        conversion = conversion_of(self.student)
        self.log(f"{len(conversion.paths)} of {conversion.num_blocks} blocks of {plan.source} converted")
        if plan.amp and (slower := slow_in_bf16(self.opened.device)) is not None:
            self.log(f"--amp {slower}: leave it out")
        self.judged.note("swapped", self.student)
        self.drawn[0](0)
        began = {"teacher": conversion.teacher, "images": names_of(self.pictures), "count": len(self.pictures)}
        if (others := check_began(self.folder, plan, began)) is not None:
            self.log(others)
        write_plan(self.folder, plan, began)  # what fails before, as for want of a whole image, has begun nothing
        if self.judging.baseline:
            self.compare_untrained()
        if plan.align_updates:
            self.align()
            if plan.chooses or self.judging.curve:
                self.choose()
        if plan.distil_updates:
            self.distil()
        record = self.record(self.costs(), command)
        if record.broken:
            count = f"{len(record.broken)} of {len(self.pictures)}"
            self.log(f"{count} images could not be read and were left out, the first is {record.broken[0]}")
        self.keep(record)
        judged, blocks = self.judged, tuple(conversion_of(self.student).paths)
        return Converted(self.student, self.teacher, blocks, judged.steps, judged.seconds, record)

    def compare_untrained(self) -> None:
        """Judge what can be had without any training."""
        judging = {"most": self.judging.max_judged, "data": [self.judging.labelled, self.judging.labelled_dir]}
        about = {"plan": asdict(self.plan), "judging": judging, "on_held_out": self.judged.on_held_out}
        students = untrained_students(self.student, self.teacher, self.plan)
        judge_untrained(self.judged, students, self.folder / ROWS, about, self.log)

    def align(self) -> None:
        """Fit each layer to the one that it replaced."""
        plan = self.plan
        schedule = plan.schedule_of(plan.align_updates, plan.align_lr)
        done = align(self.student, self.drawn[0], teacher=self.teacher, state_file=self.folder / ALIGNED, **schedule)
        self.found |= {"before": done.before, "after": done.after}
        self.history["aligned"] = done.progress.history
        self.judged.note("aligned", self.student, done.progress.seconds)

    def choose(self) -> None:
        """Measure what each block costs, and let the student be a hybrid where the plan says so."""
        start = time.monotonic()
        damages, hybrids = self.measured_blocks()
        self.found |= {"blocks": list(damages), "hybrids": list(hybrids)}
        if self.plan.chooses:
            self.student = hybrid(self.student, _chosen(self.plan, damages, hybrids))
            self.log(f"converted are {', '.join(map(str, conversion_of(self.student).paths))}")
            self.judged.note("some blocks kept", self.student, time.monotonic() - start)

    def measured_blocks(self) -> tuple[list[BlockDamage], list[HybridRow]]:
        """What blocks cost, measured once however often it is broken off: times would choose others each time."""
        file, about = self.folder / CHOSEN, json.loads(json_text([asdict(self.plan), self.found["after"]]))
        if (before := _measured_before(file, about)) is not None:
            return before
        damages, hybrids = _measured_blocks(self.plan, self.student, self.teacher, self.drawn[0], self.log)
        rows = {"blocks": list(map(asdict, damages)), "hybrids": list(map(asdict, hybrids))}
        write_json(file, {"about": about, **rows})
        return damages, hybrids

    def distil(self) -> None:
        """Fit the whole student to its teacher."""
        plan = self.plan
        schedule = plan.schedule_of(plan.distil_updates, plan.distil_lr)
        done = distil(
            self.student,
            self.drawn[1],
            teacher=self.teacher,
            train=plan.train,
            state_file=self.folder / DISTILLED,
            **schedule,
        )
        self.history["distilled"] = done.history
        self.judged.note("distilled", self.student, done.seconds)

    def costs(self) -> list[CostRow]:
        """Time and memory of both networks."""
        costs = measure_costs(self.student, self.teacher, self.judging.sizes)
        for row in costs:
            times = f"{row.student_ms:.1f} ms for {row.teacher_ms:.1f}"
            self.log(f"{row.size[0]}×{row.size[1]}: {times}, {row.gain:.2f} times as fast")
        return costs

    def record(self, costs: list[CostRow], command: str) -> Record:
        """All that is kept of it."""
        return Record(
            asdict(self.plan),
            conversion_of(self.student).as_note(),
            self.judged.steps,
            self.judged.seconds,
            **self.found,
            broken=self.pictures.broken_paths(),
            on_held_out=self.judged.on_held_out,
            history=self.history,
            costs=costs,
            labelled=self.judged.labelled,
            command=command,
            machine=f"{describe_device(self.opened.device)}, torch {torch.__version__}",
            teacher_beside=beside(self.folder, self.plan.source),
        )

    def keep(self, record: Record) -> None:
        """Write the files of the end, and remove those of the way."""
        save_delta(self.student, self.folder / DELTA, teacher=self.teacher)
        about = {MADE: {**self.opened.made, "img_size": self.plan.img_size}} if self.opened.made else {}
        save_converted(self.student, self.folder / STUDENT, about=about)
        record.save(self.folder)
        _remove_states(self.folder)


def _measured_before(file: Path, about: Any) -> tuple[list[BlockDamage], list[HybridRow]] | None:
    """What a file holds of the same blocks; None where it is not there, is damaged or is about something else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return (blocks_of(content["blocks"]), hybrids_of(content["hybrids"])) if content["about"] == about else None
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return None


def _measured_blocks(plan: Plan, student: nn.Module, teacher: nn.Module, drawn: Drawn, log: Log) -> tuple[Any, Any]:
    """What each converted block costs alone, and what they cost together, those that cost least first."""
    device = next(student.parameters()).device
    images = [drawn(plan.align_updates + place).to(device) for place in range(CHOOSING_BATCHES)]
    damages = sensitivity(student, teacher, images)
    for row in damages:
        log(f"block {row.block} alone: error {row.damage:.4f}")
    at = None if plan.at is None else (plan.at, plan.at)
    rows = trade_off(student, teacher, images, damages, at=at)
    for hybrid_row in rows:
        time_taken = "" if hybrid_row.ms is None else f", {hybrid_row.ms:.1f} ms"
        log(f"{counted(len(hybrid_row.converted), 'block')} converted: error {hybrid_row.damage:.4f}{time_taken}")
    return damages, rows


def _chosen(plan: Plan, damages: Any, hybrids: Any) -> tuple[int, ...]:
    """The blocks that stay converted."""
    if plan.keep is not None:
        return blocks_but(damages, keep=plan.keep)
    if plan.tolerance is not None:
        return blocks_within(hybrids, tolerance=plan.tolerance)
    assert plan.speedup is not None
    return blocks_for(hybrids, speedup=plan.speedup)
