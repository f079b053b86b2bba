"""Complex numbers that hang on nothing that is taken, as rotary positions of known sizes do: ONNX has none."""

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram


def with_real_constants(program: ExportedProgram) -> ExportedProgram:
    """The program with all that is computed of complex constants alone in it as what comes of it.

    It is the same program where there are no complex numbers, or sizes may change.
    """
    if program.range_constraints or not any(map(_is_complex, program.graph.nodes)):
        return program
    # without what is written in place, which would be missed
    graph_module: Any = program.run_decompositions({}).module()
    graph = graph_module.graph
    values = _constants(graph_module)
    behind: set[fx.Node] = set()
    for node in [node for node in graph.nodes if node in values]:
        if _is_complex(node) or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    for number, node in enumerate(graph.nodes):
        if node in behind and not _is_complex(node) and isinstance(values[node], Tensor):
            graph_module.register_buffer(name := f"computed_{number}", values[node])
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.get_attr(name))
    graph.eliminate_dead_code()
    graph_module.recompile()
    assert program.example_inputs is not None
    return torch.export.export(graph_module, *program.example_inputs, strict=False)


def _constants(graph_module: fx.GraphModule) -> dict[fx.Node, Any]:
    """What nodes give that read constants alone, or nothing."""
    values: dict[fx.Node, Any] = {}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            values[node] = operator.attrgetter(node.target)(graph_module)
        elif _is_a_function(node) and all(one in values for one in node.all_input_nodes):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return values


def _is_a_function(node: fx.Node) -> bool:
    """Whether it gives the same at each call, and does nothing else."""
    draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return node.op == "call_function" and not node.is_impure() and not draws


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_complex()
