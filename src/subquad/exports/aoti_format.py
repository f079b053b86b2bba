"""AOTInductor: code compiled for this kind of machine, in one package that PyTorch runs without Python's model."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram


def write(program: ExportedProgram, path: Path) -> None:
    """Compile the program; a C++ compiler has to be there."""
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def load(path: Path) -> Callable[[Tensor], Tensor]:
    """Load the package."""
    return torch._inductor.aoti_load_package(str(path))
