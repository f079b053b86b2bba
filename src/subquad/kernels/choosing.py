"""How an operation is computed: by a kernel where one can, else by its formula."""

from collections.abc import Callable

import torch
from torch import Tensor

from subquad import spread
from subquad.errors import SubquadError
from subquad.kernels.backends import KERNELS, asked, missing, most_channels
from subquad.kernels.declaring import Operator, Settings, Tensors
from subquad.kernels.gradients import learns, with_gradient
from subquad.tracing import has_forward_derivatives, is_exporting, is_traced

HALF = (torch.float16, torch.bfloat16)


def compute(
    operator: Operator,
    formula: Callable[..., Tensor],
    tensors: Tensors,
    settings: Settings = (),
    beyond: Tensors = (),
    *,
    backend: str | None = None,
    cannot: str | None = None,
    optional: bool = False,
) -> Tensor:
    """`formula(*tensors, *settings, *beyond)`, by a kernel of `operator` where one can.

    Args:
        operator: what kernels compute of `tensors` and `settings`.
        formula: the same in PyTorch; gradients of a kernel's gradients go through it. It is kept for the backward pass
            and must hold no tensor of the graph itself: it would never be freed.
        tensors: tokens (b, h, n, d) and parameters; None for what is optional and absent.
        settings: numbers and names.
        beyond: padding and the like, which no kernel knows: where any is there, the formula computes.
        backend: asked for at this call.
        cannot: what else keeps this call from kernels, in words.
        optional: whether the formula stands in for a backend that was asked for by name and can't compute this; where
            not, that is a SubquadError.
    """
    if any(tensor is not None for tensor in beyond):
        cannot = "it knows no padding"
    if operator.needs_all_tokens and spread.is_spread():
        cannot = "other processes hold tokens of the same images, and it knows none but those here"
    chosen = choose(operator, tensors, settings, backend=backend, cannot=cannot, optional=optional)
    if chosen is None:
        return formula(*tensors, *settings, *beyond)
    return run(operator, chosen, formula, tensors, settings)


def _has_no_formula(*arguments: object) -> Tensor:
    raise AssertionError("gradients of gradients were asked for where there are none")


def compute_if_possible(
    operator: Operator, tensors: Tensors, settings: Settings = (), formula: Callable[..., Tensor] = _has_no_formula
) -> Tensor | None:
    """What a kernel of `operator` computes; None where none can, whoever was asked for.

    Where it has a gradient, gradients of that go through `formula(*tensors, *settings)`.
    """
    chosen = choose(operator, tensors, settings, optional=True)
    if chosen is None:
        return None
    operator.shapes.check(*tensors)
    return run(operator, chosen, formula, tensors, settings)


def choose(
    operator: Operator,
    tensors: Tensors,
    settings: Settings = (),
    *,
    backend: str | None = None,
    cannot: str | None = None,
    optional: bool = False,
) -> str | None:
    """The backend whose kernel computes `operator` of these arguments, if one does; see `compute`."""
    wanted = asked(backend)
    if wanted == "eager":
        return None
    if wanted == "auto":
        # what is exported is to run where there is none of our code
        if cannot is not None or is_exporting():
            return None
        device = None if tensors[0] is None else tensors[0].device.type
        for name, kernels in KERNELS.items():
            if device not in kernels.devices or device in kernels.only_by_name:
                continue
            if name in operator.implementations and _refusal(operator, name, tensors, settings) is None:
                return name
        return None
    if wanted not in operator.implementations:
        if backend is None or optional:
            return None
        raise SubquadError(f'backend "{wanted}" has no kernel for {operator.title}: see subquad list --backends')
    reason = cannot or _refusal(operator, wanted, tensors, settings)
    if reason is None:
        return wanted
    if optional:
        return None
    raise SubquadError(
        f'backend "{wanted}" can\'t compute {operator.title}: {reason}; "auto" would take the eager form'
    )


def run(
    operator: Operator, backend: str, formula: Callable[..., Tensor], tensors: Tensors, settings: Settings = ()
) -> Tensor:
    """`formula(*tensors, *settings)` by the kernel of `backend`, which was chosen for it."""
    first, dtypes = tensors[0], KERNELS[backend].dtypes
    assert first is not None
    if any(tensor is not None and tensor.dtype not in (*dtypes, torch.bool) for tensor in tensors):
        raised = [tensor.float() if tensor is not None and tensor.dtype in HALF else tensor for tensor in tensors]
        result = run(operator, backend, formula, raised, settings)
        return result if operator.gives_fp32 else result.to(first.dtype)
    if operator.changes_first:
        operator(*tensors, *settings, backend)
        return first
    if not learns(*tensors):
        return operator(*tensors, *settings, backend)
    keeping = operator.keeping
    computed = operator if keeping is None or backend not in keeping.implementations else keeping
    if is_traced():
        results = computed(*tensors, *settings, backend)
        return results if isinstance(results, Tensor) else results[0]
    return with_gradient(
        lambda *tensors: computed(*tensors, *settings, backend),
        lambda kept, grad, *tensors: operator.backward(backend, grad, tensors, settings, kept),
        lambda *tensors: formula(*tensors, *settings),
        *tensors,
    )


def _refusal(operator: Operator, name: str, tensors: Tensors, settings: Settings) -> str | None:
    """What keeps these arguments from the kernel of the backend `name`."""
    backend, most = KERNELS[name], most_channels(name)
    learned = torch.is_grad_enabled()
    unlearned = learned and not operator.has_gradient(name)
    for tensor, of_heads, (called, is_needed) in zip(tensors, operator.of_heads, operator.needed, strict=False):
        if tensor is None:
            if is_needed:
                return f"{called} is None"
            continue
        if tensor.device.type not in backend.devices:
            return f"it is for {' and '.join(backend.devices)}, and a tensor is on {tensor.device}"
        dtype = tensor.dtype
        known = dtype == torch.bool if called in operator.masks else dtype in backend.dtypes
        if not known and not (backend.raises_half and operator.sums_in_fp32 and dtype in HALF):
            return f"it computes in {' '.join(map(short_name, backend.dtypes))}, and a tensor is {short_name(dtype)}"
        if unlearned and tensor.requires_grad:
            return "it has no gradients, and one is asked for: call it under torch.no_grad()"
        if tensor.dim() == 4:
            if tensor.stride(3) != 1 and tensor.shape[3] > 1:
                return f"a head's channels have to lie side by side, and have a stride of {tensor.stride(3)}"
            if of_heads and most is not None and tensor.shape[3] > most:
                return f"it takes heads of up to {most} channels here, and these have {tensor.shape[3]}"
        if not tensor.numel():
            return "a tensor is empty"
    if not is_traced() and (reason := _unlike_its_numbers(tensors)):
        return reason
    return _own_refusal(operator, name, tensors, settings, learned) or missing(name)


def _unlike_its_numbers(tensors: Tensors) -> str | None:
    """What a tensor is beside the numbers that a kernel would read, which PyTorch's own operators see."""
    if torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None:
        return "it can't be traced"
    if has_forward_derivatives():
        return "it has no forward-mode derivative"
    if any(tensor is not None and tensor.is_neg() for tensor in tensors):
        return "a tensor's numbers are to be negated when they are read: take x.resolve_neg()"
    return None


def _own_refusal(operator: Operator, name: str, tensors: Tensors, settings: Settings, learned: bool) -> str | None:
    """What the implementation itself says that it can't do, or that of the gradient where one is wanted."""
    cannot = operator.implementations[name].cannot
    reason = None if cannot is None else cannot(*tensors, *settings)
    if reason is None and learned and operator.gradient is not None and learns(*tensors):
        of_gradient = operator.gradient.implementations[name].cannot
        return None if of_gradient is None else of_gradient(*tensors, *settings)
    return reason


def short_name(dtype: torch.dtype) -> str:
    """A dtype as people write it: fp32."""
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
