"""Optimized networks whose parts become others: what is put into them, and whoever listens, is heard."""

import copy
import types

import pytest
import torch
from hosts import SMALL, drawn, small
from torch import nn

import subquad
from subquad.models.layers import Block


class Doubled(nn.Linear):
    """As an adapter does, it computes more than its weight says."""

    def forward(self, x):
        return 2 * super().forward(x)


class Wrapped(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return 0.5 * self.layer(x)


class Scaled(nn.Module):
    """A norm without mean and bias."""

    def __init__(self, norm):
        super().__init__()
        self.weight = norm.weight

    def forward(self, x):
        return x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt() * self.weight


def of_blocks(model, kinds):
    """(owner, name, part) of the parts of blocks that are of some kinds."""
    blocks = [block for block in model.modules() if isinstance(block, Block)]
    owners = {id(owner): owner for block in blocks for owner in block.modules()}.values()
    parts = [(owner, name, part) for owner in owners for name, part in owner.named_children()]
    return [(owner, name, part) for owner, name, part in parts if isinstance(part, kinds)]


def other_class(model):
    for _, _, part in of_blocks(model, nn.Linear):
        if "Partly" not in type(part).__name__:
            part.__class__ = Doubled


def wrapped(model):
    for owner, name, part in of_blocks(model, nn.Linear):
        # of the fused projection hosts ask for its weight
        if name in ("proj", "fc1", "fc2"):
            setattr(owner, name, Wrapped(part))


def without_bias(model):
    for _, _, part in of_blocks(model, nn.LayerNorm):
        part.register_parameter("bias", None)


def other_norm(model):
    for owner, name, part in of_blocks(model, nn.LayerNorm):
        setattr(owner, name, Scaled(part))


def other_activation(model):
    for owner, name, _ in of_blocks(model, nn.GELU):
        setattr(owner, name, nn.Tanh())


def own_forward(model):
    for block in (block for block in model.modules() if isinstance(block, Block)):
        for part in (block.attn, block.mlp, block.norm1):
            before = part.forward
            part.forward = types.MethodType(lambda self, *x, before=before, **more: 0.7 * before(*x, **more), part)


def heard(model):
    for block in (block for block in model.modules() if isinstance(block, Block)):
        for part in (block.attn, block.mlp, block.norm2):
            part.register_forward_hook(lambda part, given, y: 1.3 * y)


CHANGES = [other_class, wrapped, without_bias, other_norm, other_activation, own_forward, heard]
QUICK = {"vit", "pvt", "mllanet"}
# LaViT's attention gives its scores as well
KINDS = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in SMALL if "lavit" not in kind]


@pytest.mark.thinned(5)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("attention", ["linear", "agent"])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_what_is_put_into_an_optimized_network_is_computed(kind, attention, change):
    model, image = drawn(small(kind, attention)), torch.randn(2, 3, 64, 64)
    ready = subquad.optimize(copy.deepcopy(model))
    halved = subquad.optimize(copy.deepcopy(model), torch.bfloat16)
    for _ in range(2):
        ready(image), halved(image.bfloat16())
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model).bfloat16()
    for one in (exact, plain, ready, halved):
        change(one)
    exact, plain = (one.forward_features(x).double() for one, x in ((exact, image.double()), (plain, image.bfloat16())))
    for _ in range(2):
        assert (ready.forward_features(image).double() - exact).norm() <= 1e-4 * exact.norm()
        off = halved.forward_features(image.bfloat16()).double() - exact
        assert off.norm() <= 1.6 * (plain - exact).norm()


def test_quantized_weights_are_multiplied_by_their_own_library():
    torchao = pytest.importorskip("torchao.quantization")
    image = torch.randn(2, 3, 64, 64)
    for first in (False, True):
        model = drawn(small("vit", "linear"))
        expected = model(image)
        ready = model if first else subquad.optimize(model)
        ready(image)
        torchao.quantize_(ready, torchao.Int8WeightOnlyConfig())
        ready = subquad.optimize(ready)
        for _ in range(2):
            assert (ready(image) - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("attention", ["linear", "agent"])
def test_who_listens_to_an_attention_layer_is_called_in_chunks_as_well(attention):
    model, image = drawn(small("vit", attention)), torch.randn(2, 3, 64, 64)
    for block in model.stages[0].blocks:
        block.attn.register_forward_hook(lambda part, given, y: 1.3 * y)
        block.attn.inner.register_forward_hook(lambda part, given, y: 0.9 * y)
    expected = model(image)
    torch.testing.assert_close(subquad.chunk_blocks(model, 6)(image), expected, rtol=1e-4, atol=1e-4)


def test_optimized_blocks_in_chunks_are_freed():
    import gc
    import weakref

    model, image = subquad.chunk_blocks(subquad.optimize(drawn(small("vit", "linear"))), 900), torch.randn(2, 3, 64, 64)
    model.stages[0].blocks[0].owner = (model,)
    with torch.no_grad():
        for _ in range(3):
            model(image)
    alive = weakref.ref(model.stages[0].blocks[0])
    del model
    gc.collect()
    assert alive() is None


def test_an_optimized_network_is_gone_as_soon_as_nobody_holds_it():
    import gc
    import weakref

    model, image = subquad.optimize(drawn(small("vit", "linear"))), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        for _ in range(3):
            model(image)
    block = model.stages[0].blocks[0]
    alive = weakref.ref(block), weakref.ref(block.mlp), weakref.ref(block.mlp.fc1.weight)
    gc.collect()
    gc.disable()
    try:
        del model, block
        assert [one() for one in alive] == [None] * 3
    finally:
        gc.enable()


def test_copies_of_modules_have_no_tapes():
    model, image = subquad.optimize(drawn(small("vit", "linear"))), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = [model(image) for _ in range(2)][-1]
        block = model.stages[0].blocks[0]
        shallow = model.stages[0].blocks[0] = copy.copy(block)
        shallow._modules = dict(block._modules, norm1=copy.deepcopy(block.norm1))
        shallow.norm1.weight.mul_(2)
        other = model(image)
        assert not torch.allclose(other, expected)
        model.stages[0].blocks[0] = block
        torch.testing.assert_close(model(image), expected)
