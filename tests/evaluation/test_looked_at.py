"""Networks that are looked into: the size they look at, and what timm's are told."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from subquad.runs import opening


@pytest.mark.parametrize(("task", "own"), [("segment", (32, 48)), ("detect", (512, 300))])
def test_backbones_are_looked_into_at_the_size_that_is_asked_for(task, own, monkeypatch):
    norm = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    note = {"mean": [0.5] * 3, "std": [0.5] * 3, "crop": [32, 48], "short_side": None}
    pyramid = nn.Identity()
    pyramid.backbone = SimpleNamespace(img_size=(800, 300))
    network = SimpleNamespace(pyramid=pyramid, creation=norm)
    monkeypatch.setattr(networks_to_analyze, "_task_of", lambda source: task)
    monkeypatch.setattr(networks_to_analyze, "restore_dense", lambda *_: (network, {"input": note}))
    assert opening.open_trained("run").input.img_size == own
    assert opening.open_trained("run", img_size=64).input.img_size == (64, 64)


def test_a_network_of_timm_has_as_many_classes_as_the_file(tmp_path):
    import timm

    from subquad.runs.timm_classifiers import load_timm

    made = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32, depth=1)
    asked = {}
    torch.save(made.state_dict(), tmp_path / "a.pth")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timm, "create_model", lambda name, **settings: asked.update(settings) or made)
        load_timm(f"vit_tiny_patch16_224={tmp_path / 'a.pth'}", img_size=32)
    assert asked == {"pretrained": False, "img_size": 32, "num_classes": 3}
