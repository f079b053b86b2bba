"""Networks that are looked into: the size they look at, and what timm's are told."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch import nn

import subquad
from subquad.errors import SubquadError
from subquad.runs import open_trained
from subquad.tasks.detection.trained_detector import TrainedDetector
from subquad.tasks.segmentation.scene_transforms import SceneInput
from subquad.tasks.segmentation.trained_segmenter import TrainedSegmenter

NORM = {"mean": (0.5,) * 3, "std": (0.5,) * 3}


def dense(task):
    """A trained network whose backbone is made for images of 800×300 px."""
    pyramid = nn.Identity()
    pyramid.backbone = SimpleNamespace(img_size=(800, 300))
    known = (task, SimpleNamespace(pyramid=pyramid, **NORM), ("a",), "data", None, torch.device("cpu"))
    return (
        TrainedDetector(*known)
        if task == "detect"
        else TrainedSegmenter(*known, SceneInput((32, 48), None, **NORM), False)
    )


@pytest.mark.parametrize(("task", "own"), [("segment", (32, 48)), ("detect", (512, 300))])
def test_backbones_are_looked_into_at_the_size_that_is_asked_for(task, own):
    looked_at = dense(task).image_network()
    assert looked_at.input.img_size == own and looked_at.input.mean == NORM["mean"]
    # what it was trained on has no classes of whole images
    assert looked_at.classes == () and looked_at.data is None
    assert dense(task).image_network(64).input.img_size == (64, 64)
    assert dense(task).image_network((64, 32)).input.img_size == (64, 32)


def test_a_network_of_timm_has_as_many_classes_as_the_file(tmp_path):
    import timm

    made = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32, depth=1)
    asked = {}
    torch.save(made.state_dict(), tmp_path / "a.pth")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timm, "create_model", lambda name, **settings: asked.update(settings) or made)
        opened = open_trained(f"timm/vit_tiny_patch16_224={tmp_path / 'a.pth'}", img_size=32)
    any_size = {"dynamic_img_size": True, "dynamic_img_pad": True}
    assert asked == {"pretrained": False, "img_size": 32, "num_classes": 3, **any_size}
    assert opened.input.img_size == (32, 32) and not opened.model.training


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet10t"])
def test_a_network_of_timm_takes_images_of_any_size_where_it_can(name, tmp_path):
    import timm

    made = timm.create_model(name, num_classes=3).eval()
    torch.save(made.state_dict(), tmp_path / "a.pth")
    model = open_trained(f"timm/{name}={tmp_path / 'a.pth'}", device="cpu").model
    with torch.no_grad():
        x = torch.rand(1, 3, 224, 224)
        assert torch.equal(model(x), made(x))
        assert model(torch.rand(1, 3, 100, 70)).isfinite().all()


def test_weights_of_a_network_of_timm_are_brought_to_another_size_as_timm_does(tmp_path):
    import timm

    made = timm.create_model("vit_tiny_patch16_224", num_classes=3).eval()
    torch.save(made.state_dict(), tmp_path / "a.pth")
    opened = open_trained(f"timm/vit_tiny_patch16_224={tmp_path / 'a.pth'}", img_size=96, device="cpu")
    x = torch.rand(1, 3, 96, 96)
    made.set_input_size(96)
    with torch.no_grad():
        torch.testing.assert_close(opened.model(x), made(x))
    # what can't be brought there is said in the file's own terms
    torch.save(timm.create_model("vit_small_patch16_224", num_classes=3).state_dict(), tmp_path / "b.pth")
    with pytest.raises(SubquadError, match="of another shape"):
        open_trained(f"timm/vit_tiny_patch16_224={tmp_path / 'b.pth'}", img_size=96)


@pytest.mark.parametrize("what", ["predict", "evaluate"])
def test_features_are_not_taken_for_classes(what, tmp_path):
    import timm

    image = tmp_path / "a.png"
    Image.new("RGB", (40, 30)).save(image)
    torch.save(timm.create_model("vit_tiny_patch16_224", num_classes=0).state_dict(), tmp_path / "a.pth")
    source = f"timm/vit_tiny_patch16_224={tmp_path / 'a.pth'}"
    with pytest.raises(SubquadError, match="has features and no classes"):
        subquad.predict(source, [image]) if what == "predict" else subquad.evaluate(source, data="digits")
