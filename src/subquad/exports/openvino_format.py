"""OpenVINO: an .xml and the weights in a .bin beside it, by way of ONNX."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from subquad.exports import onnx_format


def write(program: ExportedProgram, path: Path) -> None:
    """Translate the program to ONNX, and that to OpenVINO's own, in the precision that it has."""
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "network.onnx"
        onnx_format.write(program, file)
        openvino.save_model(openvino.convert_model(file), path, compress_to_fp16=False)


def load(path: Path) -> Callable[[Tensor], Tensor]:
    """Compile it for the CPU, computing in the precision that was written."""
    import openvino

    # where a processor knows bf16 its CPU plug-in takes that by itself
    model = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda images: torch.from_numpy(model(images.numpy())[0].copy())
