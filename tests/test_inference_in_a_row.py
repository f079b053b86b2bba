"""Blocks in a row, of which each is one call of the library, are one call together: they give what they gave."""

import copy
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from hosts import SMALL, drawn, small
from torch import nn
from torch.testing import assert_close

import subquad
from subquad import kernels
from subquad.kernels.cpu.tape import Tape
from subquad.models.layers import Block

pytestmark = pytest.mark.skipif(bool(kernels.unavailable("native")), reason="no kernels here")


@pytest.fixture
def calls(monkeypatch):
    """How often tapes were called, by how many kernels they call."""
    counted, call = Counter(), Tape.__call__

    def counting(self, *tokens):
        counted[len(self._content.calls)] += 1
        return call(self, *tokens)

    monkeypatch.setattr(Tape, "__call__", counting)
    return counted


def blocks_of(model):
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1)


def stood(model, image):
    """A network whose rows stand, and what it gives."""
    with torch.inference_mode():
        return model, [model(image) for _ in range(3)][-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("attention", subquad.ATTENTION)
@torch.inference_mode()
def test_all_blocks_of_a_plain_network_are_one_call(attention, dtype, calls):
    model = subquad.optimize(drawn(small("vit", attention)), dtype)
    images = [torch.randn(n, 3, 64, 64).to(dtype) for n in (1, 2)]
    # on its own, each is recorded
    expected = [copy.deepcopy(model)(image) for image in images]
    for image, wanted in zip(images, expected, strict=True):
        model(image)
        calls.clear()
        for number in range(1, 4):
            assert_close(model(image), wanted, rtol=0, atol=0)
            assert calls.total() == number


@pytest.mark.parametrize("attention", ["softmax", "linear", "agent"])
@pytest.mark.parametrize("kind", SMALL)
@torch.inference_mode()
def test_rows_of_every_host_give_what_blocks_gave(kind, attention):
    model = subquad.optimize(drawn(small(kind, attention)), torch.bfloat16)
    images = [torch.randn(1, 3, *size).bfloat16() for size in ((64, 64), (96, 64), (64, 96))]
    expected = [copy.deepcopy(model)(image) for image in images]
    for image, wanted in zip(3 * images, 3 * expected, strict=True):
        assert_close(model(image), wanted, rtol=0, atol=0)


@torch.inference_mode()
def test_blocks_that_turn_are_one_call_with_their_tables(calls):
    model = subquad.optimize(drawn(small("dinov3", "linear")), torch.bfloat16)
    images = [torch.randn(1, 3, *size).bfloat16() for size in ((64, 64), (96, 64), (64, 96))]
    expected = [copy.deepcopy(model)(image) for image in images]
    for number, (image, wanted) in enumerate(zip(3 * images, 3 * expected, strict=True)):
        calls.clear()
        assert_close(model(image), wanted, rtol=0, atol=0)
        # what is recorded is no call
        assert calls.total() == (0 if number < 3 else 1)


@pytest.mark.parametrize("name", [None, "softmax", "linear", "inline", "agent"])
@torch.inference_mode()
def test_blocks_of_timm_are_one_call(name, calls):
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, num_classes=5)
    model = subquad.optimize(model if name is None else subquad.convert(model, name), torch.bfloat16)
    images = [torch.randn(n, 3, 64, 64).bfloat16() for n in (1, 2)]
    expected = [copy.deepcopy(model)(image) for image in images]
    for image, wanted in zip(images, expected, strict=True):
        model(image)
        calls.clear()
        for number in range(1, 4):
            assert_close(model(image), wanted, rtol=0, atol=0)
            assert calls.total() == number
    assert_close(model.forward_intermediates(images[0], intermediates_only=True)[-1].shape, torch.Size([1, 192, 4, 4]))


@torch.inference_mode()
def test_maps_of_as_many_tokens_have_rows_of_their_own(calls):
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, num_classes=5, dynamic_img_size=True)
    model = subquad.optimize(drawn(subquad.convert(model, "inline")), torch.bfloat16)
    images = [torch.randn(1, 3, *size).bfloat16() for size in ((64, 128), (128, 64))]
    expected = [copy.deepcopy(model)(image) for image in images]
    for image, wanted in zip(3 * images, 3 * expected, strict=True):
        calls.clear()
        assert_close(model(image), wanted, rtol=0, atol=0)
    assert calls.total() == 1


@pytest.mark.parametrize("place", ["", "attn", "mlp.fc2", "norm1"])
def test_who_begins_to_listen_to_a_block_hears_it(place):
    model, before = stood(subquad.optimize(drawn(small("vit", "linear"))), image := torch.randn(1, 3, 64, 64))
    heard = []
    handle = blocks_of(model)[1].get_submodule(place).register_forward_hook(lambda *_: heard.append(place))
    with torch.inference_mode():
        assert_close(model(image), before, rtol=0, atol=1e-5)
        assert heard == [place]
        handle.remove()
        for _ in range(3):
            assert_close(model(image), before, rtol=0, atol=0)
    assert heard == [place]


@pytest.mark.parametrize("change", ["taken out", "another", "in another order", "put in"])
@torch.inference_mode()
def test_other_blocks_are_computed(change):
    model, before = stood(subquad.optimize(drawn(small("vit", "linear"))), image := torch.randn(1, 3, 64, 64))
    blocks = blocks_of(model)
    if change == "taken out":
        del blocks[1]
    elif change == "another":
        blocks[1] = copy.deepcopy(blocks[0])
    elif change == "in another order":
        blocks[0], blocks[1] = blocks[1], blocks[0]
    else:
        blocks.append(copy.deepcopy(blocks[0]))
    expected = copy.deepcopy(model)(image)
    assert (expected - before).abs().max() > 0
    for _ in range(3):
        assert_close(model(image), expected, rtol=0, atol=0)


@torch.inference_mode()
def test_blocks_of_somebody_else_that_do_more_are_called():
    class Doubling(Block):
        def forward(self, x, *, grid, rotation=None):
            return super().forward(x, grid=grid, rotation=rotation).mul_(2)

    model, before = stood(subquad.optimize(drawn(small("vit", "linear"))), image := torch.randn(1, 3, 64, 64))
    blocks_of(model)[1].__class__ = Doubling
    expected = model(image)
    assert (expected - before).abs().max() > 1e-3 * before.abs().max()
    for _ in range(3):
        assert_close(model(image), expected, rtol=0, atol=0)


def test_parameters_that_learn_again_have_gradients():
    model, image = subquad.optimize(drawn(small("vit", "linear"))), torch.randn(1, 3, 64, 64)
    for _ in range(3):
        model(image)
    blocks_of(model)[1].requires_grad_(True)
    model(image).sum().backward()
    assert blocks_of(model)[1].mlp.fc1.weight.grad.abs().max() > 0


@torch.inference_mode()
def test_threads_share_a_row():
    model = subquad.optimize(drawn(small("vit", "agent")), torch.bfloat16)
    images = torch.randn(8, 1, 3, 64, 64).bfloat16()
    expected = [copy.deepcopy(model)(image) for image in images]

    def answers(number):
        with torch.inference_mode():
            return [model(images[number]) for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        for number, results in enumerate(pool.map(answers, range(len(images)))):
            for result in results:
                assert_close(result, expected[number], rtol=0, atol=0)


def test_what_is_kept_of_a_result_is_not_written_over():
    model, first = stood(subquad.optimize(drawn(small("vit", "linear"))), torch.randn(1, 3, 64, 64))
    kept = first.clone()
    with torch.inference_mode():
        for _ in range(3):
            model(torch.randn(1, 3, 64, 64))
    assert_close(first, kept, rtol=0, atol=0)
