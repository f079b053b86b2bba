"""OpenVINO: an .xml and the weights in a .bin beside it, by way of ONNX."""

import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from subquad.errors import SubquadError
from subquad.exports import onnx_format
from subquad.exports.taken_sizes import TAKES, checked, said_of


def write(program: ExportedProgram, path: Path) -> None:
    """Translate the program to ONNX, and that to OpenVINO's own, in the precision that it has."""
    import openvino

    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        file = Path(folder) / "network.onnx"
        onnx_format.write(program, file)
        model = openvino.convert_model(file)
        _note(model, said_of(program))
        openvino.save_model(model, path, compress_to_fp16=False)


def describe(path: Path, notes: Mapping[str, str]) -> None:
    """Put notes into the file's runtime information, `model.get_rt_info(["subquad", name])`."""
    import openvino

    model = openvino.Core().read_model(path)
    _note(model, notes)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        # the weights are read from the file while it is written
        openvino.save_model(model, Path(folder) / path.name, compress_to_fp16=False)
        for file in Path(folder).iterdir():
            file.replace(path.with_name(file.name))


def _note(model: Any, notes: Mapping[str, str]) -> None:
    for name, text in notes.items():
        model.set_rt_info(text, ["subquad", name])


def load(path: Path) -> Callable[..., Tensor]:
    """Compile it for the CPU, computing in the precision that was written; bf16 where the processor knows it.

    Threads may call what is given at the same time.

    Raises:
        SubquadError: its weights are not beside it.
    """
    import openvino

    weights = path.with_suffix(".bin")
    if not weights.is_file():
        raise SubquadError(f"there is no {weights}, which holds the weights of {path.name}: move both together")
    core = openvino.Core()
    model = core.read_model(path)
    # of several inputs any may be whole numbers, or a time in fp32
    half = openvino.Type.bf16 in [one.get_element_type() for one in (*model.inputs, *model.outputs)]
    # where a processor knows bf16 its CPU plug-in takes that by itself, whatever was written
    compiled = core.compile_model(model, "CPU", {} if half else {"INFERENCE_PRECISION_HINT": "f32"})
    kept = threading.local()

    def answered(tensors: list[Any]) -> Any:
        # a compiled model itself has one request, which refuses the calls of all threads but one
        if not hasattr(kept, "request"):
            kept.request = compiled.create_infer_request()
        return kept.request.infer(tensors, share_inputs=True, share_outputs=True)[0].copy()

    place = ["subquad", TAKES]
    said = str(model.get_rt_info(place).value) if model.has_rt_info(place) else None
    if not half:
        return checked(lambda *tensors: torch.from_numpy(answered([one.numpy() for one in tensors])), said)

    in_half = [one.get_element_type() == openvino.Type.bf16 for one in model.inputs]

    def handed(one: Tensor, halved: bool) -> Any:
        if not halved:
            return one.numpy()
        # numpy knows no bf16: the same bits under another name, there and back
        bits = one.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
        return openvino.Tensor(bits, one.shape, openvino.Type.bf16)

    def run(*tensors: Tensor) -> Tensor:
        answer = answered([handed(one, halved) for one, halved in zip(tensors, in_half, strict=True)])
        if model.output(0).get_element_type() != openvino.Type.bf16:
            return torch.from_numpy(answer)
        return torch.from_numpy(answer.view("int16")).view(torch.bfloat16)

    return checked(run, said)
