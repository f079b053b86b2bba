"""Converted networks of ours, optimized before or after: what they gave, in as few steps as those made so."""

import copy

import pytest
import torch
from hosts import CLASSES, SMALL, drawn, small
from torch.testing import assert_close

import subquad
from subquad.models.layers import Block

# LaViT's layers hand on their scores, and stay as they are
KINDS = [kind for kind in SMALL if CLASSES[kind].takes_mechanisms and kind != "lavit"]
QUICK = {"vit", "pvt", "swin", "mllanet", "mavit"}
STEPS = ("fused_edges", "fused_attention", "fused")


def steps_of(model):
    """Which steps of the blocks are one or few."""
    blocks = [block for block in model.modules() if isinstance(block, Block)]
    return [{name: getattr(block, name) is not None for name in STEPS} for block in blocks]


def close(one, other):
    assert_close(one, other, rtol=1e-4, atol=1e-4 * other.abs().max().item())


@pytest.mark.parametrize("attention", ["softmax", "linear", "agent"])
@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
@torch.inference_mode()
def test_a_converted_network_gives_what_it_gave_and_goes_back(kind, attention):
    model, image = drawn(small(kind, "soft" if kind == "softnet" else "softmax")), torch.randn(2, 3, 64, 64)
    before = model(image)
    student = drawn(subquad.convert(model, attention))
    expected = student(image)
    optimized = subquad.optimize(copy.deepcopy(student))
    # converted when it is optimized already, which its blocks were for another layer
    ready = subquad.optimize(copy.deepcopy(model))
    late = subquad.convert(ready, attention)
    late.load_state_dict(student.state_dict())
    for _ in range(2):
        close(optimized(image), expected)
        close(late(image), expected)
        close(ready(image), before)
        close(subquad.optimize(late)(image), expected)
    back = subquad.restore(optimized, strict=False)
    back.load_state_dict(model.state_dict())
    for _ in range(2):
        close(back(image), before)
    exact = copy.deepcopy(student).double().forward_features(image.double())
    plain = copy.deepcopy(student).bfloat16().forward_features(image.bfloat16()).double()
    half = subquad.optimize(student, torch.bfloat16)
    for _ in range(2):
        got = half.forward_features(image.bfloat16()).double()
        assert (got - exact).norm() <= 1.5 * (plain - exact).norm()


@pytest.mark.parametrize("kind", KINDS)
def test_its_blocks_are_of_as_few_steps_as_those_made_so(kind):
    student = subquad.convert(small(kind, "softmax").eval(), "linear")
    made = small(kind, "linear").eval()
    assert steps_of(subquad.optimize(student)) == steps_of(subquad.optimize(made))
