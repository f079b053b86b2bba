"""Weights of versions that called the fused projection `project`, not `qkv`: they load, and give the same answers."""

import re
from functools import partial

import pytest
import torch
from hosts import SMALL, paired, small
from torch import nn

import subquad
from subquad import ATTENTION
from subquad.runs.run_state import State, put_back
from subquad.tasks.detection.detectors import build_detector
from subquad.tasks.segmentation.segmenters import build_segmenter
from subquad.tasks.sequences.sequence_network import create_sequence_model
from subquad.weights.fitting import adapt, under_current_names

IMAGES = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(1, 13).view(1, 12)
KINDS = paired(SMALL, ATTENTION)


def earlier(state):
    """A state dict as versions before 0.1 wrote it."""
    return {re.sub(r"\battn\.qkv\.", "attn.project.", name): tensor for name, tensor in state.items()}


def another(make):
    """A network with numbers of its own in every parameter."""
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize(("host", "attention"), KINDS)
@torch.no_grad()
def test_every_host_reads_the_names_of_before_with_every_mechanism(host, attention):
    model, fresh = another(lambda: small(host, attention)), small(host, attention).eval()
    old = earlier(model.state_dict())
    assert old.keys() != model.state_dict().keys() and not [name for name in fresh.state_dict() if "project" in name]
    fresh.load_state_dict(old)
    assert torch.equal(fresh(IMAGES), model(IMAGES))


class Inside(nn.Module):
    """A network that holds a backbone of ours somewhere inside and reads no names but its own."""

    def __init__(self, host="pvt", attention="inline"):
        super().__init__()
        self.backbone = small(host, attention)


def sequences(attention="softmax"):
    return create_sequence_model(attention, vocab_size=20, max_length=16, num_classes=3, embed_dim=32).eval()


def segmenter():
    return build_segmenter(small("swin", "pola", num_classes=0).creation, head="fpn", num_classes=3, head_channels=64)


def detector():
    backbone = small("cswin", "agent", num_classes=0).creation
    return build_detector(backbone, head="retinanet", num_classes=3, head_channels=8)


INSIDE = {host: partial(Inside, host, "softmax") for host in SMALL}
INSIDE |= {"segmenter": segmenter, "detector": detector, "sequences": sequences}


@pytest.mark.parametrize("make", INSIDE.values(), ids=list(INSIDE))
def test_a_state_dict_of_before_loads_into_whatever_holds_blocks_of_ours(make):
    model, fresh = another(make), make()
    old = earlier(model.state_dict())
    assert old.keys() != model.state_dict().keys()
    fresh.load_state_dict(old)
    wanted = model.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in fresh.state_dict().items())
    assert old.keys() == earlier(wanted).keys()


@pytest.mark.parametrize("attention", ATTENTION)
@torch.no_grad()
def test_sequence_networks_read_the_names_of_before(attention):
    model, fresh = another(partial(sequences, attention)), sequences(attention)
    subquad.load_checkpoint(fresh, earlier(model.state_dict()))
    assert torch.equal(fresh(TOKENS), model(TOKENS))


def test_a_file_of_before_opens_and_says_our_layout(tmp_path):
    model = another(lambda: small("swin", "agent"))
    adapted = adapt(earlier(model.state_dict()), model)
    assert adapted.family is None and not adapted.resized and adapted.state.keys() == model.state_dict().keys()
    own, model.state_dict = model.state_dict(), lambda: earlier(own)
    subquad.save_weights(model, tmp_path / "old.safetensors")
    restored, _ = subquad.restore_model(tmp_path / "old.safetensors")
    assert all(torch.equal(tensor, own[name]) for name, tensor in restored.state_dict().items())


def test_a_state_of_before_is_put_back_with_its_optimizer_and_its_average(tmp_path):
    """In networks that hold a backbone of ours somewhere inside, with all that a run keeps."""

    def trained(model, updates):
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(updates):
            optimizer.zero_grad()
            model.backbone(IMAGES).square().sum().backward()
            optimizer.step()
        return optimizer

    model = Inside()
    optimizer = trained(model, 2)
    old = earlier(model.state_dict())
    moments = optimizer.state_dict()
    state = State(1, 2, 1, 0.0, 0, old, moments, old, {})
    other, average = Inside(), Inside()
    again = trained(other, 1)
    put_back(state, tmp_path / "last.pt", other, again, average, None)
    wanted = model.state_dict()
    for restored in (other, average):
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in restored.state_dict().items())
    assert all(
        torch.equal(again.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True)
    )


def test_entries_that_a_model_has_under_their_name_keep_it():
    """A plug-in's layer may call its own projection as ours was called."""
    tensor = torch.ones(1)
    old = {"a.attn.project.weight": tensor}
    assert under_current_names(old, {"a.attn.project.weight"}).keys() == old.keys()
    assert under_current_names(old, {"a.attn.qkv.weight"}).keys() == {"a.attn.qkv.weight"}
    assert under_current_names(old, {"b.attn.qkv.weight"}).keys() == old.keys()
    both = old | {"a.attn.qkv.weight": 2 * tensor}
    assert under_current_names(both, {"a.attn.qkv.weight"}) == both
    inner = {"a.attn.inner.project.weight": tensor}
    assert under_current_names(inner, {"a.attn.inner.qkv.weight"}).keys() == inner.keys()
