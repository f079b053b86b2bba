"""How a network is converted, and what is measured of it."""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from subquad.attention import ATTENTION
from subquad.conversion.distilling import TRAINED
from subquad.errors import SubquadError, unknown_name
from subquad.models.attention_names import names_in
from subquad.models.pretrained import HUB_CONFIG
from subquad.optimizers import OPTIMIZERS
from subquad.ranges import Pixels, height_and_width
from subquad.weights.files import BEST
from subquad.writing import write_json

PLAN = "plan.json"
"""The plan in the folder of a conversion, from its beginning."""

UPDATES = ("align_updates", "distil_updates")
"""The fields of a plan that `lasting_epochs` sets."""


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
        img_size: pixels, one number or (height, width); as the network was trained if None.
        align_updates, distil_updates: of the two fits; 0 for none.
        time_budget: minutes that both fits take at most, shared as their updates are; as long as these take if None.
        align_lr, distil_lr: their rates.
        opt: the optimizer of both, one of `subquad.optimizers.OPTIMIZERS`.
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
    img_size: Pixels | None = None
    align_updates: int = 500
    distil_updates: int = 500
    time_budget: float | None = None
    align_lr: float = 1e-3
    distil_lr: float = 3e-4
    opt: str = "adamw"
    train: str = "all"
    batch_size: int = 64
    crop_padding: int = 0
    scale: float = 0.5
    amp: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.img_size is not None:
            height_and_width(self.img_size)
        if self.train not in TRAINED:
            raise unknown_name("train", self.train, TRAINED)
        if self.opt not in OPTIMIZERS:
            raise unknown_name("opt", self.opt, OPTIMIZERS)
        for name in names_in(self.attention):  # before weights are fetched
            if name not in ATTENTION:
                raise unknown_name("attention", name, ATTENTION)
        if min(self.align_updates, self.distil_updates) < 0 or self.batch_size < 1:
            raise SubquadError("updates are at least 0, and images of an update at least 1")
        if self.time_budget is not None and not 0 < self.time_budget < math.inf:
            raise SubquadError(f"a time budget is in minutes above 0, got {self.time_budget}")
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

    def lasting(self, updates: int) -> "Plan":
        """The same with so many updates of both fits together: half of them alignment, half distillation.

        Raises:
            SubquadError: there are not two of them.
        """
        if updates < 2:
            raise SubquadError(f"updates of both fits together are at least 2, got {updates}")
        return replace(self, align_updates=updates // 2, distil_updates=updates - updates // 2)

    def lasting_epochs(self, epochs: float, images: int) -> "Plan":
        """The same with the updates of both fits together in which so many images are seen so many times.

        Raises:
            SubquadError: the number of epochs is none.
        """
        if not 0 < epochs < math.inf:
            raise SubquadError(f"epochs of both fits together are above 0, got {epochs}")
        in_epoch = max(images // self.batch_size, 1)
        return self.lasting(max(round(epochs * in_epoch), 2))

    def schedule_of(self, updates: int, lr: float) -> dict[str, Any]:
        """Fields of the `Schedule` of one of the fits."""
        share = updates / max(self.align_updates + self.distil_updates, 1)
        budget = None if self.time_budget is None else 60 * self.time_budget * share
        return {"updates": updates, "lr": lr, "amp": self.amp, "opt": self.opt, "time_budget": budget}


@dataclass(frozen=True)
class Judging:
    """What is measured of a conversion beside its steps; none of it changes the student.

    Attributes:
        max_judged: held-out images that the student is compared with its teacher on, evenly chosen.
        curve: measure what each block costs, and the hybrids, though no blocks are chosen by it.
        sizes: of images that both networks are timed on: pixels of both sides, or (height, width).
        labelled: data with labels, for simple classifiers of the features; see `load_dataset`.
        baseline: judge networks without any training as well, as rows in front of the steps.
        labelled_dir: where the images of `labelled` are; where those of the plan are, if both are of one data set.
    """

    max_judged: int = 2000
    curve: bool = False
    sizes: tuple[int | tuple[int, int], ...] = ()
    labelled: str | None = None
    labelled_dir: str | None = None
    baseline: bool = False

    def __post_init__(self) -> None:
        if self.labelled_dir is not None and self.labelled is None:
            raise SubquadError(
                f"{self.labelled_dir} is where labelled data are, of which none are named: give labelled too"
            )
        for size in self.sizes:
            height_and_width(size, "a size of sizes")


OTHERS = ("run.json", BEST, HUB_CONFIG)
"""What a folder has from which another network is opened: of a run, of timm or transformers, or of the hub."""


def check_unfinished(folder: Path, done: str) -> None:
    """Raise where a folder holds a finished conversion, whose record is called `done`, or another network."""
    if found := [name for name in OTHERS if (folder / name).is_file()]:
        # it would be opened for the student, or the student for its own teacher
        raise SubquadError(f"{folder} holds a network already, whose {found[0]} is there: take another output")
    if (folder / done).exists():
        raise SubquadError(f"{folder} holds a converted network already: take another output")


def check_folder(folder: Path, plan: Plan) -> None:
    """Raise where a folder holds a conversion by another plan."""
    if not (folder / PLAN).exists():
        return
    before, different = _differing(folder, plan)
    if different:
        raise SubquadError(
            f"{folder} holds unfinished work with {different[0]} = {before.get(different[0])}: go on with that, or "
            "take another output"
        )


def is_of_plan(folder: Path, plan: Plan, *, but: Collection[str] = ()) -> bool:
    """Whether what a folder holds is of this plan, whatever some of its fields are."""
    return (folder / PLAN).is_file() and not set(_differing(folder, plan)[1]) - set(but)


def _differing(folder: Path, plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """The plan of a folder, and the names of the fields in which another one differs from it."""
    try:
        before = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise SubquadError(f"{folder / PLAN} is damaged: take another output") from None
    now = json.loads(json.dumps(asdict(plan)))
    # a field that a plan of an earlier version has not is as it was then
    before = {one.name: one.default for one in fields(Plan)} | before
    return before, [one.name for one in fields(Plan) if before.get(one.name) != now[one.name]]


def write_plan(folder: Path, plan: Plan, began: Mapping[str, Any]) -> None:
    """Write down what is begun, and of which network and images."""
    write_json(folder / PLAN, {**asdict(plan), BEGAN: began})


BEGAN = "began"
"""The key of a plan's file that says of which weights and images it was begun; earlier versions have none."""


def check_began(folder: Path, plan: Plan, began: Mapping[str, Any]) -> str | None:
    """Hold what unfinished work was begun with against what is there now; a line where the images are others.

    Raises:
        SubquadError: the network has other weights, of which the fits know nothing.
    """
    if not (folder / PLAN).is_file():
        return None
    before = _differing(folder, plan)[0].get(BEGAN)
    if not isinstance(before, dict):
        return None
    if before.get("teacher") != began["teacher"]:
        raise SubquadError(
            f"{folder} holds unfinished work on other weights than {plan.source} has now: put these back, or take "
            "another output"
        )
    if before.get("images") == began["images"]:
        return None
    return f"{plan.images} has other images than when this was begun, {before.get('count')} then, {began['count']} now"
