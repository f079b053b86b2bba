"""PyTorch's own format: a program that torch.export.load gives back, on any device, without this library."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from subquad.writing import ToldAfterwards


def write(program: ExportedProgram, path: Path) -> None:
    """Write the program and its weights in one file."""
    with ToldAfterwards(path) as file:
        torch.export.save(program, file)


def describe(path: Path, notes: Mapping[str, str]) -> None:
    """Put notes beside the program, which `torch.export.load(path, extra_files={name: ""})` fills in."""
    with path.open("rb") as file:
        program = torch.export.load(file)
    with ToldAfterwards(path) as file:
        torch.export.save(program, file, extra_files=dict(notes))


def load(path: Path) -> Callable[..., Tensor]:
    """Open such a file."""
    with path.open("rb") as file:
        return torch.export.load(file).module()
