"""Accelerate, as this library uses it: one process or many, mixed precision, accumulation, compilation."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from subquad.errors import SubquadError, Terminated
from subquad.tasks.common_recipe import CommonRecipe


def make_accelerator(recipe: CommonRecipe) -> Any:
    """An Accelerator for this recipe; it finds out by itself how many processes there are, and on what."""
    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState
    except ImportError as error:
        raise SubquadError("training needs accelerate: pip install 'subquad[train]'") from error
    if recipe.amp == "fp16" and not torch.cuda.is_available():
        raise SubquadError("fp16 training needs a CUDA device, and there is none: take --amp bf16 or none")
    # accelerate keeps the settings of a process's first Accelerator and refuses others, but runs may follow each other
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(
        mixed_precision=recipe.amp or "no",
        gradient_accumulation_steps=recipe.grad_accum_steps,
        dynamo_backend="inductor" if recipe.compile else "no",
        step_scheduler_with_optimizer=False,
        # without it the processes of torchrun do not find each other where there is nothing but CPUs
        cpu=not torch.accelerator.is_available(),
    )


class Interruptions:
    """Inside the block SIGINT raises KeyboardInterrupt and SIGTERM Terminated; what must not be broken off waits.

    Python swallows what is raised where nobody can catch it, in `__del__`; then the next `check` raises it.
    """

    def __init__(self) -> None:
        self._holding_back = False
        self._came: type[KeyboardInterrupt] | None = None
        self._last = -math.inf
        self._process = os.getpid()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruptions":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                # whoever ignores them goes on ignoring them
                if (handler := signal.getsignal(number)) != signal.SIG_IGN:
                    self._before[number] = handler or signal.SIG_DFL
                    signal.signal(number, self._stop)
        self._say_swallowed, sys.unraisablehook = sys.unraisablehook, self._keep_swallowed
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._say_swallowed
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Let the block come to its end first."""
        self._holding_back = True
        try:
            yield
        finally:
            self._holding_back = False
        self.check()

    def check(self) -> None:
        """Raise the interruption that came meanwhile."""
        if (came := self._came) is not None:
            self._came = None
            raise came

    def _keep_swallowed(self, swallowed: Any) -> None:
        if issubclass(swallowed.exc_type, KeyboardInterrupt):
            self._came = swallowed.exc_type
        else:
            self._say_swallowed(swallowed)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # a loader process: its parent ends it, which it must not answer with a trace
            if number == signal.SIGTERM:
                os._exit(128 + number)
        elif self._holding_back:
            self._came = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        # torchrun sends a second one, which must not break off what tidies up after the first
        elif time.monotonic() - self._last > 2:
            self._last = time.monotonic()
            # a handler that was there before knows when to raise, as that of the command does during imports
            if callable(handler := self._before[number]):
                handler(number, frame)
            else:
                raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
