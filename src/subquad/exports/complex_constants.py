"""Complex numbers that depend on nothing that is taken, as rotary positions of known sizes do: ONNX has none."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram


def with_real_constants(program: ExportedProgram) -> ExportedProgram:
    """The program with what comes of complex constants alone as constants of its own.

    It is the same one where there are no complex numbers, or sizes may change.
    """
    if program.range_constraints or not any(map(_is_complex, program.graph.nodes)):
        return program
    # without what is written in place, which would be missed
    graph_module: Any = program.run_decompositions({}).module()
    graph = graph_module.graph
    constant, behind = set[fx.Node](), dict[fx.Node, None]()
    for node in graph.nodes:
        if node.op == "get_attr" or (_is_a_function(node) and constant.issuperset(node.all_input_nodes)):
            constant.add(node)
            if _is_complex(node) or any(one in behind for one in node.all_input_nodes):
                behind[node] = None
    wanted = [node for node in behind if not _is_complex(node) and any(user not in behind for user in node.users)]
    for number, (node, value) in enumerate(_values(graph_module, wanted).items()):
        graph_module.register_buffer(name := f"computed_{number}", value)
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.get_attr(name))
    graph.eliminate_dead_code()
    graph_module.recompile()
    assert program.example_inputs is not None
    return torch.export.export(graph_module, *program.example_inputs, strict=False)


def _values(graph_module: fx.GraphModule, wanted: Sequence[fx.Node]) -> dict[fx.Node, Tensor]:
    """What nodes give that read constants alone, or nothing, and nothing besides is computed."""
    needed, left = set[fx.Node](), list(wanted)
    while left:
        if (node := left.pop()) not in needed:
            needed.add(node)
            left += node.all_input_nodes
    values: dict[fx.Node, Any] = {}
    for node in graph_module.graph.nodes:
        if node in needed and node.op == "get_attr":
            values[node] = operator.attrgetter(node.target)(graph_module)
        elif node in needed:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return {node: values[node] for node in wanted if isinstance(values[node], Tensor)}


def _is_a_function(node: fx.Node) -> bool:
    """Whether it gives the same at each call, and does nothing else."""
    draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return node.op == "call_function" and not node.is_impure() and not draws


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_complex()
