"""What is more than a classifier of ours is exported as well: segmenters, and foreign networks with our attention."""

import pytest
import timm
import torch
from hosts import small

import subquad
from subquad.exports import EXPORTERS, export
from subquad.exports.changing_axes import DYNAMIC
from subquad.exports.foreign_forms import forms_of_any_size
from subquad.models.pyramid import Pyramid
from subquad.tasks.segmentation import SEGMENTERS, Segmenter

pytestmark = pytest.mark.slow
ENGINES = ("onnx", "openvino")


def randomised(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def written(model, format, folder, size):
    for package in EXPORTERS[format].needs:
        pytest.importorskip(package)
    return export(model, folder / f"n{EXPORTERS[format].suffix}", format=format, img_size=size, dynamic=DYNAMIC)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("format", ENGINES)
@pytest.mark.parametrize("mechanism", ["agent", "inline", "linear"])
def test_a_converted_dinov2_of_timm_takes_any_size(mechanism, format, tmp_path):
    torch.manual_seed(0)
    sizes = {"embed_dim": 48, "num_heads": 3, "depth": 1, "num_classes": 5}
    # timm itself refuses what is no multiple of a patch, unless it is asked to pad
    model = timm.create_model(
        "vit_small_patch14_dinov2", img_size=70, dynamic_img_size=True, dynamic_img_pad=True, **sizes
    )
    subquad.convert(model, mechanism)
    assert written(randomised(model), format, tmp_path, 70).difference < 1e-5


@pytest.mark.thinned(3)
@pytest.mark.parametrize("format", ("pt2", *ENGINES))
@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3", "eva02_tiny_patch14_224"])
def test_rotations_of_timm_are_of_any_size(name, format, tmp_path):
    model = timm.create_model(
        name, img_size=64, embed_dim=48, num_heads=3, depth=1, dynamic_img_size=True, dynamic_img_pad=True
    )
    subquad.convert(model, "agent")
    assert written(randomised(model), format, tmp_path, 64).difference < 1e-5


@pytest.mark.parametrize("setting", [{}, {"normalize_coords": "min"}, {"grid_indexing": "xy", "grid_offset": 0.25}])
def test_the_rotation_of_dinov3_is_that_of_timm(setting):
    rope = timm.layers.RotaryEmbeddingDinoV3(32, **setting).eval()
    with forms_of_any_size():
        ours = rope.get_embed((5, 7))
    torch.testing.assert_close(ours, rope.get_embed((5, 7)))


def segmenter(host, head, **changes):
    backbone = small(host, "agent", num_classes=0, **changes)
    return randomised(Segmenter(Pyramid(backbone), head=head, num_classes=4, head_channels=64))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("format", ENGINES)
@pytest.mark.parametrize("head", SEGMENTERS)
def test_segmenters_take_any_size(head, format, tmp_path):
    found = written(segmenter("vit", head, depths=(1,), patch_size=16), format, tmp_path, 64)
    assert found.difference < 1e-4 and found.least == 33


@pytest.mark.long
def test_segmenters_of_four_stages_take_any_size(tmp_path):
    found = written(segmenter("pvt", "fpn", depths=(1, 1, 1, 1)), "pt2", tmp_path, 64)
    assert found.difference < 1e-4 and found.least == 33
