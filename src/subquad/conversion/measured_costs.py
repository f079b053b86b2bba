"""Time and memory of a converted network beside its teacher's, at several sizes of images."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from subquad.benchmarks.memory import peak_memory_mb
from subquad.errors import SubquadError
from subquad.text import one_line
from subquad.timing import interleaved_ms

REPEATS = 5
"""Passes of each network at each size, in turns."""


@dataclass(frozen=True)
class CostRow:
    """A pass over one image, forward, of both networks.

    Attributes:
        px: of both sides of the image.
        teacher_ms, student_ms: medians.
        teacher_mb, student_mb: the most memory at once beyond the weights, in 2^20 bytes.
    """

    px: int
    teacher_ms: float
    student_ms: float
    teacher_mb: float
    student_mb: float

    @property
    def gain(self) -> float:
        """How many times as fast the student is."""
        return self.teacher_ms / self.student_ms


def check_sizes(teacher: nn.Module, sizes: Sequence[int]) -> None:
    """Run a network once at each size.

    Raises:
        SubquadError: it does not take images of one of them.
    """
    for px in sizes:
        try:
            with torch.inference_mode():
                teacher(_image(teacher, px))
        except Exception as error:
            # each library refuses sizes in its own way
            raise SubquadError(
                f"the network does not run at {px}×{px}, which --sizes asks for: {one_line(error, 120)}"
            ) from None


def measure_costs(
    student: nn.Module, teacher: nn.Module, sizes: Sequence[int], *, repeats: int = REPEATS
) -> list[CostRow]:
    """A row for each size, in pixels of both sides; both networks take turns."""
    device = next(student.parameters()).device
    rows = []
    for px in sizes:
        image = _image(teacher, px)
        passes = {name: _Pass(model, image) for name, model in (("teacher", teacher), ("student", student))}
        for run in passes.values():
            run()
        ms = {name: statistics.median(each) for name, each in interleaved_ms(passes, repeats, device).items()}
        peaks = {name: peak_memory_mb(run, device) for name, run in passes.items()}
        rows.append(CostRow(px, ms["teacher"], ms["student"], peaks["teacher"], peaks["student"]))
    return rows


@dataclass(frozen=True)
class _Pass:
    model: nn.Module
    image: Tensor

    def __call__(self) -> None:
        with torch.inference_mode():
            self.model(self.image)


def _image(model: nn.Module, px: int) -> Tensor:
    parameter = next(model.parameters())
    return torch.randn(1, 3, px, px, device=parameter.device, dtype=parameter.dtype)
