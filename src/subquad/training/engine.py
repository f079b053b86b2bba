"""Accelerate, as this library uses it: one process or many, mixed precision, accumulation, compilation."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from subquad.errors import SubquadError
from subquad.training.common import CommonRecipe


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


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt inside the block, as SIGINT does."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
