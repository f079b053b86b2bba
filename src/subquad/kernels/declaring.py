"""How an operator `subquad::…` of PyTorch is declared, and how a backend says that it computes it.

An operator is declared once: its name, the shapes that it takes and gives, what it counts as, its gradient. Its last
argument is the backend that computes it: PyTorch has one dispatcher for each device, which looks up who that is.
Results are tokens (b, h, n, d) that lie in memory as (b, n, h, d), as the next projection wants them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from subquad.errors import SubquadError
from subquad.kernels.backends import KERNELS
from subquad.kernels.shapes import Shapes
from subquad.tracing import has_forward_derivatives, is_traced

NAMESPACE = torch.library.Library("subquad", "FRAGMENT")
DEVICES = ("CPU", "CUDA")

Tensors = Sequence[Tensor | None]
Settings = tuple[Any, ...]


@dataclass(frozen=True)
class Implementation:
    """A function that computes an operator, and what says why it can't, of the operator's own arguments."""

    function: Callable[..., Any]
    cannot: Callable[..., str | None] | None = None


PLAIN = (Tensor, torch.nn.Parameter)


def is_heard(arguments: Sequence[Any]) -> bool:
    """Whether PyTorch's dispatcher has anything to do for a call but to find out who computes it.

    Compilation, modes (fake tensors, counted FLOPs), the profiler and transforms hear of calls there, subclasses of
    tensors too, and versions of tensors that are changed are counted. Otherwise going through it is a fifth of what a
    narrow layer pays Python.
    """
    return (
        is_traced()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch.autograd._profiler_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or has_forward_derivatives()
        or any(isinstance(x, Tensor) and type(x) not in PLAIN for x in arguments)
    )


class Operator:
    """An operator `torch.ops.subquad.<name>`: called with its tensors, its settings and the name of a backend.

    Attributes:
        name: without the namespace.
        title: what it is called where a person reads.
        shapes: of its tensors, which stand first among its arguments.
        gradient: the operator of its gradient; None where no kernel has one.
        sums_in_fp32: whether it may be computed in fp32 where its tensors are of half precision.
        gives_fp32: whether its result is fp32 whatever its tensors are.
        keeping: the same, with what a kernel of its gradient needs beside it, so that this is not computed twice; None
            where no kernel keeps anything.
        changes_first: whether it changes its first tensor and gives nothing.
        needs_all_tokens: whether what it gives for a token depends on others, which other processes may hold.
        masks: the names of those of its tensors that are true or false.
        of_heads: which of its tensors have a head's channels as their last axis.
        needed: the names of its tensors, each with whether it has to be there.
        implementations: who computes it, by the names of backends.
        packet: PyTorch's.
    """

    def __init__(
        self,
        name: str,
        title: str,
        shapes: Shapes,
        *,
        gradient: "Operator | None" = None,
        backward: Callable[..., tuple[Tensor | None, ...]] | None = None,
        sums_in_fp32: bool = False,
        gives_fp32: bool = False,
        changes_first: bool = False,
        needs_all_tokens: bool = True,
        masks: tuple[str, ...] = (),
    ) -> None:
        self.name, self.title, self.shapes = name, title, shapes
        self.gradient, self._backward = gradient, backward
        self.keeping: Operator | None = None
        self.declaration: dict[str, Any] = {}
        self.sums_in_fp32, self.gives_fp32, self.changes_first = sums_in_fp32, gives_fp32, changes_first
        self.needs_all_tokens, self.masks = needs_all_tokens, masks
        self.of_heads = tuple(any(form[-1:] == ("d",) for form in forms) for forms in shapes.forms)
        self.implementations: dict[str, Implementation] = {}
        self.packet = getattr(torch.ops.subquad, name)
        self._call = self.packet.default
        types = [str(argument.type) for argument in self._call._schema.arguments]
        self.needed = tuple((tensor, type == "Tensor") for tensor, type in zip(shapes.texts, types, strict=False))

    def __call__(self, *arguments: Any) -> Any:
        if self.changes_first or is_heard(arguments):
            return self._call(*arguments)
        return self.implementations[arguments[-1]].function(*arguments[:-1])

    def backward(
        self, backend: str, grad: Tensor, tensors: Tensors, settings: Settings, kept: Sequence[Tensor] = ()
    ) -> tuple[Tensor | None, ...]:
        """The gradient to each of `tensors`, of `grad`, by the kernel of `backend`, from what `keeping` has `kept`."""
        owner = self.keeping if kept else self
        assert owner is not None and owner.gradient is not None
        gradient = owner.gradient

        def compute(*arguments: Any) -> Any:
            return gradient(*arguments, *kept, backend)

        if self._backward is not None:
            return self._backward(compute, grad, tensors, settings)
        grads = compute(grad, *tensors, *settings)
        return (grads,) if isinstance(grads, Tensor) else grads

    def has_gradient(self, backend: str) -> bool:
        """Whether `backend` has a kernel for the gradient."""
        return self.gradient is not None and backend in self.gradient.implementations


OPERATORS: dict[str, Operator] = {}
"""Every operator by its name."""


def operator(
    title: str,
    schema: str,
    takes: dict[str, str],
    flops: Callable[..., int] = lambda *shapes: 0,
    shape: Callable[..., Any] | None = None,
    result: str = "Tensor",
    **properties: Any,
) -> Operator:
    """Declare `subquad::name` of a schema, to which the backend is added as last argument.

    Args:
        title: what it is called where a person reads.
        schema: as torch.library has it, "name(Tensor q, …)", without the result.
        takes: the shapes of its tensors, see `Shapes`.
        flops: of the arguments, with shapes in the place of tensors.
        shape: empty results, of the arguments; tokens like the first tensor where nothing is said.
        result: as torch.library has it.
        properties: see `Operator`.
    """
    name = schema.partition("(")[0]
    NAMESPACE.define(f"{schema.removesuffix(')')}, str backend) -> {result}")
    declared = OPERATORS[name] = Operator(name, title, Shapes(title, **takes), **properties)
    declared.declaration = {"schema": schema, "takes": takes, "flops": flops, "shape": shape, "result": result}

    def dispatch(*arguments: Any) -> Any:
        implementation = declared.implementations.get(arguments[-1])
        if implementation is None:
            raise SubquadError(f'backend "{arguments[-1]}" has no kernel for {title}: see subquad list --backends')
        return implementation.function(*arguments[:-1])

    def without_running(*arguments: Any) -> Any:
        check_arguments(declared, arguments[:-1])
        return None if declared.changes_first else (shape or like_tokens)(*arguments[:-1])

    for device in DEVICES:
        NAMESPACE.impl(name, dispatch, device)
    torch.library.register_fake(f"subquad::{name}", without_running, lib=NAMESPACE)
    if declared.gradient is not None:
        _register_gradient(declared, declared)
    register_flop_formula(declared.packet)(lambda *shapes, out_shape=None, **settings: flops(*shapes[:-1]))
    return declared


def _register_gradient(called: Operator, one: Operator) -> None:
    """Let PyTorch differentiate calls of `called`, which is `one` or what it keeps more by.

    This is what compiled code takes: Dynamo fails at functions with a gradient of Python's where sizes are computed of
    sizes that change. Elsewhere `subquad.kernels.gradients` has the gradient of the gradient too.
    """
    count = len(one.needed)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        kept = () if isinstance(output, Tensor) else output[1:]
        ctx.settings, ctx.backend = inputs[count:-1], inputs[-1]
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:count], *kept)

    def backward(ctx: Any, grad: Tensor | None, *of_kept: None) -> tuple[Tensor | None, ...]:
        unlearned = (None,) * (len(ctx.settings) + 1)
        if grad is None:
            return (None,) * count + unlearned
        if torch.is_grad_enabled():
            raise SubquadError(
                f"compiled code has no gradients of the gradients of {one.title}: they are there under "
                'subquad.use_backend("eager"), and without torch.compile'
            )
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        saved = ctx.saved_tensors
        grads = one.backward(ctx.backend, grad, saved[:count], ctx.settings, saved[count:])
        return *grads, *unlearned

    torch.library.register_autograd(f"subquad::{called.name}", backward, setup_context=keep, lib=NAMESPACE)


def keeps(one: Operator, kept: dict[str, str], empty: Callable[..., tuple[Tensor, ...]]) -> Operator:
    """Declare `<name>_keeping`, which gives what `one` gives and behind it tensors that its gradient needs.

    `kept` are their shapes and `empty` makes them of the arguments. The gradient, `<name>_keeping_gradient`, takes them
    behind its other arguments. Kernels need not have it; where a backend does, it computes what has a gradient.
    """
    assert one.gradient is not None
    forward, backward = one.declaration, one.gradient.declaration
    count, shape = len(kept), forward["shape"] or like_tokens
    gradient = operator(
        one.gradient.title,
        backward["schema"].replace(f"{one.gradient.name}(", f"{one.name}_keeping_gradient(")[:-1]
        + "".join(f", Tensor {name}" for name in kept)
        + ")",
        backward["takes"] | kept,
        lambda *arguments: backward["flops"](*arguments[:-count]),
        shape=lambda *arguments: backward["shape"](*arguments[:-count]),
        result=backward["result"],
    )
    one.keeping = operator(
        one.title,
        forward["schema"].replace(f"{one.name}(", f"{one.name}_keeping("),
        forward["takes"],
        forward["flops"],
        shape=lambda *arguments: (shape(*arguments), *empty(*arguments)),
        result=f"(Tensor{', Tensor' * count})",
    )
    one.keeping.gradient = gradient
    _register_gradient(one.keeping, one)
    return one.keeping


def implements(
    operator: Operator, backend: str, cannot: Callable[..., str | None] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function compute `operator` for a registered `backend`.

    `cannot` says in words why it can't compute some arguments of the operator (of the operator itself where this is
    its gradient), or None. Raises SubquadError where the backend has a kernel for the operator already.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if backend not in KERNELS:
            raise SubquadError(f'there is no backend "{backend}": register_backend comes first')
        if backend in operator.implementations:
            raise SubquadError(f'backend "{backend}" has a kernel for {operator.title} already')
        operator.implementations[backend] = Implementation(function, cannot)
        return function

    return register


def check_arguments(operator: Operator, arguments: Sequence[Any]) -> None:
    """Raise SubquadError where the tensors among an operator's arguments do not fit each other."""
    operator.shapes.check(*(value for value in arguments if value is None or isinstance(value, Tensor)))


def empty_tokens(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Room for tokens (b, h, n, d), each token's heads side by side, of the same dtype where nothing is said.

    It is nobody's view, so that PyTorch adds to it in place where gradients come together.
    """
    b, h, n, d = like.shape
    return like.new_empty_strided((b, h, n, d), (n * h * d, d, h * d, 1), dtype=dtype)


def like_tokens(first: Tensor, *rest: Any) -> Tensor:
    """The shape of most results: tokens like the first argument's."""
    return empty_tokens(first)


def kernels_by_title() -> dict[str, dict[str, str]]:
    """What has kernels, by its title and backend: "yes", or "forward" where a gradient is computed by PyTorch."""
    gradients = {id(one.gradient) for one in OPERATORS.values()}
    by_title: dict[str, dict[str, str]] = {}
    for one in OPERATORS.values():
        if id(one) in gradients:
            continue
        row = by_title.setdefault(one.title, {})
        for backend in one.implementations:
            # a title may stand for several operators, one of which has a gradient
            row[backend] = "yes" if one.has_gradient(backend) else row.get(backend, "forward")
    return by_title
