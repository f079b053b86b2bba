"""The formats that networks are written in, by name: ours and registered ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram

from subquad.errors import SubquadError, shown
from subquad.exports import aoti_format, onnx_format, openvino_format, pt2_format
from subquad.plugins import Table

Runner = Callable[..., Tensor]
"""What was written, as a function of images, or of the tensors that it takes, in their order."""


@dataclass(frozen=True)
class Exporter:
    """A format.

    Args:
        summary: a line for people.
        suffix: how its files end.
        needs: packages that write and run it, beside PyTorch.
        write: writes a traced program to a path.
        load: opens what was written, in the engine that it is for.
        describe: puts notes, texts by name, into a file that was written, in place; None where it has no room for them.
        int8: what of `quantizing.INT8` it can hold, the network's linear layers having been brought to it by torchao.
        int8_files: what of it is done by the engine's own tool to the file that was written, in place.
        dtypes: what its engine computes in, of `exporting.DTYPES`.
    """

    summary: str
    suffix: str
    needs: tuple[str, ...]
    write: Callable[[ExportedProgram, Path], None]
    load: Callable[[Path], Runner]
    describe: Callable[[Path, Mapping[str, str]], None] | None = field(default=None, kw_only=True)
    int8: tuple[str, ...] = ()
    int8_files: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")


def check_exporter(name: str, exporter: Any) -> None:
    """Raise a SubquadError where an object is no format."""
    if not isinstance(exporter, Exporter):
        raise SubquadError(f"the format '{name}' is to be a subquad.exports.Exporter, got {shown(exporter)}")


OURS = {
    "pt2": Exporter(
        "PyTorch's own: torch.export.load",
        ".pt2",
        (),
        pt2_format.write,
        pt2_format.load,
        describe=pt2_format.describe,
        int8=("weights",),
    ),
    "onnx": Exporter(
        "ONNX, for ONNX Runtime and others",
        ".onnx",
        ("onnx", "onnxscript", "onnxruntime"),
        onnx_format.write,
        onnx_format.load,
        describe=onnx_format.describe,
        int8_files={"dynamic": onnx_format.quantize},
        # ONNX Runtime has no bf16 convolution for CPUs
        dtypes=("fp32", "fp16"),
    ),
    "openvino": Exporter(
        "OpenVINO, with its weights in a .bin beside it",
        ".xml",
        ("openvino", "onnx", "onnxscript"),
        openvino_format.write,
        openvino_format.load,
        describe=openvino_format.describe,
    ),
    "aoti": Exporter(
        "compiled by torch.compile's backend for this kind of machine: torch._inductor.aoti_load_package",
        ".pt2",
        (),
        aoti_format.write,
        aoti_format.load,
        describe=aoti_format.describe,
        int8=("weights", "dynamic"),
    ),
}
"""The formats of the library by name."""

EXPORTERS: Table[Exporter] = Table("a format", "subquad.exporters", check_exporter, OURS)
"""The formats by name, with those that are registered and those of installed plug-ins."""


def register_exporter(name: str, exporter: Exporter) -> None:
    """Add a format. Raises SubquadError where there is one of its name."""
    EXPORTERS.register(name, exporter)
