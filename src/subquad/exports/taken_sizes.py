"""What a file takes: the dtype and the sizes of its images or tensors, said in the file and asked for at each call.

Compiled code looks at neither, and reads past the end of what is smaller. Other engines run what is smaller than the
program was traced for, as far as shapes go: windows that do not shrink with their map, say, answer something else.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram

from subquad.errors import SubquadError
from subquad.text import counted
from subquad.writing import json_text

TAKES = "subquad_takes"
"""The name under which a file says it."""

AXES = ("batch", "channels", "height", "width")


def said_of(program: ExportedProgram) -> dict[str, str]:
    """What is written into the file of a program, beside its notes."""
    return {TAKES: json_text(taken_by(program))}


def taken_by(program: ExportedProgram) -> dict[str, Any] | list[dict[str, Any]]:
    """The dtype of the images of a program, and the least and the largest size of each axis; of several a list by name.

    A third number is that of which sizes are multiples.
    """
    names = program.graph_signature.user_inputs
    taken = [next(node for node in program.graph.nodes if node.name == name).meta["val"] for name in names]
    each = [{"dtype": str(one.dtype), "sizes": [_bounds(size, program) for size in one.shape]} for one in taken]
    return each[0] if len(each) == 1 else [{"name": str(name), **one} for name, one in zip(names, each, strict=True)]


def _bounds(size: Any, program: ExportedProgram) -> list[int]:
    if isinstance(size, int):
        return [size, size]
    expression = size.node.expr
    (symbol,) = expression.free_symbols
    bounds, step = program.range_constraints[symbol], int(expression.coeff(symbol))
    return [step * int(bounds.lower), step * int(bounds.upper), *([step] if step > 1 else [])]


def checked(run: Callable[..., Tensor], said: str | None) -> Callable[..., Tensor]:
    """`run` where tensors are what a file says that it takes, and a SubquadError where they are not.

    A file that says nothing, as those of earlier versions, takes all.
    """
    if said is None:
        return run
    takes = json.loads(said)
    each = takes if isinstance(takes, list) else [takes]

    def run_checked(*tensors: Tensor) -> Tensor:
        if len(tensors) != len(each):
            raise SubquadError(f"it was written for {counted(len(each), 'tensor')}, got {len(tensors)}")
        for one, taken in zip(tensors, each, strict=True):
            check_taken(one, taken, "images" if len(each) == 1 else taken.get("name", "tensors"))
        return run(*tensors)

    return run_checked


def check_taken(tensor: Tensor, takes: Mapping[str, Any], kind: str) -> None:
    """Raise a SubquadError where a tensor has another dtype than what was written for it, or other sizes."""
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
    raise SubquadError(f"it was written for {kind} of {takes['dtype']}, {', '.join(wanted)}, got {got}")
