"""Every field of every recipe is read when its run is made: what nobody reads changes nothing.

A recipe is watched while its task and trainer are made, and a classifier's while it trains. Fields that are written
down or checked are not read by that; fields that only some settings need are given these.
"""

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
import worlds

from subquad.runs.run_folder import RunFolder
from subquad.tasks import TASKS, make_task
from subquad.tasks.classification import Recipe
from subquad.tasks.common_recipe import CommonRecipe
from subquad.tasks.detection import DetectRecipe
from subquad.tasks.segmentation import SegmentRecipe
from subquad.tasks.sequences import LraRecipe
from subquad.training import train
from subquad.training.engine import make_accelerator
from subquad.training.loop import Trainer

NOT_READING = ("to_dict", "check", "_check", "__post_init__", "__eq__", "__repr__", "replace")
"""Functions that look at fields without doing what they say, by the beginnings of their names."""

SMALL = {"embed_dims": [8, 16, 24, 32], "num_heads": [1, 2, 2, 4], "depths": [1, 1, 1, 1]}
USUAL = {"epochs": 1, "warmup_epochs": 0, "batch_size": 2}


def watched(kind, **fields):
    """A recipe of a kind that remembers which of its fields were read."""
    names, read = {field.name for field in dataclasses.fields(kind)}, set()

    def look(self, name):
        if name in names:
            frame = sys._getframe(1)
            # comprehensions have frames of their own
            while frame.f_code.co_name.startswith("<") and frame.f_back:
                frame = frame.f_back
            if not frame.f_code.co_name.startswith(NOT_READING) and "dataclasses" not in frame.f_code.co_filename:
                read.add(name)
        return object.__getattribute__(self, name)

    made = type(f"Watched{kind.__name__}", (kind,), {"__getattribute__": look})(**fields)
    read.clear()
    return made, names, read


def trainer_of(recipe, folder):
    return Trainer(make_task(recipe), RunFolder(folder), make_accelerator(recipe), None, lambda line: None)


def test_a_classifiers_run_reads_every_field(tmp_path):
    recipe, names, read = watched(
        Recipe,
        **USUAL | {"batch_size": 8},
        img_size=(8, 8),
        patch_size=4,
        embed_dim=16,
        depth=1,
        num_heads=2,
        max_train_images=16,
        mixup=0.5,
        model_ema=True,
        crop_padding=1,
        rotation=5.0,
        clip_grad=1.0,
    )
    train(recipe, tmp_path / "run")
    assert not names - read


@pytest.mark.parametrize("kind", [task.recipe_class for name, task in TASKS.items() if name != "classify"])
def test_a_task_reads_what_is_its_own(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path / "home"))
    made = {
        SegmentRecipe: lambda: {"data": str(worlds.scenes(tmp_path / "a")), "img_size": (32, 32), "settings": SMALL},
        DetectRecipe: lambda: {
            "data": str(worlds.objects(tmp_path / "b")),
            "img_size": (64, 64),
            "short_side": (32,),
            "long_side": 64,
            "head_channels": 16,
            "settings": SMALL,
            "head": "retinanet",
        },
        LraRecipe: lambda: {"data_settings": {"count": 200, "shortest": 5, "longest": 24}, "max_length": 24},
    }
    recipe, names, read = watched(kind, **USUAL, **made[kind]())
    trainer = trainer_of(recipe, tmp_path / "run")
    monkeypatch.setattr(
        f"{type(trainer.task).__module__}.evaluate_segmentation", lambda *_, **__: numbers(), raising=False
    )
    if kind is SegmentRecipe:
        trainer._evaluate()
    # the loop's fields are the same for all tasks, and a classifier has shown that it reads them
    common = {field.name for field in dataclasses.fields(CommonRecipe)}
    own = {name for name in names if name not in common or name in kind.__annotations__}
    assert not own - read


def numbers():
    return SimpleNamespace(miou=1.0, accuracy=1.0, class_accuracy=torch.tensor(1.0).item())
