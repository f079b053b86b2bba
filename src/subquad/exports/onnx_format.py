"""ONNX: one file, weights inside, for ONNX Runtime and whoever else reads it; large weights in a .data beside it."""

import logging
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from subquad.errors import SubquadError
from subquad.exports.complex_constants import with_real_constants
from subquad.exports.quantizing import nothing_in_int8
from subquad.exports.quiet_logs import without_warnings
from subquad.exports.taken_sizes import TAKES, checked, said_of

OPSET = 18
"""The version of ONNX's operators: one that engines of the last years know."""

MOST_INSIDE = 2**31 - 2**27
"""Bytes of weights that one file holds: the whole of it can't be longer than 2**31 - 1."""


def write(program: ExportedProgram, path: Path) -> None:
    """Translate the program; its input is called "images", several as the program calls them, its output "output"."""
    # it says of every operator with two results that it leaves it as it is
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    converted = torch.onnx.export(
        with_real_constants(program),
        input_names=names_of(program),
        output_names=["output"],
        dynamo=True,
        opset_version=OPSET,
        verbose=False,
        optimize=False,
    )
    assert converted is not None
    tidy(converted.model)
    name_axes(converted.model)
    converted.model.metadata_props.update(said_of(program))
    weights = [one.const_value for one in converted.model.graph.initializers.values()]
    converted.save(path, external_data=sum(one.nbytes for one in weights if one is not None) > MOST_INSIDE)


def data_of(path: Path) -> Path:
    """Where the weights are of a file that does not hold them itself."""
    return path.with_name(f"{path.name}.data")


def names_of(program: ExportedProgram) -> list[str]:
    """How the inputs of a file are called."""
    names = program.graph_signature.user_inputs
    return [str(name) for name in names] if len(names) > 1 else ["images"]


def tidy(model: Any) -> None:
    """Compute what is constant and leave out what nothing reads, in place; engines see to the rest when they load it.

    PyTorch's own way goes on to rewrite the graph by rules, one of which tries every pair of slices: CSwin took a
    minute there, and came out no faster.
    """
    from onnx_ir.passes import Sequential, common
    from onnxscript.optimizer import fold_constants_ir

    common.InlinePass()(model)
    fold_constants_ir(model)
    Sequential(
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.NameFixPass(),
    )(model)


def name_axes(model: Any) -> None:
    """Call what may change of inputs "batch", "height" and "width", in place, where PyTorch has numbered symbols.

    Engines fix sizes by these names, ONNX Runtime by `add_free_dimension_override_by_name`.
    """
    names: dict[str, str] = {}
    for shape in (one.shape for one in model.graph.inputs):
        sides = {len(shape) - 2: "height", len(shape) - 1: "width"} if len(shape) >= 4 else {}
        changing = {axis: size for axis, size in enumerate(shape) if not isinstance(size, int)}
        names |= {str(size.value): {0: "batch", **sides}[axis] for axis, size in changing.items()}
    symbols = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")
    results = [value for node in model.graph.all_nodes() for value in node.outputs]
    for value in (*model.graph.inputs, *results) if names else ():
        for axis, size in enumerate(value.shape or ()):
            if not isinstance(size, int) and size.value is not None:
                value.shape[axis] = symbols.sub(lambda found: names[found[0]], str(size.value))


def load(path: Path) -> Callable[..., Tensor]:
    """Open it in ONNX Runtime, on the CPU."""
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception:
        _check_data(path)
        raise
    names = [one.name for one in session.get_inputs()]

    def run(*tensors: Tensor) -> Tensor:
        arrays = {name: one.numpy() for name, one in zip(names, tensors, strict=True)}
        return torch.from_numpy(session.run(None, arrays)[0])

    return checked(run, session.get_modelmeta().custom_metadata_map.get(TAKES))


def _check_data(path: Path) -> None:
    """Raise a SubquadError where a file says that its weights are beside it, and they are not."""
    import onnx

    weights = onnx.load(path, load_external_data=False).graph.initializer
    away = any(one.data_location == onnx.TensorProto.EXTERNAL for one in weights)
    if away and not (data := data_of(path)).is_file():
        raise SubquadError(f"there is no {data}, which holds the weights of {path.name}: move both together")


def describe(path: Path, notes: Mapping[str, str]) -> None:
    """Put notes into the file's metadata, ONNX Runtime's `session.get_modelmeta().custom_metadata_map`."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    for name, text in notes.items():
        model.metadata_props.add(key=name, value=text)
    onnx.save(model, path)


def quantize(path: Path) -> None:
    """Bring the products of a file to int8 by ONNX Runtime's tool, activations scaled at each call.

    Raises:
        SubquadError: the file is not in fp32, or there is no product with weights in it.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # it turns weights around, and up to 1.23 keeps what the file says of their shapes beside them
    model = onnx.load(path, load_external_data=False)
    if model.graph.input[0].type.tensor_type.elem_type != onnx.TensorProto.FLOAT:
        # ONNX Runtime scales activations in fp32 alone, and does not open what its tool makes of others
        raise SubquadError("int8 dynamic of onnx is made of fp32 alone, got fp16: leave dtype out")
    weights = {weight.name for weight in model.graph.initializer}
    others = [info for info in model.graph.value_info if info.name not in weights]
    del model.graph.value_info[:]
    model.graph.value_info.extend(others)
    onnx.save(model, path)
    # it recommends a preparation that programs of torch.export have had
    settings = {"op_types_to_quantize": ["MatMul", "Gemm"], "weight_type": QuantType.QInt8}
    with without_warnings(), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        # which may read the weights while it writes
        target = Path(folder) / path.name
        quantize_dynamic(path, target, use_external_data_format=data_of(path).is_file(), **settings)
        for file in Path(folder).iterdir():
            file.replace(path.with_name(file.name))
    if not any(node.op_type == "MatMulInteger" for node in onnx.load(path, load_external_data=False).graph.node):
        raise nothing_in_int8()
