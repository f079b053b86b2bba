"""Gradient checkpointing calls blocks again in the backward pass: they compute what they did, whatever came between."""

import functools
import logging

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import tiny

from subquad.diffusion import apply_agent_attention, remove_agent_attention

ONE_PHASE = {"sx": 2, "sy": 2}
# what is set, and the noise levels and sizes of two calls before one backward pass
CASES = {
    "phases": ({}, (900, 100), ((16, 16), (16, 16))),
    "sizes": (ONE_PHASE, (900, 100), ((16, 12), (12, 16))),
    "random": ({**ONE_PHASE, "random": True}, (900, 100), ((16, 12), (16, 12))),
    "reuse": ({**ONE_PHASE, "reuse": 1}, (900, 100), ((16, 12), (16, 12))),
    "mlp": ({"merge_mlp": True}, (900, 100), ((16, 12), (12, 16))),
}


def unet():
    torch.manual_seed(0)
    # where a block drops, random numbers that are drawn in it tell as well
    return tiny.unet(dropout=0.1).train()


def transformer(make):
    return make().transformer.train()


def calls(network, levels, sizes):
    for number, (level, size) in enumerate(zip(levels, sizes, strict=True)):
        made = torch.Generator().manual_seed(number)
        texts, steps = torch.randn(1, 7, 32, generator=made), torch.tensor([level])
        given = {"class_labels": torch.tensor([3])} if "DiT" in type(network).__name__ else {}
        given = given or {"encoder_hidden_states": texts}
        if "PixArt" in type(network).__name__:
            given["added_cond_kwargs"] = {}
        # of transformers, two places make a token
        sides = [side * (1 if hasattr(network, "up_blocks") else 2) for side in size]
        yield network(torch.randn(1, 4, *sides, generator=made), timestep=steps, **given).sample


def gradients(network, settings, levels, sizes):
    apply_agent_attention(network, **settings)
    network.zero_grad()
    torch.manual_seed(1)
    sum(answer.square().mean() for answer in calls(network, levels, sizes)).backward()
    return {name: entry.grad for name, entry in network.named_parameters() if entry.grad is not None}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_without_it(case):
    network = unet()
    before = gradients(network, *CASES[case])
    network.enable_gradient_checkpointing()
    found = gradients(network, *CASES[case])
    assert found.keys() == before.keys()
    for name in before:
        torch.testing.assert_close(found[name], before[name], msg=lambda text, name=name: f"{name}: {text}")
    # and nothing is held that belongs to a call
    blocks = [module for module in network.modules() if hasattr(module, "attn1")]
    assert not any(getattr(block.attn1.processor, "again", None) for block in blocks)


@pytest.mark.parametrize("make", [tiny.pipeline_dit, tiny.pipeline_pixart], ids=["dit", "pixart"])
def test_gradients_of_transformers_are_those_without_it(make):
    network = transformer(make)
    before = gradients(network, *CASES["phases"])
    network.enable_gradient_checkpointing()
    found = gradients(network, *CASES["phases"])
    for name in before:
        torch.testing.assert_close(found[name], before[name], msg=lambda text, name=name: f"{name}: {text}")


def test_an_image_that_is_looked_at_before_the_backward_pass_changes_nothing():
    network = unet()
    network.enable_gradient_checkpointing(functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False))
    levels, sizes = (900,), ((16, 12),)
    before = gradients(network, {}, levels, sizes)
    apply_agent_attention(network)
    network.zero_grad()
    torch.manual_seed(1)
    (answer,) = calls(network, levels, sizes)
    with torch.no_grad():
        list(calls(network, (100,), ((12, 16),)))
    answer.square().mean().backward()
    assert all(torch.equal(entry.grad, before[name]) for name, entry in network.named_parameters() if name in before)


def test_what_blocks_are_told_reaches_no_layer(monkeypatch):
    """Diffusers says of options that a layer does not know that it passes over them."""
    said = []
    monkeypatch.setattr(logging.Logger, "warning", lambda logger, text, *args: said.append(text))
    network = unet()
    network.enable_gradient_checkpointing()
    gradients(network, *CASES["phases"])
    assert not said
    remove_agent_attention(network)
    assert not any(module._forward_pre_hooks for module in network.modules())
