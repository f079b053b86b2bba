"""The loop in which a converted network is fitted to its teacher: alignment and distillation hand in what differs.

Images that come behind those of the updates measure the network before, on the way and at the end, and the best that
was measured of each part is what a fit returns: nothing that was near its teacher ends further away.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from subquad.conversion.best_states import BestStates, Part
from subquad.conversion.fit_schedule import Schedule
from subquad.conversion.unlabelled_images import Batches, on_device
from subquad.errors import SubquadError
from subquad.inference import in_evaluation
from subquad.optimizers import optimizer_of
from subquad.uninterrupted import uninterrupted
from subquad.weights.fitting import some
from subquad.writing import replacing

CLIP = 1.0
"""Norm of the gradient of each part."""

HELD_OUT = 2
"""Batches behind those of the updates, which the network is measured on."""

MEASURED = 8
"""How often it is measured on the way, at most."""

APART = 5
"""Updates between two measurements, at least."""

SAVED_EVERY = 60.0
"""Seconds between two states on disk."""


@dataclass(frozen=True)
class Goal:
    """What a fit is for.

    Attributes:
        what: the name of the fit, for the progress bar.
        parts: what is fitted; all other parameters stay as they are.
        step: what is measured on a batch, by name; adds the gradients of it where gradients are on.
        begin: called with the held-out batches before the first update.
    """

    what: str
    parts: Sequence[Part]
    step: Callable[[Any], dict[str, float]]
    begin: Callable[[Sequence[Any]], None] = lambda held_out: None


@dataclass
class Progress:
    """What a fit has done so far.

    Attributes:
        updates: done.
        seconds: that they took, with what was measured between them.
        history: what was lowered, by name, every few updates: pairs of the update's number and the figure of its batch.
        judged: the same on held-out batches: pairs of the number of updates before and the figure.
        last: figures on the held-out batches of what the fit returns.
        due: whether the state that was reached is to be measured next.
    """

    updates: int = 0
    seconds: float = 0.0
    history: dict[str, list[list[float]]] = field(default_factory=dict)
    judged: dict[str, list[list[float]]] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    due: bool = False

    @property
    def first(self) -> dict[str, float]:
        """Figures on the held-out batches before the first update."""
        return {name: points[0][1] for name, points in self.judged.items()}

    @property
    def judged_at(self) -> int:
        """Updates before the last measurement; -1 where there was none."""
        return max((int(points[-1][0]) for points in self.judged.values()), default=-1)


def fit(
    goal: Goal,
    student: nn.Module,
    teacher: nn.Module,
    batches: Batches,
    schedule: Schedule,
    *,
    state_file: Path | str | None = None,
) -> Progress:
    """Make updates until the schedule ends, and set each part to the best that was measured of it.

    Dropout and stochastic depth are off, as they are noise here: the teacher has none either.

    Args:
        goal: what is fitted, and to what.
        student: what is trained.
        teacher: in evaluation for that time.
        batches: the images of each update.
        schedule: how long and how fast.
        state_file: goes on with what is in it, and leaves the state in it: after a minute, at the end, and when it is
            broken off.

    Raises:
        SubquadError: a loss is not finite, the file is of another fit, or what is trained is the teacher's own.
    """
    _check_teachers_own(goal, student, teacher)
    state = None if state_file is None else Path(state_file)
    with _only(student, goal.parts), in_evaluation(teacher):
        return _Fit(goal, student, batches, schedule, state).run()


def _check_teachers_own(goal: Goal, student: nn.Module, teacher: nn.Module) -> None:
    """Raise where what is trained is the teacher's own: it would follow its student."""
    trained = {id(parameter) for part in goal.parts for parameter in part.parameters}
    theirs = {id(parameter) for parameter in teacher.parameters()}
    ours = dict(student.named_parameters(remove_duplicate=False))
    if both := [name for name, parameter in ours.items() if id(parameter) in trained & theirs]:
        raise SubquadError(
            f"{goal.what}: {some(both)} of the student are the teacher's own, which would be trained with it: give the "
            "teacher a copy (copy.deepcopy), or train other parts, as by train='attention'"
        )


@contextmanager
def _only(student: nn.Module, parts: Sequence[Part]) -> Iterator[None]:
    """Gradients for some parameters alone and no noise, for the time of the context."""
    wanted = [(parameter, parameter.requires_grad) for parameter in student.parameters()]
    kept = {id(parameter) for part in parts for parameter in part.parameters}
    try:
        for parameter, _ in wanted:
            parameter.requires_grad_(id(parameter) in kept)
        with in_evaluation(student):
            yield
    finally:
        for parameter, trainable in wanted:
            parameter.requires_grad_(trainable)


class _Fit:
    """A fit at work."""

    def __init__(self, goal: Goal, model: nn.Module, batches: Batches, schedule: Schedule, state: Path | None):
        self.goal, self.model, self.batches, self.schedule, self.state = goal, model, batches, schedule, state
        self.device = next(model.parameters()).device
        if any(one.dtype == torch.float16 for part in goal.parts for one in part.parameters):
            # what keeps optimizers from dividing by zero is zero there
            raise SubquadError(
                f"{goal.what}: parameters of float16 can't be trained, at any rate: fit the network in fp32 or bf16, "
                "and give it half precision then"
            )
        groups = [{"params": list(part.parameters)} for part in goal.parts]
        self.optimizer = optimizer_of(groups, schedule.opt, lr=schedule.lr, weight_decay=schedule.weight_decay)
        self.progress, self.best = Progress(), BestStates(goal.parts)
        self.held_out = [batches(schedule.updates + place) for place in range(HELD_OUT)]
        self.began, self.seconds_before, self.is_whole = 0.0, 0.0, True

    def run(self) -> Progress:
        if self.state is not None and self.state.exists():
            self.resume(self.state)
        else:
            self.goal.begin([on_device(batch, self.device) for batch in self.held_out])
            self.judge()
        bar = tqdm(
            total=self.schedule.updates,
            initial=self.progress.updates,
            desc=self.goal.what,
            leave=False,
            disable=None,
        )
        saved = self.began = time.monotonic()
        self.seconds_before = self.progress.seconds
        try:
            if self.progress.due:
                self.judge()
            while (share := self.share) < 1:
                bar.set_postfix(self.update(share), refresh=False)
                bar.update()
                if self.progress.due:
                    self.judge()
                if self.state is not None and time.monotonic() - saved > SAVED_EVERY:
                    self.save(self.state)
                    saved = time.monotonic()
            self.best.put_back()
            self.progress.last = self.best.figures
        finally:
            bar.close()
            # of what failed within a step the state before is kept
            if self.state is not None and self.is_whole:
                self.save(self.state)
        self.optimizer.zero_grad(set_to_none=True)
        return self.progress

    @property
    def share(self) -> float:
        return self.schedule.share(self.progress.updates, self.progress.seconds)

    def update(self, share: float) -> dict[str, str]:
        """One update; what it measured, as the bar shows it."""
        number, rate = self.progress.updates, self.schedule.rate(share)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        figures = self.measured(self.batches(number))
        if wrong := [name for name, figure in figures.items() if not math.isfinite(figure)]:
            raise SubquadError(
                f"{self.goal.what}: {wrong[0]} is {figures[wrong[0]]} in update {number + 1}: take a lower rate than "
                f"{self.schedule.lr:g}"
            )
        for part in self.goal.parts:
            nn.utils.clip_grad_norm_(list(part.parameters), CLIP)
        with uninterrupted():
            self.is_whole = False
            self.optimizer.step()
            if number % max(self.schedule.updates // 50, 1) == 0:
                for name, figure in figures.items():
                    self.progress.history.setdefault(name, []).append([number, figure])
            self.progress.updates += 1
            self.progress.seconds = self.elapsed()
            self.progress.due = self.is_judged_after(share)
            self.is_whole = True
        return {name: f"{figure:.3g}" for name, figure in list(figures.items())[-2:]}

    def elapsed(self) -> float:
        """Seconds that all updates took, those before the fit was broken off too."""
        return self.seconds_before + time.monotonic() - self.began

    def measured(self, batch: Any) -> dict[str, float]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.schedule.amp):
            return self.goal.step(on_device(batch, self.device))

    def is_judged_after(self, share: float) -> bool:
        """Whether the update that began at this share of the way is the last, or completes one of the parts."""
        done = self.share
        passed = int(done * MEASURED) > int(share * MEASURED)
        return done >= 1 or (passed and self.progress.updates - self.progress.judged_at >= APART)

    @torch.no_grad()
    def judge(self) -> None:
        """Measure on the held-out batches, and keep what is better than ever."""
        rows = [self.measured(batch) for batch in self.held_out]
        figures = {name: math.fsum(row[name] for row in rows) / len(rows) for name in rows[0]}
        if self.progress.updates == 0 and not math.isfinite(math.fsum(figures.values())):
            wrong = next(name for name, figure in figures.items() if not math.isfinite(figure))
            raise SubquadError(
                f"{self.goal.what}: {wrong} is {figures[wrong]} before the first update: images, or what a network "
                "answers to them, are not finite"
            )
        with uninterrupted():
            for name, figure in figures.items():
                self.progress.judged.setdefault(name, []).append([self.progress.updates, figure])
            self.best.note(figures)
            self.progress.due = False
            if self.began:
                self.progress.seconds = self.elapsed()

    def save(self, path: Path) -> None:
        content = {"what": self.goal.what, "schedule": asdict(self.schedule), "progress": asdict(self.progress)}
        content |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        content["best"] = self.best.state_dict()
        # through a file of ours, which says why it can't be written
        with replacing(path) as aside, aside.open("wb") as file:
            torch.save(content, file)

    def resume(self, path: Path) -> None:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            if (content["what"], Schedule(**content["schedule"])) != (self.goal.what, self.schedule):
                raise SubquadError(f"{path} is of another fit: remove it, or go on with the settings it began with")
            self.model.load_state_dict(content["model"])
            self.optimizer.load_state_dict(content["optimizer"])
            self.best.load_state_dict(content["best"])
            self.progress = Progress(**content["progress"])
        except SubquadError:
            raise
        except Exception as error:
            raise SubquadError(f"{path} is damaged, remove it to begin anew: {type(error).__name__}") from None
