"""AOTInductor: code compiled for this kind of machine, in one package that PyTorch runs without Python's model.

Compiled code looks at neither the sizes nor the dtype of what it gets, and reads past the end of what is smaller: the
package says beside which images it takes, and they are held against it where it is opened here.
"""

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from subquad.errors import SubquadError
from subquad.writing import ToldAfterwards, json_text

TAKES = "subquad_takes"
"""The name under which a package says which images it takes."""

AXES = ("batch", "channels", "height", "width")


def write(program: ExportedProgram, path: Path) -> None:
    """Compile the program; a C++ compiler has to be there."""
    with ToldAfterwards(path) as file:
        torch._inductor.aoti_compile_and_package(program, package_path=file)
    describe(path, {TAKES: json_text(taken_by(program))})


def taken_by(program: ExportedProgram) -> dict[str, Any] | list[dict[str, Any]]:
    """The dtype of the images of a program, and the least and the largest size of each axis; of several a list.

    A third number is that of which sizes are multiples.
    """
    names = program.graph_signature.user_inputs
    taken = [next(node for node in program.graph.nodes if node.name == name).meta["val"] for name in names]
    each = [{"dtype": str(one.dtype), "sizes": [_bounds(size, program) for size in one.shape]} for one in taken]
    return each[0] if len(each) == 1 else each


def _bounds(size: Any, program: ExportedProgram) -> list[int]:
    if isinstance(size, int):
        return [size, size]
    expression = size.node.expr
    (symbol,) = expression.free_symbols
    bounds, step = program.range_constraints[symbol], int(expression.coeff(symbol))
    return [step * int(bounds.lower), step * int(bounds.upper), *([step] if step > 1 else [])]


def checked(run: Callable[..., Tensor], takes: Any) -> Callable[..., Tensor]:
    """`run` where tensors are what it takes, and a SubquadError where they are not; None takes all."""
    if takes is None:
        return run
    each = takes if isinstance(takes, list) else [takes]

    def run_checked(*tensors: Tensor) -> Tensor:
        for one, taken in zip(tensors, each, strict=True):
            check_taken(one, taken, "images" if len(each) == 1 else "tensors")
        return run(*tensors)

    return run_checked


def check_taken(tensor: Tensor, takes: Mapping[str, Any], kind: str) -> None:
    """Raise a SubquadError where a tensor has another dtype than what was compiled for it, or other sizes."""
    sizes = takes["sizes"]
    fits = len(tensor.shape) == len(sizes) and all(
        least <= size <= most and size % (step[0] if step else 1) == 0
        for size, (least, most, *step) in zip(tensor.shape, sizes, strict=True)
    )
    if fits and str(tensor.dtype) == takes["dtype"]:
        return
    axes = AXES if len(sizes) == len(AXES) else [f"axis {number}" for number in range(len(sizes))]
    wanted = (
        f"{axis} {least}" if least == most else f"{axis} {least} to {most}{f' in steps of {step[0]}' if step else ''}"
        for axis, (least, most, *step) in zip(axes, sizes, strict=True)
    )
    got = f"{' × '.join(map(str, tensor.shape))} of {tensor.dtype}"
    raise SubquadError(f"it was compiled for {kind} of {takes['dtype']}, {', '.join(wanted)}, got {got}")


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
    takes = package.get_metadata().get(TAKES)
    return checked(package, None if takes is None else json.loads(takes))
