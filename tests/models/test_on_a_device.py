"""What a forward pass on a GPU must not do, seen without one: tensors that only say that they lie there."""

import pytest
import torch
from hosts import SMALL, fewest, small
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from subquad import ATTENTION
from subquad.kernels import use_backend


class Waiting(TorchDispatchMode):
    """Collects what waits for the device, which no CUDA graph records: copies to it and numbers read from it."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [one for one in (*args, result) if isinstance(one, torch.Tensor)]
        kinds = {one.device.type for one in tensors if one.dim()}
        if func is torch.ops.aten._local_scalar_dense.default or ("copy" in str(func) and len(kinds) > 1):
            self.found.append(f"{func} {[(tuple(one.shape), one.device.type) for one in tensors]}")
        return result


def moved(model, mode):
    """The model with fakes on a GPU in place of its parameters and buffers."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    fake = mode.from_tensor(tensor.detach()).to("cuda")
                    held[name] = torch.nn.Parameter(fake) if held is module._parameters else fake
    return model


# what waits is a line of a host or of a mechanism, not of a pair
@pytest.mark.parametrize(("kind", "attention"), [*((h, "agent") for h in SMALL), *(("pvt", a) for a in ATTENTION)])
def test_nothing_waits_for_the_device(kind, attention):
    model, mode = small(kind, attention, **fewest(kind)).eval(), FakeTensorMode(allow_non_fake_inputs=True)
    with mode, use_backend("eager"), torch.no_grad():
        moved(model, mode)
        image = torch.randn(1, 3, 64, 64, device="cuda")
        # what is made once for a size of images may be copied
        model(image)
        with Waiting() as waiting:
            model(image)
    assert not waiting.found
