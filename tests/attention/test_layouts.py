"""Gradients of tokens lie in memory as tokens do: those that are added up are read as they lie, not crosswise."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from subquad import ATTENTION
from subquad.benchmarks.layers_on_squares import layer_on_tokens

ADDS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


class CrosswiseAdditions(TorchDispatchMode):
    """Collects additions of tokens (b, h, n, d) whose axes lie in another order."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.found = shape, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in ADDS and all(isinstance(x, torch.Tensor) and x.shape == self.shape for x in args[:2]):
            orders = {tuple(sorted(range(4), key=lambda axis: -x.stride(axis))) for x in args[:2]}
            if len(orders) > 1:
                self.found.append([x.stride() for x in args[:2]])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ATTENTION)
def test_gradients_are_added_as_they_lie(name):
    layer, x, grid = layer_on_tokens(name, (2, 64, 32), 2, device=torch.device("cpu"), backward=True)
    y = layer(x, grid=grid)
    with CrosswiseAdditions((2, 2, 64, 16)) as additions:
        y.sum().backward()
    assert not additions.found
