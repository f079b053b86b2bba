"""What a student was like behind each step of a conversion, always on the same images."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from subquad.conversion.conversion_plan import Judging, Plan
from subquad.conversion.drawn_images import Drawn, has_parts
from subquad.conversion.judging import Comparison, compare_networks
from subquad.conversion.labelled_features import LabelledComparison, LabelledJudge, Readable, labelled_sets
from subquad.data import InputConfig
from subquad.errors import SubquadError
from subquad.tasks import HeldOut, Trained

MOST_BATCHES = 8
"""Of the plan's own images, where a network's data are not there."""

APART = 10**6
"""Number of the first of these batches: of an order of its own, so that few of them were trained on."""

Log = Callable[[str], None]


def held_out_of(opened: Trained, plan: Plan, most: int, log: Log = lambda line: None) -> HeldOut | None:
    """The held-out data of a network's own task, where they are there; `log` is told why they are not.

    A network that says its classes and not its data, as timm's folders, is judged on the images that it is converted
    by, where they have these classes and a part that is held out.
    """
    if opened.data is None and opened.classes and has_parts(plan.images, plan.data_dir):
        opened = replace(opened, data=plan.images)
    told = plan.data_dir if opened.data == plan.images else None
    # where they were in training; where they are said to be, if nothing knows that, or they have moved
    places = [told] if opened.data_dir is None else [None, *([] if told is None else [told])]
    reason = "nothing says which data it was trained on"
    for place in places:
        try:
            held_out: HeldOut | None = opened.held_out(data_dir=place, most=most)
        except SubquadError as error:
            reason = f"the network's own data can't be opened: {error}"
            continue
        if held_out is not None:
            return held_out
        break
    log(f"judged on other parts of {plan.images}, which it is fitted to, as {reason}")
    return None


def judged_batches(held_out: HeldOut | None, drawn: Drawn, most: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Batches of held-out images with labels, where the network's own data are there; else of images alone."""
    if held_out is not None:
        yield from held_out.batches(drawn.batch_size)
        return
    for update in range(min(MOST_BATCHES, max(most // drawn.batch_size, 1))):
        yield drawn(APART + update), None


@dataclass(frozen=True)
class Judged:
    """What a network was like.

    Attributes:
        comparison: beside the teacher.
        told: what classifiers make of its features; None where no data with labels were named.
    """

    comparison: Comparison
    told: Readable | None = None

    def as_note(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


class JudgedSteps:
    """Judges a student behind each step.

    Attributes:
        steps: what was found, by the names of the steps, and in front of them that of other networks.
        seconds: that the steps took.

    Raises:
        SubquadError: there are no such labelled data.
    """

    def __init__(self, opened: Trained, config: InputConfig, plan: Plan, judging: Judging, drawn: Drawn, log: Log):
        self.teacher: nn.Module = opened.model
        self.log, self.drawn, self.most = log, drawn, judging.max_judged
        self.steps: dict[str, Comparison] = {}
        self.seconds: dict[str, float] = {}
        self._told: dict[str, Readable] = {}
        self._labelled = None
        if judging.labelled is not None:
            same = plan.data_dir if judging.labelled == plan.images else None
            folder = judging.labelled_dir or same
            sets = labelled_sets(judging.labelled, config, data_dir=folder, max_images=judging.max_judged)
            self._labelled = LabelledJudge(sets, opened.model, opened.classes, batch_size=plan.batch_size)
        self._held_out = held_out_of(opened, plan, judging.max_judged, log)

    def note(self, name: str, student: nn.Module, seconds: float | None = None) -> None:
        """Judge what a step made, which took so many seconds."""
        judged = self.judge(student)
        self._add({name: judged})
        if seconds is not None:
            self.seconds[name] = seconds
        self.tell(name, judged)

    def judge(self, student: nn.Module) -> Judged:
        """What a network is like, which need not be of a step."""
        batches = judged_batches(self._held_out, self.drawn, self.most)
        own = self._held_out
        figure: dict[str, Any] = {}
        if own is not None:
            figure = {"measure": own.measure, "tally": own.tally, "counted": own.counted}
        comparison = compare_networks(student, self.teacher, batches, **figure)
        return Judged(comparison, None if self._labelled is None else self._labelled.judge(student))

    def put_in_front(self, rows: Mapping[str, Judged]) -> None:
        """Let what was found of other networks stand in front of the steps, by the names of the rows."""
        steps, self.steps = self.steps, {}
        told, self._told = self._told, {}
        self._add(rows)
        self.steps |= steps
        self._told |= told

    def tell(self, name: str, judged: Judged) -> None:
        """Log what was found."""
        self.log(f"{name}: {judged.comparison.text}")
        if judged.told is not None:
            self.log(f"{name}: {judged.told.text}")

    def _add(self, rows: Mapping[str, Judged]) -> None:
        for name, judged in rows.items():
            self.steps[name] = judged.comparison
            if judged.told is not None:
                self._told[name] = judged.told

    @property
    def on_held_out(self) -> bool:
        """Whether it is judged on images that it was not fitted to."""
        return self._held_out is not None

    @property
    def labelled(self) -> LabelledComparison | None:
        """What classifiers made of the features; None where no data with labels were named."""
        return None if self._labelled is None else replace(self._labelled.comparison, steps=self._told)


def few_images(held_out: HeldOut | None, drawn: Drawn, count: int) -> Tensor:
    """The first so many judged images, fewer where they are of several sizes."""
    found: list[Tensor] = []
    for images, _ in judged_batches(held_out, drawn, count):
        found += [image for image in images if not found or image.shape == found[0].shape]
        if len(found) >= count:
            break
    return torch.stack(found[:count])
