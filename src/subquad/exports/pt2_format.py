"""PyTorch's own format: a program that torch.export.load gives back, on any device, without this library."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram


def write(program: ExportedProgram, path: Path) -> None:
    """Write the program and its weights in one file."""
    with path.open("wb") as file:
        torch.export.save(program, file)


def load(path: Path) -> Callable[[Tensor], Tensor]:
    """Open such a file."""
    with path.open("rb") as file:
        return torch.export.load(file).module()
