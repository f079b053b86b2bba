"""Every measure of every mechanism's layers, on a page, without a change to the network."""

import csv
import json
import math
from html import unescape

import numpy as np
import pytest
import timm
import torch
from hosts import small, without_prefix
from mechanisms import WITH_WEIGHTS

import subquad
from subquad import SubquadError
from subquad.analysis import ALL_MEASURES, attention_weights, entropy, measure_network
from subquad.cli import main
from subquad.models import HOSTS

# measures of one mechanism alone
OWN = {"gates": "pola", "power": "pola", "inverse": "soft", "kernel": "soft"}


def network(name):
    sizes = {"depths": (3,), "num_classes": 3, "img_size": (6, 8), "patch_size": 2, "embed_dim": 16}
    return subquad.create_model("deit_micro", attention=name, **sizes | without_prefix(name))


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_every_measure_has_a_value_in_every_layer(name):
    model, images = network(name), torch.randn(4, 3, 6, 8)
    before = model.eval()(images)
    rows = measure_network(model, images.split(2), network="a")
    assert torch.equal(model(images), before)
    heads = range(model.blocks[0].attn.num_heads + 1)
    for measure in [key for key in ALL_MEASURES if OWN.get(key, name) == name]:
        layers = (2, 3) if measure == "similarity" else (1, 2, 3)
        own = [row for row in rows if row.measure == measure]
        assert [(row.layer, row.head) for row in own] == [(layer, head) for layer in layers for head in heads]
        assert all(math.isfinite(row.mean) and row.low <= row.high and row.mechanism == name for row in own)
        assert {row.network for row in own} == {"a"}


def test_rows_are_means_over_all_images_of_all_batches():
    model, images = network("softmax").eval(), torch.randn(5, 3, 6, 8)
    for block in model.blocks:
        # large weights, so that entropies are not all near 1
        torch.nn.init.normal_(block.attn.qkv.weight)
    rows = [row for row in measure_network(model, images.split(2), ["entropy"]) if row.layer == 2]
    expected = entropy(attention_weights(model, images)[1].weights[:, :, 0], normalised=True).mean(-1)
    assert [row.mean for row in rows[1:]] == pytest.approx(expected.mean(0).tolist(), rel=1e-5)
    for row, values in zip(rows, [expected.flatten(), *expected.T], strict=True):
        assert (row.low, row.high) == pytest.approx(np.quantile(values.double(), (0.05, 0.95)).tolist(), rel=1e-5)
    assert rows[0].mean == pytest.approx(expected.mean().item(), rel=1e-5) and rows[0].baseline == 1


@pytest.mark.parametrize("host", HOSTS)
def test_every_host_is_measured_where_it_can_be(host):
    model, images = small(host), torch.randn(1, 3, 64, 64)
    if not attention_weights(model, images):
        with pytest.raises(SubquadError, match="shows no attention: none of its layers gives its weights"):
            measure_network(model, [images])
        return
    rows = measure_network(model, [images])
    assert {"entropy", "negative"} <= {row.measure for row in rows}
    assert all(math.isfinite(row.mean) for row in rows)


@pytest.mark.parametrize("name", ["softmax", "inline"])
def test_what_fills_up_a_window_is_not_measured(name):
    """Stripes of 7 on 15 places: the last one of three is filled up. Without a query all rows are alike everywhere."""
    sizes = {"img_size": 60, "num_classes": 2, "depths": (1, 1), "split_size": (7, 7), "num_heads": (2, 4)}
    model = subquad.create_model("cswin_tiny", attention=name, **sizes)
    for module in model.modules():
        if hasattr(module, "qkv"):
            torch.nn.init.zeros_(module.qkv.weight)
    rows = [row for row in measure_network(model, [torch.randn(2, 3, 60, 60)]) if row.layer == 1 and not row.head]
    means = {row.measure: row.mean for row in rows}
    assert means["entropy"] == pytest.approx(1, abs=1e-5)
    for measure in ("local", "distance"):
        (baseline,) = (row.baseline for row in rows if row.measure == measure)
        assert means[measure] == pytest.approx(baseline, rel=1e-4)
    assert all(math.isfinite(mean) for mean in means.values())


@pytest.mark.parametrize("host", ["swin_tiny", "cswin_tiny"])
def test_windows_of_other_tokens_are_not_compared_with_those_of_the_layer_before(host):
    model = subquad.create_model(host, attention="softmax", img_size=64, num_classes=2, depths=(2, 2, 2, 2))
    images = torch.randn(1, 3, 64, 64)
    layers, rows = attention_weights(model, images), measure_network(model, [images], ["similarity"])
    whole = {number for number, layer in enumerate(layers, start=1) if len(layer.weights) == len(images)}
    assert {row.layer for row in rows} <= whole and 0 < len({row.layer for row in rows}) < len(layers) - 1


def test_what_can_not_be_measured_is_said():
    with pytest.raises(SubquadError, match="unknown measure 'entropie': did you mean entropy"):
        measure_network(network("softmax"), [], ["entropie"])
    with pytest.raises(SubquadError, match="Linear shows no attention"):
        measure_network(torch.nn.Linear(8, 2), [torch.randn(1, 3, 6, 8)])


def test_the_command_writes_a_page_a_table_and_json(tmp_path, capsys):
    from PIL import Image

    sizes = ["--depth", "2", "--epochs", "1", "--warmup-epochs", "0", "--max-train-images", "64", "--data", "digits"]
    for name in ("softmax", "inline"):
        assert main(["train", *sizes, "--attention", name, "--output", str(tmp_path), "--experiment", name]) == 0
    for k in range(3):
        Image.new("RGB", (8, 8), (80 * k, 30, 200)).save(tmp_path / f"{k}.png")
    pictures = [str(tmp_path / f"{k}.png") for k in range(3)]
    runs, out = [str(tmp_path / name) for name in ("softmax", "inline")], tmp_path / "out"
    capsys.readouterr()
    assert main(["analyze", *runs, "--images", *pictures, "--batch-size", "2", "--output", str(out)]) == 0
    assert "softmax: 2 layers, 3 images" in capsys.readouterr().out
    page = (out / "analysis.html").read_text()
    said = [measure.says for key, measure in ALL_MEASURES.items() if key not in OWN]
    assert all(says.split(".")[0] in unescape(page) for says in said)
    assert "http://" not in page.replace("http://www.w3.org", "")
    rows = json.loads((out / "analysis.json").read_text())["rows"]
    with (out / "analysis.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    assert {row["network"] for row in rows} == {"softmax", "inline"}
    assert main(["analyze", runs[0], "--images", *pictures, "--measures", "rang", "--output", str(out)]) == 2
    assert "unknown --measures 'rang': did you mean rank" in capsys.readouterr().err


TIMM = {
    # name, settings, side: grids of queries and keys that are seen, in order
    "pvt_v2_b0": ({}, 64, [((16, 16, 0), (2, 2, 0)), ((8, 8, 0), (2, 2, 0)), ((4, 4, 0), (2, 2, 0)), ((2, 2, 0),) * 2]),
    "twins_pcpvt_small": ({"img_size": 64}, 64, [((16, 16, 0), (2, 2, 0)), ((8, 8, 0), (2, 2, 0))]),
    "twins_svt_small": ({"img_size": 224, "embed_dims": (8, 16, 32, 64)}, 224, [((56, 56, 0), (7, 7, 0))]),
    "cait_xxs24_224": ({"img_size": 32}, 32, []),
    "xcit_nano_12_p16_224": ({"img_size": 32}, 32, []),
    "samvit_base_patch16": ({"img_size": 64, "embed_dim": 16, "num_heads": 2, "window_size": 2}, 64, []),
    "deit_tiny_patch16_224": ({"img_size": 64, "embed_dim": 24}, 64, [((4, 4, 1),) * 2]),
}
SMALL = {"twins_svt_small", "twins_pcpvt_small", "pvt_v2_b0"}


@pytest.mark.parametrize("name", TIMM)
def test_layers_of_timm_are_seen_where_tokens_see_tokens(name):
    settings, side, expected = TIMM[name]
    short = {"depths": (2, 1, 1, 1)} if name in SMALL else {"depth": 2}
    model = timm.create_model(name, num_classes=3, **settings, **short).eval()
    images = torch.randn(1, 3, side, side)
    before = model(images)
    layers = attention_weights(model, images)
    grids = [tuple((g.height, g.width, g.prefix) for g in (layer.grid, layer.kv_grid)) for layer in layers]
    assert list(dict.fromkeys(grids))[: len(expected)] == expected and bool(grids) == bool(expected)
    for layer in layers:
        assert layer.weights.shape[-2:] == (layer.grid.num_tokens, layer.kv_grid.num_tokens)
        assert torch.allclose(layer.weights.sum(-1), torch.ones(()), atol=1e-5)
    if not expected:
        with pytest.raises(SubquadError, match="shows no attention"):
            measure_network(model, [images])
    else:
        assert all(
            math.isfinite(row.mean) for row in measure_network(model, [images], ["entropy", "diagonal", "local"])
        )
    assert torch.equal(model(images), before)


def test_a_token_alone_has_no_others_to_be_compared_with():
    model = subquad.create_model("pvt_tiny", attention="linear", num_classes=2, img_size=32, depths=(1, 1, 1, 1))
    rows = measure_network(model, [torch.randn(1, 3, 32, 32)])
    assert {row.layer for row in rows} == {1, 2, 3, 4} and all(math.isfinite(row.mean) for row in rows)
