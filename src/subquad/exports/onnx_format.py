"""ONNX: one file, weights inside, for ONNX Runtime and whoever else reads it."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

OPSET = 18
"""The version of ONNX's operators: one that engines of the last years know."""


def write(program: ExportedProgram, path: Path) -> None:
    """Translate the program; its input is called "images", its output "output"."""
    # it says of every operator with two results that it leaves it as it is
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    converted = torch.onnx.export(
        program, input_names=["images"], output_names=["output"], dynamo=True, opset_version=OPSET, verbose=False
    )
    assert converted is not None
    converted.save(path, external_data=False)


def load(path: Path) -> Callable[[Tensor], Tensor]:
    """Open it in ONNX Runtime, on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def quantize(path: Path) -> None:
    """Bring the products of a file to int8 by ONNX Runtime's tool, activations scaled at each call."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # it recommends a preparation that programs of torch.export have had
    logging.disable(logging.WARNING)
    try:
        quantize_dynamic(path, path, op_types_to_quantize=["MatMul", "Gemm"], weight_type=QuantType.QInt8)
    finally:
        logging.disable(logging.NOTSET)
