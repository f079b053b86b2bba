"""The loop in which a converted network is fitted to its teacher: alignment and distillation share it."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from subquad.conversion.unlabelled_images import Batches, on_device
from subquad.errors import SubquadError, UnknownSettingError, unknown_name
from subquad.writing import replacing

Step = Callable[[Any], dict[str, float]]
"""Adds gradients for a batch and returns what was measured on it."""

WARM_UP = 0.05
"""Share of the updates in which the rate rises."""

CLIP = 1.0
"""Norm of the gradient of each group of parameters."""

SAVED_EVERY = 60.0
"""Seconds between two states on disk."""


@dataclass(frozen=True)
class Schedule:
    """How long and how fast.

    Attributes:
        updates: at most.
        lr: rate at its highest; it falls to nothing along a cosine.
        weight_decay: of AdamW.
        time_budget: seconds at most, of all sittings together; the rate falls in time for it.
        amp: compute in bf16 where PyTorch's autocast does.
    """

    updates: int = 250
    lr: float = 1e-3
    weight_decay: float = 0.0
    time_budget: float | None = None
    amp: bool = False

    def __post_init__(self) -> None:
        if self.updates < 1 or not 0 < self.lr < math.inf or not 0 <= self.weight_decay < math.inf:
            raise SubquadError(f"at least one update and a rate above 0, got {self.updates} and {self.lr}")
        if self.time_budget is not None and not 0 < self.time_budget < math.inf:
            raise SubquadError(f"a time budget is in seconds above 0, got {self.time_budget}")

    def rate(self, share: float) -> float:
        """The rate at a share of the way, 0 to 1."""
        if share < WARM_UP:
            return self.lr * max(share / WARM_UP, 0.01)
        return self.lr * 0.5 * (1 + math.cos(math.pi * (share - WARM_UP) / (1 - WARM_UP)))


def schedule_of(given: dict[str, Any], **usual: Any) -> Schedule:
    """A schedule with some fields given, and others as is usual.

    Raises:
        SubquadError: there is no such field, or a number is out of its range.
    """
    known = [one.name for one in fields(Schedule)]
    if wrong := [name for name in given if name not in known]:
        raise unknown_name("setting of a fit", wrong[0], known, UnknownSettingError)
    return Schedule(**(usual | given))


@dataclass
class Progress:
    """What a fit has done so far.

    Attributes:
        updates: done.
        seconds: that they took.
        history: what was measured, by name, every few updates: pairs of the update's number and the figure.
    """

    updates: int = 0
    seconds: float = 0.0
    history: dict[str, list[list[float]]] = field(default_factory=dict)

    @property
    def last(self) -> dict[str, float]:
        """The last figures, by name."""
        return {name: points[-1][1] for name, points in self.history.items()}

    @property
    def first(self) -> dict[str, float]:
        """The first figures, by name."""
        return {name: points[0][1] for name, points in self.history.items()}


def fit(
    step: Step,
    groups: Sequence[Sequence[nn.Parameter]],
    model: nn.Module,
    batches: Batches,
    schedule: Schedule,
    *,
    what: str,
    state_file: Path | None = None,
) -> Progress:
    """Make updates until the schedule ends.

    Args:
        step: adds gradients to the parameters of `groups`.
        groups: parameters whose gradients are clipped together.
        model: what is trained; parameters outside of `groups` stay as they are.
        batches: the images of each update.
        schedule: how long and how fast.
        what: for the progress bar.
        state_file: goes on with what is in it, and leaves the state in it: after a minute, at the end, and when it is
            broken off.

    Raises:
        SubquadError: a loss is not finite, or the file is of another fit.
    """
    optimizer = torch.optim.AdamW(
        [{"params": list(group)} for group in groups], lr=schedule.lr, weight_decay=schedule.weight_decay
    )
    progress = Progress()
    if state_file is not None and state_file.exists():
        progress = _resume(state_file, model, optimizer, schedule, what)
    every = max(schedule.updates // 50, 1)
    saved = started = time.monotonic()
    before = progress.seconds
    bar = tqdm(total=schedule.updates, initial=progress.updates, desc=what, leave=False, disable=None)
    try:
        while (share := _share(progress, schedule)) < 1:
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(share)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(_device_of(model).type, torch.bfloat16, enabled=schedule.amp):
                figures = step(on_device(batches(progress.updates), _device_of(model)))
            if wrong := [name for name, figure in figures.items() if not math.isfinite(figure)]:
                raise SubquadError(
                    f"{what}: {wrong[0]} is {figures[wrong[0]]} in update {progress.updates + 1}: take a lower rate "
                    f"than {schedule.lr:g}"
                )
            for parameters in groups:
                nn.utils.clip_grad_norm_(list(parameters), CLIP)
            optimizer.step()
            if progress.updates % every == 0:
                for name, figure in figures.items():
                    progress.history.setdefault(name, []).append([progress.updates, figure])
                bar.set_postfix({name: f"{figure:.3g}" for name, figure in list(figures.items())[-2:]})
            progress.updates += 1
            progress.seconds = before + time.monotonic() - started
            bar.update()
            if state_file is not None and time.monotonic() - saved > SAVED_EVERY:
                _save(state_file, model, optimizer, progress, schedule, what)
                saved = time.monotonic()
    finally:
        bar.close()
        if state_file is not None:
            _save(state_file, model, optimizer, progress, schedule, what)
    optimizer.zero_grad(set_to_none=True)
    return progress


def _share(progress: Progress, schedule: Schedule) -> float:
    done = progress.updates / schedule.updates
    return done if schedule.time_budget is None else max(done, progress.seconds / schedule.time_budget)


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _save(path: Path, model: nn.Module, optimizer: Any, progress: Progress, schedule: Schedule, what: str) -> None:
    content = {"what": what, "schedule": asdict(schedule), "progress": asdict(progress)}
    content |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with replacing(path) as aside:
        torch.save(content, aside)


def _resume(path: Path, model: nn.Module, optimizer: Any, schedule: Schedule, what: str) -> Progress:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if (content["what"], content["schedule"]) != (what, asdict(schedule)):
            raise SubquadError(f"{path} is of another fit: remove it, or go on with the settings it began with")
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        return Progress(**content["progress"])
    except SubquadError:
        raise
    except Exception as error:
        raise SubquadError(f"{path} is damaged, remove it to begin anew: {type(error).__name__}") from None
