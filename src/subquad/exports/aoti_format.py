"""AOTInductor: code compiled for this kind of machine, in one package that PyTorch runs without Python's model.

The package says beside which images it takes, and they are held against it where it is opened here: `taken_sizes.py`.
"""

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from subquad.exports.taken_sizes import TAKES, checked, said_of
from subquad.writing import ToldAfterwards, json_text


def write(program: ExportedProgram, path: Path) -> None:
    """Compile the program; a C++ compiler has to be there."""
    with ToldAfterwards(path) as file:
        torch._inductor.aoti_compile_and_package(program, package_path=file)
    describe(path, said_of(program))


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


def load(path: Path) -> Callable[..., Tensor]:
    """Load the package."""
    package = torch._inductor.aoti_load_package(str(path))
    return checked(package, package.get_metadata().get(TAKES))
