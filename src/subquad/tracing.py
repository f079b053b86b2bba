"""What is known while a network is traced: of sizes, and of what listens.

`torch.export` hands out symbols for sizes that may change. A branch on a symbol would tie what is exported to the size
that it was traced with; `surely` asks without doing so. Everywhere else sizes are numbers, and branches are branches.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from subquad.errors import SubquadError


def surely(condition: Any) -> bool:
    """Whether a condition on sizes holds, and while a network is exported, whether it holds for every size.

    Where the answer is False the caller takes the form that is right in either case.
    """
    if isinstance(condition, Tensor):
        # torch.jit.trace hands out tensors for sizes
        refuse_torchscript()
    # torch.compile sees bool here, and guards on it
    return condition if type(condition) is bool else statically_known_true(condition)


def refuse_torchscript(*_: Any) -> NoReturn:
    """Raise SubquadError: a trace would hold for one size, and says so nowhere; scripts know less Python than this."""
    raise SubquadError(
        "TorchScript (torch.jit.trace and script, torch.onnx.export with dynamo=False) can't hold this network: "
        "subquad.export(model, path, format='pt2') writes a program of torch.export, format='onnx' an ONNX file"
    )


def is_symbol(size: Any) -> bool:
    """Whether a size is a symbol of `torch.export`; never within `torch.compile`."""
    return isinstance(size, torch.SymInt)


def has_forward_derivatives() -> bool:
    """Whether tensors may carry derivatives forward (`torch.autograd.forward_ad`), which kernels do not."""
    return forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Whether what is called is seen by `torch.func` (vmap, grad, …) first."""
    return torch._C._are_functorch_transforms_active()


def is_traced() -> bool:
    """Whether what this thread computes is written down, by `torch.compile` or `torch.export`.

    What PyTorch says of it holds for the process: networks that other threads serve meanwhile are not traced.
    """
    # the first is known within torch.compile, which can't ask further
    return torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and _has_modes())


@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """Whether what this thread computes is written down by `torch.export`."""
    # torch 2.11 takes the function itself for true wherever it traces it
    return torch.compiler.is_exporting() and (_has_modes() or TracingContext.try_get() is not None)


def _has_modes() -> bool:
    """Whether something sees this thread's operators first, as what writes them down does."""
    return torch._C._len_torch_dispatch_stack() > 0


def insist(condition: Tensor, message: str) -> None:
    """Raise a SubquadError where a condition on numbers does not hold; compiled code asks when it runs, in its words.

    What is exported is not asked: engines know no such question.
    """
    if is_exporting():
        return
    if is_traced():
        torch._assert_async(condition, message)
    elif not bool(condition):
        raise SubquadError(message)


class KnownNumbers(Tensor):
    """Numbers that stay known where a network is traced, so that Python reads them there as anywhere else.

    What is computed of them alone is known too, and is no part of a program; with other tensors they are constants.
    """

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = args, dict(kwargs or {})
        tensors = [one for one in tree_leaves(given) if isinstance(one, Tensor)]
        args, kwargs = tree_map_only(KnownNumbers, as_plain, given)
        if not all(isinstance(one, KnownNumbers) for one in tensors):
            return function(*args, **kwargs)
        with outside_of_traces():
            return tree_map_only(Tensor, as_known, function(*args, **kwargs))


def as_known(numbers: Tensor) -> Tensor:
    """A tensor of numbers that stay known."""
    return numbers.as_subclass(KnownNumbers)


def as_plain(numbers: Tensor) -> Tensor:
    """The same as any tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return numbers.as_subclass(Tensor)


@contextmanager
def outside_of_traces() -> Iterator[None]:
    """What is computed of known numbers inside this context is no part of what `torch.export` writes down."""
    with _disable_current_modes():
        yield


def can_be_read(numbers: Tensor) -> bool:
    """Whether a tensor's numbers are there: where a network is traced, those that are known alone."""
    return isinstance(numbers, KnownNumbers) or not is_exporting()


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two sizes."""
    if is_symbol(a) or is_symbol(b):
        return a if surely(a <= b) else b if surely(b <= a) else torch.sym_min(a, b)
    return min(a, b)


def larger(a: Any, b: Any) -> Any:
    """The larger of two sizes."""
    if is_symbol(a) or is_symbol(b):
        return a if surely(a >= b) else b if surely(b >= a) else torch.sym_max(a, b)
    return max(a, b)


def up_to_multiple(size: int, multiple: int) -> int:
    """The smallest multiple that is not less than `size`."""
    if surely(size == multiple):
        return size
    # rounded in this way torch.export finds the number of patches again as one division
    return (size + multiple - 1) // multiple * multiple


def first(x: Tensor, count: int, dim: int) -> Tensor:
    """The first `count` entries of an axis."""
    if not is_symbol(count):
        return x.narrow(dim, 0, count)
    # a slice would ask whether it is all of them
    return x.index_select(dim, torch.arange(count, device=x.device))


def is_listened_to(*tables: Mapping[int, Any]) -> bool:
    """Whether somebody listens by hooks of a module, besides those that say that they hear training alone."""
    return any(not getattr(hook, "hears_training_alone", False) for hooks in tables for hook in hooks.values())
