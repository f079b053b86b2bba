"""A step of a diffusion U-Net is measured whole and in its self-attention."""

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import tiny
import torch
from diffusers import UNet2DConditionModel

from subquad import SubquadError
from subquad.bench import measure_unet, unets, unets_table


@pytest.mark.slow
def test_softmax_token_merging_and_agents_take_turns(monkeypatch):
    monkeypatch.setitem(unets.UNETS, "tiny", tiny.UNET)
    rows = measure_unet("tiny", [64, 128], [0.2, 0.4], repeats=2)
    methods = ["softmax", "tome 20%", "agent 20%", "tome 40%", "agent 40%"]
    assert [(row.px, row.method) for row in rows] == [(px, method) for px in (64, 128) for method in methods]
    for row in rows:
        assert 0 < row.attention_ms < row.step_ms and row.ceiling > 1 and row.peak_mb > 0
        assert (row.matching > 0) == (row.method != "softmax") and row.matching < 1
        assert (row.gain == row.attention_gain == 1) == (row.method == "softmax")
    assert max(map(len, unets_table(rows).splitlines())) <= 80


def test_a_network_that_is_not_known_is_said():
    with pytest.raises(SubquadError, match="unknown U-Net 'sd14'"):
        measure_unet("sd14", [64], [0.4])


@pytest.mark.parametrize(("name", "parameters"), [("sd15", 859_520_964), ("sd21", 865_910_724)])
def test_configurations_are_those_of_the_released_networks(name, parameters):
    with torch.device("meta"):
        unet = UNet2DConditionModel(**unets.UNETS[name])
    assert sum(parameter.numel() for parameter in unet.parameters()) == parameters
