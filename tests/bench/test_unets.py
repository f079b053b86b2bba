"""A step of a diffusion U-Net is measured whole and in its self-attention."""

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import tiny
import torch
from diffusers import UNet2DConditionModel

from subquad import SubquadError
from subquad.benchmarks import measure_unet, unets, unets_table


@pytest.mark.slow
def test_softmax_token_merging_and_agents_take_turns(monkeypatch):
    monkeypatch.setitem(unets.UNETS, "tiny", tiny.UNET)
    rows = measure_unet("tiny", [64, 128], [0.2, 0.4], repeats=2, agents=16)
    methods = ["softmax", "tome 20%", "agent 20%", "16 agents 20%", "tome 40%", "agent 40%", "16 agents 40%"]
    assert [(row.px, row.method) for row in rows] == [(px, method) for px in (64, 128) for method in methods]
    for row in rows:
        assert 0 < row.attention_ms < row.step_ms and row.ceiling > 1 and row.peak_mb > 0
        assert (row.matching > 0) == (row.method != "softmax") and row.matching < 1
        assert (row.gain == row.attention_gain == 1) == (row.method == "softmax") == (row.distance == 0)
    assert max(map(len, unets_table(rows).splitlines())) <= 80


@pytest.mark.slow
def test_a_matching_for_all_blocks_costs_less_of_the_attention_and_xl_is_measured_at_its_first_level(monkeypatch):
    monkeypatch.setitem(unets.UNETS, "tiny xl", tiny.UNET_XL)
    each, shared = (measure_unet("tiny xl", [128], [0.4], repeats=9, reuse=reuse) for reuse in (0, 1))
    assert shared[1].matching < each[1].matching and shared[1].distance != each[1].distance


def test_what_can_not_be_measured_is_said_before_a_network_is_built(monkeypatch):
    monkeypatch.setattr(unets, "unet_of", None)
    with pytest.raises(SubquadError, match="unknown U-Net 'sd14'"):
        measure_unet("sd14", [64], [0.4])
    with pytest.raises(SubquadError, match=r"ratio must be a number of at least 0 and at most 1, got 1\.4"):
        measure_unet("sd15", [64], [1.4])
    with pytest.raises(SubquadError, match="pixels are 8 px of the image, and 100 px are no whole number"):
        measure_unet("sd15", [64, 100], [0.4])
    with pytest.raises(SubquadError, match="batch_size must be a whole number of at least 1, got 0"):
        measure_unet("sd15", [64], [0.4], batch_size=0)


@pytest.mark.parametrize(
    ("name", "parameters"), [("sd15", 859_520_964), ("sd21", 865_910_724), ("sdxl", 2_567_463_684)]
)
def test_configurations_are_those_of_the_released_networks(name, parameters):
    with torch.device("meta"):
        unet = UNet2DConditionModel(**unets.UNETS[name])
    assert sum(parameter.numel() for parameter in unet.parameters()) == parameters
