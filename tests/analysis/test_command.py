"""`subquad analyze`: a page whose maps can be clicked, counts that go on, networks of timm beside ours."""

import base64
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import subquad
from subquad import ATTENTION, TokenGrid
from subquad.analysis import LayerAttention, attention_weights
from subquad.analysis.small_maps import looking, small_map
from subquad.analysis.study import Study
from subquad.cli import main
from subquad.data import InputConfig
from subquad.tasks.classification.trained_classifier import TrainedClassifier


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    sizes = ["--depth", "2", "--epochs", "1", "--warmup-epochs", "0", "--max-train-images", "64", "--data", "digits"]
    for name in ("softmax", "inline"):
        assert main(["train", *sizes, "--attention", name, "--output", str(folder), "--experiment", name]) == 0
    return folder


@pytest.mark.slow
def test_held_out_images_are_counted_and_counts_are_kept(runs, tmp_path, capsys):
    command = ["analyze", str(runs / "softmax"), str(runs / "inline"), "--removed", "--confusion", "--max-images", "4"]
    command += ["--max-held-out", "40", "--measures", "entropy", "--shown", "2", "--output", str(tmp_path)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "softmax, top-1 % without keys: none" in out and "confused pairs an image" in out
    content = json.loads((tmp_path / "analysis.json").read_text())["about"]
    assert set(content["removed"]) == set(content["confused"]) == {"softmax", "inline"}
    hits = content["removed"]["softmax"]
    assert len(hits) == 7 and all(len(values) == 40 for values in hits.values())
    page = (tmp_path / "analysis.html").read_text()
    assert "Removed keys" in page and "Confused queries" in page and page.count('class="viewer"') == 2
    # again: nothing is counted anew
    file = tmp_path / "removed-softmax.json"
    kept = json.loads(file.read_text())
    kept["counts"]["none"] = [0.0] * 40
    file.write_text(json.dumps(kept))
    assert main(command) == 0 and "softmax, top-1 % without keys: none 0.0" in capsys.readouterr().out


def test_measures_that_no_layer_has_are_one_line(runs, tmp_path, capsys):
    command = ["analyze", str(runs / "inline"), "--max-images", "1", "--measures", "gates", "power"]
    assert main([*command, "--output", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert "inline: none of these measures" in captured.out
    assert "no layer of inline has any of gates, power" in captured.err


def test_what_can_not_be_asked_of_a_network_is_said_before_any_is_measured(runs, monkeypatch):
    traits = replace(ATTENTION["inline"].traits, key_removal=None)
    monkeypatch.setattr(ATTENTION["inline"], "traits", traits)
    said = []
    for other, reason in (
        ("nowhere", "nowhere"),
        (runs / "inline", "InLineAttention does not say what its weights become without some keys"),
        (runs.parent / runs.name / "softmax", "two networks are called softmax"),
    ):
        with pytest.raises(subquad.SubquadError, match=reason):
            subquad.analyze([runs / "softmax", other], measures=["entropy"], removed=True, log=said.append)
    assert not said


def test_the_page_has_the_maps_of_every_layer(runs, tmp_path):
    Image.new("RGB", (16, 16), (200, 30, 90)).save(tmp_path / "a.png")
    command = ["analyze", str(runs / "inline"), "--images", str(tmp_path / "a.png"), "--measures", "entropy"]
    assert main([*command, "--output", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "analysis.html").read_text()
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', page)[1])
    assert len(data["layers"]) == 2
    layer = data["layers"][0]
    assert layer["queries"] == layer["keys"] == [4, 4] and layer["prefix"]
    # of 16 places and the class token
    assert len(base64.b64decode(layer["weights"])) == 17 * 16
    assert 'src="http' not in page and "fetch(" not in page


def test_small_maps_are_the_layers_own():
    model = subquad.create_model("deit_micro", depths=(1,), num_classes=3, img_size=(6, 8), patch_size=2).eval()
    images = torch.randn(2, 3, 6, 8)
    whole = attention_weights(model, images)[0].weights.mean((1, 2))
    for look, weights in zip((layers[0] for layers in looking(model, images)), whole, strict=True):
        expected = torch.cat([weights[1:, 1:], weights[:1, 1:]]).numpy()
        assert look.queries == look.keys == (3, 4) and look.has_prefix
        assert np.abs(look.weights * look.scale - expected).max() <= look.scale / 2 + 1e-7


def test_large_maps_are_averaged_and_keep_their_weight():
    model = subquad.create_model("pvt_tiny", attention="linear", num_classes=2, img_size=128).eval()
    layers = looking(model, torch.randn(1, 3, 128, 128))[0]
    assert layers[0].queries == (16, 16) and layers[0].keys == (16, 16)
    for look in layers:
        assert (look.weights * look.scale).sum(1) == pytest.approx(1, abs=0.6)


@pytest.mark.parametrize("grid", [(24, 37), (20, 31), (17, 5)])
def test_weight_counts_alike_wherever_it_lies_on_a_large_map(grid):
    grid = TokenGrid(*grid)
    for place in range(0, grid.num_places, 5):
        weights = torch.zeros(grid.num_places, grid.num_places)
        weights[:, place] = 1
        look = small_map(LayerAttention("a", "softmax", weights, grid, grid), weights, 1)
        shown = (look.weights * look.scale).reshape(-1, *look.keys)
        assert shown.sum((1, 2)) == pytest.approx(1, abs=0.02)
        # and stands where the token does
        row, column = divmod(place, grid.width)
        rows, columns = shown[0].sum(1), shown[0].sum(0)
        for line, at, side in ((rows, row, grid.height), (columns, column, grid.width)):
            middle = (line * (np.arange(len(line)) + 0.5)).sum() / len(line)
            assert middle == pytest.approx((at + 0.5) / side, abs=0.6 / len(line))
    even = torch.full((grid.num_places, grid.num_places), 1 / grid.num_places)
    look = small_map(LayerAttention("a", "softmax", even, grid, grid), even, 1)
    assert np.ptp(look.weights.astype(int)) <= 1


def test_maps_are_of_the_picture_without_the_margin_around_it():
    model = subquad.create_model("mhla_deit_tiny", depths=(2,), num_classes=3, img_size=64).eval()
    images = torch.randn(1, 3, 64, 64)
    look, whole = looking(model, images)[0][0], attention_weights(model, images)[0]
    assert whole.grid.shape == (6, 6) and look.queries == look.keys == (4, 4)
    inner = whole.weights.mean((0, 1, 2)).unflatten(0, (6, 6)).unflatten(2, (6, 6))[1:-1, 1:-1, 1:-1, 1:-1]
    assert np.abs(look.weights * look.scale - inner.flatten(2).flatten(0, 1).numpy()).max() <= look.scale


def test_networks_of_timm_stand_beside_ours(runs, tmp_path, capsys):
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=5, img_size=48)
    save_file(model.state_dict(), tmp_path / "vit.safetensors")
    Image.new("RGB", (48, 48), (200, 30, 90)).save(tmp_path / "a.png")
    source = f"timm/vit_tiny_patch16_224={tmp_path / 'vit.safetensors'}"
    command = ["--images", str(tmp_path / "a.png"), "--measures", "entropy", "local", "--output", str(tmp_path)]
    assert main(["analyze", source, "--img-size", "48", *command]) == 0
    assert "vit_tiny_patch16_224: 12 layers, 1 image\n" in capsys.readouterr().out
    for wrong, text in [
        (["timm/vit_tinny"], "unknown network of timm 'vit_tinny'"),
        ([source], "can't load timm/vit_tiny_patch16_224="),
        ([f"timm/vit_tiny_patch16_224={tmp_path / 'no.safetensors'}"], "no weight file at"),
        ([str(runs / "softmax"), str(runs / "softmax")], "two networks are called softmax"),
    ]:
        assert main(["analyze", *wrong, *command]) == 2
        err = capsys.readouterr().err
        assert text in err and err.count("\n") == 1, err
    assert main(["analyze", source, "--img-size", "48", "--output", str(tmp_path)]) == 2
    assert "nothing says what was held out: name photographs with --images, or a data set" in capsys.readouterr().err


def folder_of(root, count, colour):
    for name in "ab":
        for split, images in (("train", 1), ("val", count)):
            (root / split / name).mkdir(parents=True)
            for k in range(images):
                Image.new("RGB", (8, 8), (colour, k, 0)).save(root / split / name / f"{k:03}.png")
    return root


@pytest.mark.parametrize("count", [5, 7, 20])
def test_images_are_looked_at_from_the_first_class_to_the_last(tmp_path, count):
    root = folder_of(tmp_path / "data", count, 0)
    (root / "val" / "b" / "000.png").write_bytes(b"broken")
    model = subquad.create_model("deit_micro", depths=(1,), num_classes=2, img_size=8, patch_size=4).eval()
    config = InputConfig((8, 8))
    trained = TrainedClassifier("classify", model, ("a", "b"), str(root), None, torch.device("cpu"), config)
    pictures, inputs = Study(max_images=4)._pictures(trained)
    assert len(pictures) == len(inputs) == 4
    listed = [str(path) for path in sorted((root / "val").rglob("*.png"))]
    places = [k * len(listed) // 4 for k in range(4)]
    shown = [picture.getpixel((0, 0))[1] for picture in pictures]
    whole = [int(listed[k][-7:-4]) for k in places if "b/000" not in listed[k]]
    assert [k for k in shown if k in whole] and max(places) >= count
    photographs, _ = Study(max_images=4, images=[root / "val" / "a"])._pictures(trained)
    assert [p.getpixel((0, 0))[1] for p in photographs] == [k * count // 4 for k in range(4)]


def test_maps_are_shown_beside_the_images_that_they_are_of(tmp_path):
    """Networks that were trained on different data are looked into on the held-out images of their own."""
    model = subquad.create_model("deit_micro", depths=(1,), num_classes=2, img_size=8, patch_size=4).eval()
    for colour, (name, count) in enumerate({"red": 3, "blue": 2}.items()):
        data = str(folder_of(tmp_path / name, count, 100 * colour))
        about = {"task": "classify", "classes": ["a", "b"], "input": {}, "data": data}
        subquad.save_weights(model, tmp_path / f"{name}.safetensors", about)
    files, said = [tmp_path / f"{name}.safetensors" for name in ("red", "blue")], []
    findings = subquad.analyze(files, tmp_path / "out", measures=["entropy"], shown=4, log=said.append)
    assert [picture.getpixel((0, 0))[0] for picture in findings.pictures] == [0] * 4 and list(findings.looks) == ["red"]
    assert "blue: its images are not the first network's" in "".join(said)
    about = json.loads((tmp_path / "out" / "analysis.json").read_text())["about"]["about"]
    assert about.startswith("6 images (red), 4 images (blue), torch")


def test_counts_of_other_data_are_not_taken_for_these(runs, tmp_path, capsys):
    sizes = {"depths": (1,), "num_classes": 2, "img_size": 8, "patch_size": 4}
    model = subquad.create_model("deit_micro", **sizes).eval()
    subquad.save_weights(model, tmp_path / "m.safetensors", {"task": "classify", "classes": ["a", "b"], "input": {}})
    command = ["analyze", str(tmp_path / "m.safetensors"), "--removed", "--measures", "entropy", "--max-images", "2"]
    command += ["--output", str(tmp_path / "out")]
    file = tmp_path / "out" / "removed-m.json"
    for name in ("one", "two"):
        folder_of(tmp_path / name, 2, 200)
        assert main([*command, "--data", str(tmp_path / name)]) == 0
        kept = json.loads(file.read_text())
        assert kept["about"]["data"] == str(tmp_path / name) and 0.5 not in kept["counts"]["none"]
        kept["counts"]["none"] = [0.5] * 4
        file.write_text(json.dumps(kept))
    assert main([*command, "--data", "folder", "--data-dir", str(tmp_path / "one")]) == 0
    assert 0.5 not in json.loads(file.read_text())["counts"]["none"]
