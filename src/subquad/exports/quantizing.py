"""The linear layers of a network in int8, by torchao: its weights alone, or activations too, scaled at each call."""

from torch import nn

from subquad.copying import copied
from subquad.errors import SubquadError
from subquad.starting import quiet_torchao

INT8 = ("weights", "dynamic")
"""What can be in int8: weights, raised to the network's precision at each call; or activations as well."""


def nothing_in_int8() -> SubquadError:
    """What is said where int8 would change nothing."""
    return SubquadError("the network has no linear layers that could be in int8: leave int8 out")


def in_int8(model: nn.Module, what: str) -> nn.Module:
    """A copy whose linear layers are in int8; `what` is of INT8. Needs torchao.

    Raises:
        SubquadError: it has none.
    """
    if not any(isinstance(part, nn.Linear) for part in model.modules()):
        raise nothing_in_int8()
    quiet_torchao()
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
    from torchao.utils import unwrap_tensor_subclass

    smaller = copied(model)
    quantize_(smaller, {"weights": Int8WeightOnlyConfig, "dynamic": Int8DynamicActivationInt8WeightConfig}[what]())
    # plain tensors, so that what is written is read without torchao
    unwrap_tensor_subclass(smaller)
    return smaller
