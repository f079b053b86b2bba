"""Segmenters whose head tells each place by itself: streamed, their maps are those of the whole network."""

import numpy as np
import pytest
import torch
from hosts import SMALL
from PIL import Image

import subquad
from subquad import SubquadError
from subquad.cli import main
from subquad.tasks.segmentation import build_segmenter
from subquad.weights.files import save_weights

SCENES = {"crop": [64, 64], "short_side": None, "mean": [0.5] * 3, "std": [0.5] * 3}
NOTE = {"classes": [*"abcde"], "data": "digits", "input": SCENES, "slide": False}


def segmenter(host="vit", head="linear", head_channels=None, **changes):
    name, sizes = SMALL[host]
    backbone = {"name": name, "attention": "linear", "img_size": 64, **sizes, **changes}
    torch.manual_seed(0)
    model = build_segmenter(backbone, head=head, num_classes=5, head_channels=head_channels).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    for norm in model.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    return model


@pytest.mark.parametrize("size", [(64, 96), (83, 61)])
@pytest.mark.parametrize("head_channels", [None, 3])
@pytest.mark.parametrize("host", ["vit", "mavit"])
def test_labels_and_heat_are_those_of_the_whole(host, head_channels, size, tmp_path):
    model = segmenter(host, head_channels=head_channels)
    image, shape = torch.randn(3, *size), [-(-side // model.pyramid.strides[-1]) for side in size]
    padded = torch.nn.functional.pad(image, [0, 32, 0, 32])[:, : shape[0] * model.pyramid.strides[-1]]
    padded = padded[..., : shape[1] * model.pyramid.strides[-1]]
    with torch.no_grad():
        expected = model.head(model.decoder(model.pyramid(padded[None])))[0]
    files = {"labels": tmp_path / "labels.npy", "heat": tmp_path / "heat.npy"}
    streamed = subquad.stream(model.train(), image, **files, heat_class=3, most_tokens=9)
    assert model.training and streamed.grid.shape == tuple(shape) and not streamed.logits.numel()
    assert np.allclose(np.load(files["heat"]), expected[3], atol=1e-5 * expected.abs().max())
    labels = np.load(files["labels"])
    assert np.array_equal(labels, expected.argmax(dim=0))
    assert np.allclose(streamed.label_shares, np.bincount(labels.flatten(), minlength=5) / labels.size)


def test_what_such_a_segmenter_can_not_tell_is_said(tmp_path):
    model, image = segmenter(), torch.randn(3, 64, 64)
    for reason, asked in {
        "tells the places of an image, not the image: ask for labels, heat or features": {},
        "heat is of one class, and no class is the image's": {"heat": tmp_path / "heat.npy"},
    }.items():
        with pytest.raises(SubquadError, match=reason):
            subquad.stream(model, image, **asked)
    assert not list(tmp_path.iterdir())
    with pytest.raises(SubquadError, match=r"its decoder \(fpn\) are of whole maps.*segmenters with --head linear"):
        subquad.stream(segmenter(head="fpn", head_channels=64), image, labels=tmp_path / "labels.npy")


def test_a_file_of_one_is_streamed_from_the_command_line(tmp_path, capsys):
    save_weights(segmenter(), tmp_path / "segmenter.safetensors", NOTE)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (80, 64, 3), np.uint8)).save(tmp_path / "image.png")
    labels = tmp_path / "labels.png"
    main(["stream", str(tmp_path / "segmenter.safetensors"), str(tmp_path / "image.png"), "--labels", str(labels)])
    said, most = capsys.readouterr().out, np.bincount(np.asarray(Image.open(labels)).flatten()).argmax()
    assert f"{'abcde'[most]}, of the places" in said and f"labels: {labels}" in said
