"""Segmenters and detectors say why an image can't be streamed through them; their backbones can be, for features."""

import numpy as np
import pytest
import torch
from hosts import small

import subquad
from subquad import SubquadError
from subquad.tasks.detection.detectors import build_detector
from subquad.tasks.segmentation.segmenters import build_segmenter

DENSE = {
    "segmenter": lambda creation: build_segmenter(creation, head="fpn", num_classes=3, head_channels=64),
    "detector": lambda creation: build_detector(
        creation, head="retinanet", num_classes=2, head_channels=16, short_side=[64], long_side=128
    ),
}


@pytest.mark.parametrize("host", ["vit", "pvt"])
@pytest.mark.parametrize("kind", DENSE)
def test_the_whole_is_refused_and_the_backbone_streams(kind, host, tmp_path):
    model = DENSE[kind](small(host, "linear", num_classes=0).creation).eval()
    image = torch.randn(3, 96, 64)
    with pytest.raises(SubquadError, match=r"can't be streamed: .* model.pyramid.backbone") as refusal:
        subquad.stream(model, image)
    assert "\n" not in str(refusal.value)
    backbone, file = model.pyramid.backbone, tmp_path / "features.npy"
    with torch.no_grad():
        expected = backbone.forward_features(image[None])[0]
    streamed = subquad.stream(backbone, image, features=file, most_tokens=20)
    assert not streamed.has_head and not len(streamed.logits)
    shape = np.load(file).shape
    assert np.allclose(np.load(file), expected[-shape[0] * shape[1] :].reshape(shape), atol=1e-4)
    with pytest.raises(SubquadError, match="global_pool=''"):
        subquad.stream(backbone, image)
