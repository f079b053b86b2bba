"""A network as a program of torch.export: of any batch, and of images of any size, where that is asked for."""

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo.exc import UserError
from torch.export import Dim, ExportedProgram
from torch.nn.attention import SDPBackend, sdpa_kernel

from subquad.errors import SubquadError
from subquad.exports.changing_axes import OF_IMAGES, Axes, images_in
from subquad.exports.checking import multiples_from
from subquad.exports.foreign_forms import forms_of_any_size, masks_as_numbers
from subquad.kernels import use_backend

P = ParamSpec("P")
R = TypeVar("R")

MOST_IMAGES, MOST_PIXELS = 4096, 16384
"""The largest batch and the longest side of a program that takes any."""


def check_most(dynamic: Sequence[str], batch: int, size: tuple[int, int], most: int = MOST_IMAGES) -> None:
    """Raise SubquadError where a program of any number or size of images does not take these."""
    if "batch" in dynamic and batch > most:
        raise SubquadError(
            f"what is written for any number of images has at most {most}, got {batch}: leave batch out of what is "
            "dynamic"
        )
    if "size" in dynamic and max(size) > MOST_PIXELS:
        raise SubquadError(
            f"what is written for images of any size has sides of at most {MOST_PIXELS} px, got {size[0]}×{size[1]}: "
            "leave size out of what is dynamic"
        )


class LargerSidesError(SubquadError):
    """Images of any size have to be larger, for this network to be traced.

    Args:
        least: pixels of the shortest side.
    """

    def __init__(self, least: int) -> None:
        super().__init__(f"images of any size have sides of {least} px at least in this network")
        self.least = least


class FewerImagesError(SubquadError):
    """There have to be fewer images at a time, for this network to be traced, as for diffusers' U-Nets.

    Args:
        most: of them.
    """

    def __init__(self, most: int) -> None:
        super().__init__(f"any number of images is at most {most} in this network")
        self.most = most


_LEAST = re.compile(r"(\d+) <= L\['\w+'\]\.size\(\)\[[23]\]")
"""What torch.export finds out of sides."""

_MOST = re.compile(r"guard L\['\w+'\]\.size\(\)\[0\] <= (\d+)")
"""What it finds out of their number, where it may be smaller."""


def program_of(
    model: nn.Module,
    tensors: Sequence[Tensor],
    dynamic: Sequence[str],
    axes: Sequence[Axes] = OF_IMAGES,
    *,
    least: int = 1,
    step: int = 1,
    most: int = MOST_IMAGES,
) -> ExportedProgram:
    """Trace `model`, in evaluation mode, which takes such tensors and gives one.

    The formulas are traced as they are written in PyTorch: there is none of our operators in a program.

    Args:
        model: what is traced.
        tensors: of the sizes that are traced, where none may change.
        dynamic: what may change, of DYNAMIC.
        axes: of each tensor, what it has of images.
        least: pixels of the shortest side that a program for any size has to take.
        step: the number of which its sides are multiples.
        most: images at a time that a program for any number takes.

    Raises:
        LargerSidesError: it can be traced for larger images.
        FewerImagesError: it can be traced for fewer images.
        SubquadError: it can't be traced, in one line.
    """
    dims: dict[str, Any] = {}
    batch, size = images_in(tensors, axes)
    if "batch" in dynamic:
        dims["batch"] = Dim("batch", min=1, max=most)
        # torch.export takes a size of 1 for a number
        batch = 2
    if "size" in dynamic:
        dims |= {side: _side(side, least, step) for side in ("height", "width")}
        # unequal, and so large that nothing on the way is 1 or happens to fit
        size = multiples_from((2 * least + 63, 2 * least + 15), step)
    pairs = list(zip(tensors, axes, strict=True))
    tensors = [one.resized(tensor, batch, size) for tensor, one in pairs]
    changing = tuple(one.changing(tensor, dims) for tensor, one in pairs)
    try:
        return _traced(model, tensors, _as_taken(model, changing) if dims else None)
    except UserError as error:
        larger = max(map(int, _LEAST.findall(str(error))), default=0)
        if "size" in dynamic and larger > least:
            raise LargerSidesError(larger) from error
        fewer = min(map(int, _MOST.findall(str(error))), default=most)
        if "batch" in dynamic and fewer < most:
            raise FewerImagesError(fewer) from error
        raise


def _side(name: str, least: int, step: int) -> Any:
    """A side of images that may change: of at least so many pixels, a multiple of `step`."""
    if step == 1:
        return Dim(name, min=least, max=MOST_PIXELS)
    return step * Dim(f"{name}_in_steps", min=-(-least // step), max=MOST_PIXELS // step)


def _as_taken(model: nn.Module, changing: tuple[Any, ...]) -> tuple[Any, ...]:
    """What changes of tensors, which some take as the first of any arguments: wrappers, and LoRA of peft."""
    first = next(iter(inspect.signature(model.forward).parameters.values()))
    return (changing,) if first.kind is first.VAR_POSITIONAL else changing


def _traced(model: nn.Module, tensors: Sequence[Tensor], dynamic_shapes: Any) -> ExportedProgram:
    with as_formulas(), sizes_without_guards(), masks_as_numbers(model):
        program = torch.export.export(
            model,
            tuple(one.contiguous() for one in tensors),
            dynamic_shapes=dynamic_shapes,
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    forget_ones(program)
    forget_squeezes(program)
    forget_source(program)
    return program


_NOT_ONE = re.compile(r" Ne\(| expression 1 < ")
"""How assertions say that some size is not 1, or more than 1."""


def forget_ones(program: ExportedProgram) -> None:
    """Leave out the assertions that some size is not 1.

    PyTorch asks for it to find out whether a tensor's strides are in order. What was written down is a copy in either
    case, and holds for 1 as well: one window of Swin, for instance.
    """
    asserted = [node for node in program.graph.nodes if node.target is torch.ops.aten._assert_scalar.default]
    unwanted = [node for node in asserted if _NOT_ONE.search(str(node.args[1]))]
    if not unwanted:
        # PyTorch 2.11 stumbles over some programs here
        return
    for node in unwanted:
        program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


SQUEEZES = (torch.ops.aten.squeeze.dim, torch.ops.aten.squeeze.dims)


def forget_squeezes(program: ExportedProgram) -> None:
    """Leave out those that take no side away, being longer than 1: ONNX knows none such, PixArt has one."""
    for node in list(program.graph.nodes):
        if node.target in SQUEEZES and node.args[0].meta["val"].dim() == node.meta["val"].dim():
            node.replace_all_uses_with(node.args[0])
            program.graph_signature.replace_all_uses(node.name, node.args[0].name)
            program.graph.erase_node(node)
    program.graph_module.recompile()


def forget_source(program: ExportedProgram) -> None:
    """Leave out which lines of which files made each operator.

    Formats write these down: the folders of whoever exports, with lines of their code, up to a tenth of a small file.
    """
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)


ONE_AT_A_TIME = RLock()
"""torch.export changes what is the process' own, and meanwhile a network has tensors without numbers."""


def in_turn(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function be called by one thread at a time, of all that are so."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with ONE_AT_A_TIME:
            return function(*args, **kwargs)

    return called


@contextmanager
def as_formulas() -> Iterator[None]:
    """What is traced has the eager forms, and what libraries compute as its formulas, softmax attention among it."""
    with ONE_AT_A_TIME, torch.no_grad(), use_backend("eager"), sdpa_kernel(SDPBackend.MATH), forms_of_any_size():
        yield


OPTIONS, OBLIVIOUS = "torch.fx.experimental._config", "backed_size_oblivious"
"""Where PyTorch has an option that is no part of its interface: from 2.11 to 2.15 at least."""


@contextmanager
def sizes_without_guards() -> Iterator[None]:
    """PyTorch asks of sizes that may change whether they are 1 only where the answer matters.

    A PyTorch that has lost the option asks, and either finds another way or says which size it was held to.
    """
    try:
        options = importlib.import_module(OPTIONS)
        getattr(options, OBLIVIOUS)
    except (ImportError, AttributeError):
        yield
        return
    with options.patch(**{OBLIVIOUS: True}):
        yield
