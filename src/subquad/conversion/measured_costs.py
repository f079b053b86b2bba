"""Time and memory of a converted network beside its teacher's, at several sizes of images."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from subquad.benchmarks.memory import peak_memory_mb
from subquad.errors import SubquadError
from subquad.models.stated_inputs import image_channels
from subquad.ranges import height_and_width
from subquad.text import one_line
from subquad.timing import interleaved_ms

Size = int | tuple[int, int]
"""Pixels of both sides of an image, or of its height and width."""

REPEATS = 5
"""Passes of each network at each size, in turns."""


@dataclass(frozen=True)
class CostRow:
    """A pass over one image, forward, of both networks.

    Attributes:
        px: of both sides of the image, or of its height and width.
        teacher_ms, student_ms: medians.
        teacher_mb, student_mb: the most memory at once beyond the weights, in 2^20 bytes.
    """

    px: Size
    teacher_ms: float
    student_ms: float
    teacher_mb: float
    student_mb: float

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the image."""
        return height_and_width(self.px)

    @property
    def side(self) -> float:
        """Of a square image of as many pixels."""
        return math.sqrt(math.prod(self.size))

    @property
    def gain(self) -> float:
        """How many times as fast the student is."""
        return self.teacher_ms / self.student_ms


def check_sizes(network: nn.Module, sizes: Sequence[Size], instead: str = "leave this out of --sizes") -> None:
    """Run a network once at each size.

    Args:
        network: what is called with an image.
        sizes: of images.
        instead: what to do where it does not run.

    Raises:
        SubquadError: it does not take images of one of them.
    """
    for size in map(height_and_width, sizes):
        _run_once(_Pass(network, _image(network, size)), size, instead)


def measure_costs(
    student: nn.Module, teacher: nn.Module, sizes: Sequence[Size], *, repeats: int = REPEATS
) -> list[CostRow]:
    """A row for each size of images; both networks take turns.

    Raises:
        SubquadError: one of them does not take images of a size, or takes more than images.
    """
    device = next(student.parameters()).device
    rows = []
    for px in sizes:
        passes = _passes({"teacher": teacher, "student": student}, height_and_width(px))
        ms = _medians(passes, repeats, device)
        peaks = {name: peak_memory_mb(run, device) for name, run in passes.items()}
        rows.append(CostRow(px, ms["teacher"], ms["student"], peaks["teacher"], peaks["student"]))
    return rows


def time_in_turns(
    networks: Mapping[str, nn.Module], size: tuple[int, int], *, repeats: int = REPEATS
) -> dict[str, float]:
    """Medians of a pass over one image of (height, width), in milliseconds, by the names of the networks."""
    device = next(next(iter(networks.values())).parameters()).device
    return _medians(_passes(networks, size), repeats, device)


def _passes(networks: Mapping[str, nn.Module], size: tuple[int, int]) -> dict[str, "_Pass"]:
    """Of each network, after one that is not counted."""
    passes = {name: _Pass(model, _image(model, size)) for name, model in networks.items()}
    for run in passes.values():
        _run_once(run, size, "what is timed takes images alone, as that part of such a network does")
    return passes


def _run_once(run: "_Pass", size: tuple[int, int], instead: str) -> None:
    try:
        run()
    except Exception as error:
        # each library refuses sizes in its own way
        raise SubquadError(
            f"the network does not run at {size[0]}×{size[1]} ({one_line(error, 120)}): {instead}"
        ) from None


def _medians(passes: Mapping[str, "_Pass"], repeats: int, device: torch.device) -> dict[str, float]:
    return {name: statistics.median(each) for name, each in interleaved_ms(dict(passes), repeats, device).items()}


@dataclass(frozen=True)
class _Pass:
    model: nn.Module
    image: Tensor

    def __call__(self) -> None:
        with torch.inference_mode():
            self.model(self.image)


def _image(model: nn.Module, size: tuple[int, int]) -> Tensor:
    parameter = next(model.parameters())
    return torch.randn(1, image_channels(model), *size, device=parameter.device, dtype=parameter.dtype)
