"""Layers of bf16 and fp16 of optimized networks in fp32, where PyTorch would multiply these in plain loops."""

import copy
import pickle

import pytest
import torch
from hosts import SMALL, small
from torch import nn
from torch.testing import assert_close

import subquad
from subquad import instructions
from subquad.attention.bricks import ConvLayer, is_conv, is_plain
from subquad.inference.widened import FEWEST, WidenedConv2d, WidenedLinear
from subquad.models.layers import is_linear

LAYERS = {nn.Linear: WidenedLinear, nn.Conv2d: WidenedConv2d}


@pytest.fixture(params=[True, False], ids=["in loops", "not in loops"])
def loops(request, monkeypatch):
    for name in ("loops_over_bf16", "loops_over_fp16"):
        monkeypatch.setattr(instructions, name, lambda: request.param)
    return request.param


@pytest.mark.parametrize("attention", ["softmax", "linear", "soft"])
@pytest.mark.parametrize(
    "kind", [kind if kind in ("vit", "cswin") else pytest.param(kind, marks=pytest.mark.slow) for kind in SMALL]
)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@torch.inference_mode()
@pytest.mark.thinned(2)
def test_a_network_is_as_exact_whatever_multiplies(kind, attention, half, loops):
    model, image = small(kind, attention).eval(), torch.randn(2, 3, 96, 64)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    exact, names = copy.deepcopy(model).double().forward_features(image.double()), list(model.state_dict())
    plain = copy.deepcopy(model).to(half).forward_features(image.to(half)).double()
    most = 2 if attention == "soft" else 1.25  # of SOFT's inverses two ways to round differ by as much
    layers = {name: type(module) for name, module in model.named_modules() if type(module) in LAYERS}
    optimized = subquad.optimize(copy.deepcopy(model), half)
    assert {name: type(optimized.get_submodule(name)) for name in layers} == (
        {name: LAYERS[kind] for name, kind in layers.items()} if loops else layers
    )
    assert list(optimized.state_dict()) == names
    for ready in (optimized, optimized, pickle.loads(pickle.dumps(optimized)), copy.deepcopy(optimized)):
        answers = ready.forward_features(image.to(half))
        assert answers.dtype == half
        assert (answers.double() - exact).norm() <= most * (plain - exact).norm()
    exact = optimized.double().forward_features(image.double())
    in_fp32 = optimized.float().forward_features(image).double()
    assert_close(in_fp32, exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())


def own_network() -> nn.Sequential:
    """Somebody's own: convolutions of every setting, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, stride=4),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        nn.Conv2d(8, 16, 3, padding="same", dilation=2, padding_mode="reflect"),
        nn.Flatten(2),
        nn.Linear(64, 9),
    ).eval()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_layers_of_any_network_multiply_in_fp32(half, loops, monkeypatch):
    wide = []

    def heard(function):
        def called(x, *given, **settings):
            wide.append(x.dtype)
            return function(x, *given, **settings)

        return called

    model, image = subquad.optimize(own_network(), half), torch.randn(2, 3, 32, 32)
    exact = copy.deepcopy(model).double()(image.to(half).double())
    for name in ("linear", "conv2d"):
        monkeypatch.setattr(nn.functional, name, heard(getattr(nn.functional, name)))
    answers = model(image.to(half))
    assert wide == 4 * [torch.float32 if loops else half]
    assert_close(answers.double(), exact, rtol=3e-2, atol=3e-2)
    # a few rows cost less as they are, and what is fp32 already is not touched
    wide.clear()
    model[4](torch.randn(FEWEST - 1, 64).to(half))
    model.float()(image)
    assert wide == [half, *4 * [torch.float32]]


def test_what_learns_is_exported_or_traced_is_pytorchs(monkeypatch):
    monkeypatch.setattr(instructions, "loops_over_bf16", lambda: True)
    model, image = subquad.optimize(own_network(), torch.bfloat16), torch.randn(2, 3, 32, 32).bfloat16()
    program = torch.export.export(model, (image,)).module()
    widened = [node for node in program.graph.nodes if node.op == "call_function" and "to" in str(node.target)]
    assert not widened
    assert_close(program(image), model(image), rtol=3e-2, atol=3e-2)
    model.requires_grad_(True)(image).sum().backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.train().zero_grad()
    model(image).sum().backward()
    for grad, parameter in zip(grads, model.parameters(), strict=True):
        assert_close(grad, parameter.grad, rtol=5e-2, atol=5e-2 * parameter.grad.abs().max().item())
    tokens = torch.randn(2, 100, 24).bfloat16()
    layers = subquad.optimize(nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 70)), torch.bfloat16)
    assert_close(torch.fx.symbolic_trace(layers)(tokens), layers(tokens))


def test_layers_that_say_all_by_their_weights_are_told_apart():
    class Noisy(nn.Conv2d):
        pass

    widened = WidenedConv2d(2, 2, 1)
    assert is_conv(nn.Conv2d(2, 2, 1)) and is_conv(widened) and isinstance(widened, ConvLayer)
    assert is_plain(widened, nn.Conv2d) and is_linear(WidenedLinear(2, 2))
    assert not is_conv(Noisy(2, 2, 1)) and not is_plain(Noisy(2, 2, 1), nn.Conv2d)


def test_patches_of_images_that_are_streamed_multiply_in_fp32(loops, monkeypatch):
    model = subquad.optimize(small("vit", "linear").eval(), torch.bfloat16)
    image, products, product = torch.randn(3, 96, 64).bfloat16(), [], nn.functional.linear
    weight = next(module.weight for module in model.modules() if isinstance(module, nn.Conv2d))

    def heard(x, rows, bias=None):
        if rows.shape == weight.flatten(1).shape:
            products.append(x.dtype)
        return product(x, rows, bias)

    expected = model(image[None]).float()
    monkeypatch.setattr(nn.functional, "linear", heard)
    streamed = subquad.stream(model, image, most_tokens=40)
    assert set(products) == {torch.float32 if loops else torch.bfloat16}
    assert_close(torch.as_tensor(streamed.logits).float().view_as(expected), expected, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("machine", ["x86_64", "AMD64", "aarch64"])
@pytest.mark.parametrize("has", [True, False])
def test_dtypes_that_onednn_has_nothing_for_are_looped_over(has, machine, monkeypatch):
    class OneDnn:
        _is_mkldnn_bf16_supported = staticmethod(lambda: has)
        _is_mkldnn_fp16_supported = staticmethod(lambda: has)

    monkeypatch.setattr(instructions.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.ops, "mkldnn", OneDnn)
    expected = not has and machine != "aarch64"
    assert instructions.loops_over(torch.bfloat16) == instructions.loops_over(torch.float16) == expected
    assert not instructions.loops_over(torch.float32)
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert not instructions.loops_over(torch.bfloat16)
