"""AOTInductor: code compiled for this kind of machine, in one package that PyTorch runs without Python's model."""

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from subquad.writing import json_text


def write(program: ExportedProgram, path: Path) -> None:
    """Compile the program; a C++ compiler has to be there."""
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def describe(path: Path, notes: Mapping[str, str]) -> None:
    """Put notes among what the package says of itself, `aoti_load_package(path).get_metadata()`."""
    # a compiler's setting says them as well, but only of a package that is compiled once more
    other = path.with_suffix(".described")
    with zipfile.ZipFile(path) as package, zipfile.ZipFile(other, "w") as described:
        for member in package.infolist():
            content = package.read(member)
            if member.filename.endswith("_metadata.json"):
                content = json_text(json.loads(content) | notes).encode()
            described.writestr(member, content)
    other.replace(path)


def load(path: Path) -> Callable[[Tensor], Tensor]:
    """Load the package."""
    return torch._inductor.aoti_load_package(str(path))
