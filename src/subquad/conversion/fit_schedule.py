"""How long a converted network is fitted to its teacher, and how fast."""

import math
from dataclasses import dataclass, fields
from operator import index
from typing import Any

from subquad.errors import SubquadError, UnknownSettingError, shown, unknown_name
from subquad.optimizers import OPTIMIZERS

WARM_UP = 0.05
"""Share of the updates in which the rate rises."""


@dataclass(frozen=True)
class Schedule:
    """How long and how fast.

    Attributes:
        updates: at most.
        lr: rate at its highest; it falls to nothing along a cosine.
        weight_decay: of the optimizer.
        opt: the optimizer, one of `subquad.optimizers.OPTIMIZERS`.
        time_budget: seconds at most, of all sittings together; the rate falls in time for it.
        amp: compute in bf16 where PyTorch's autocast does.
    """

    updates: int = 250
    lr: float = 1e-3
    weight_decay: float = 0.0
    time_budget: float | None = None
    amp: bool = False
    opt: str = "adamw"

    def __post_init__(self) -> None:
        self._as_plain_numbers()
        if self.updates < 1 or not 0 < self.lr < math.inf or not 0 <= self.weight_decay < math.inf:
            raise SubquadError(f"at least one update and a rate above 0, got {self.updates} and {self.lr}")
        if self.time_budget is not None and not 0 < self.time_budget < math.inf:
            raise SubquadError(f"a time budget is in seconds above 0, got {self.time_budget}")
        if self.opt not in OPTIMIZERS:
            raise unknown_name("optimizer", self.opt, OPTIMIZERS)

    def _as_plain_numbers(self) -> None:
        """Let numbers of any library be Python's own, which a state file can hold."""
        try:
            object.__setattr__(self, "updates", index(self.updates))
            timed = () if self.time_budget is None else ("time_budget",)
            for name in ("lr", "weight_decay", *timed):
                object.__setattr__(self, name, float(getattr(self, name)))
        except (TypeError, ValueError):
            raise SubquadError(
                f"updates are a whole number, lr, weight_decay and time_budget are numbers, got {shown(vars(self))}"
            ) from None

    def rate(self, share: float) -> float:
        """The rate at a share of the way, 0 to 1."""
        if share < WARM_UP:
            return self.lr * max(share / WARM_UP, 0.01)
        return self.lr * 0.5 * (1 + math.cos(math.pi * (share - WARM_UP) / (1 - WARM_UP)))

    def share(self, updates: int, seconds: float) -> float:
        """How much of the way is done: of the updates, or of the time where that is further."""
        done = updates / self.updates
        return done if self.time_budget is None else max(done, seconds / self.time_budget)


def schedule_of(given: dict[str, Any], **usual: Any) -> Schedule:
    """A schedule with some fields given, and others as is usual.

    Raises:
        SubquadError: there is no such field, or a number is out of its range.
    """
    known = [one.name for one in fields(Schedule)]
    if wrong := [name for name in given if name not in known]:
        raise unknown_name("setting of a fit", wrong[0], known, UnknownSettingError)
    return Schedule(**(usual | given))
