"""Segmenters from folders that segmentation_models_pytorch's `save_pretrained` wrote: opened, judged, converted."""

import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import subquad
from subquad import SubquadError
from subquad.conversion import converted_layers
from subquad.tasks.segmentation import judge_segmenter, predict_scenes

smp = pytest.importorskip("segmentation_models_pytorch")


def saved(folder, kind="Segformer", encoder="mit_b0", classes=3, **more):
    torch.manual_seed(0)
    model = getattr(smp, kind)(encoder, encoder_weights=None, classes=classes, **more).eval()
    model.save_pretrained(folder)
    return model


def scenes(folder):
    generator = np.random.default_rng(0)
    for part, count in (("training", 4), ("validation", 2)):
        for kind in ("images", "annotations"):
            (folder / kind / part).mkdir(parents=True)
        for number in range(count):
            colours = generator.integers(0, 255, (5, 7, 3), np.uint8).repeat(8, axis=0).repeat(8, axis=1)
            Image.fromarray(colours).save(folder / "images" / part / f"{number}.png")
            labels = generator.integers(1, 4, (40, 56), np.uint8)
            Image.fromarray(labels).save(folder / "annotations" / part / f"{number}.png")
    return folder


@torch.no_grad()
@pytest.mark.parametrize(("kind", "encoder"), [("Segformer", "mit_b0"), ("Unet", "mit_b0"), ("FPN", "tu-pvt_v2_b0")])
def test_a_segmenter_is_opened_as_what_was_saved(kind, encoder, tmp_path):
    model, opened = saved(tmp_path, kind, encoder), subquad.open_trained(tmp_path)
    assert opened.task == "segment" and opened.classes == ("class 0", "class 1", "class 2")
    assert opened.input.crop == (512, 512) and opened.input.mean == timm.data.IMAGENET_DEFAULT_MEAN
    assert subquad.open_trained(tmp_path / "model.safetensors", img_size=(64, 96)).input.crop == (64, 96)
    x = torch.randn(2, 3, 64, 96)
    torch.testing.assert_close(opened.model(x), model(x))
    answers = opened.model.features_and_logits(x)
    torch.testing.assert_close(answers["features"], model.encoder(x)[-1])
    torch.testing.assert_close(answers["logits"], model(x))
    torch.testing.assert_close(opened.image_network().model(x), model.encoder(x)[-1])


@torch.no_grad()
def test_images_of_any_size_are_filled_up_and_answers_cut(tmp_path):
    model, opened = saved(tmp_path), subquad.open_trained(tmp_path)
    x = torch.randn(1, 3, 70, 90)
    filled = torch.nn.functional.pad(x, (0, 6, 0, 26))
    torch.testing.assert_close(opened.model(x), model(filled)[..., :70, :90])
    assert opened.image_network().model(x).shape[-2:] == (3, 3)


@torch.no_grad()
def test_a_score_of_one_class_is_that_of_the_foreground(tmp_path):
    model, opened = saved(tmp_path, classes=1, activation="sigmoid"), subquad.open_trained(tmp_path)
    x = torch.randn(2, 3, 64, 64)
    assert opened.classes == ("background", "foreground") and opened.model.num_classes == 2
    torch.testing.assert_close(opened.model(x).softmax(1)[:, 1:], model(x))


@torch.no_grad()
def test_classes_of_the_whole_image_are_left_out(tmp_path):
    model = saved(tmp_path, "Unet", aux_params={"classes": 4})
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(subquad.open_trained(tmp_path).model(x), model(x)[0])


def test_a_segmenter_is_judged_on_scenes_of_as_many_classes_and_finds_labels(tmp_path):
    saved(tmp_path / "network")
    opened, data = subquad.open_trained(tmp_path / "network"), scenes(tmp_path / "scenes")
    assert judge_segmenter(opened, data=str(data)).count == 2
    (data / "objectInfo150.txt").write_text(
        "Idx\tRatio\tTrain\tVal\tName\n"
        + "".join(f"{k}\t0.3\t1\t1\t{name}\n" for k, name in enumerate(("sky", "road", "tree"), 1))
    )
    # which have names, while the network has none
    assert judge_segmenter(opened, data=str(data)).count == 2
    found = list(predict_scenes(opened, [data / "images" / "validation"], tmp_path / "out"))
    assert [scene.labels.shape for scene in found] == [(40, 56)] * 2


@pytest.mark.slow
def test_a_segmenter_is_converted_and_its_student_opened_alone(tmp_path):
    saved(tmp_path / "teacher")
    fits = {"align_updates": 2, "distil_updates": 2, "batch_size": 2, "img_size": (64, 64)}
    plan = subquad.conversion.Plan(
        str(tmp_path / "teacher"), str(scenes(tmp_path / "scenes")), attention="linear", **fits
    )
    converted = subquad.conversion.convert_run(plan, tmp_path / "run")
    last = converted.steps["distilled"]
    assert converted.record.on_held_out and last.images == 2 and last.measure == "mIoU"
    (tmp_path / "teacher").rename(tmp_path / "gone")
    opened = subquad.open_trained(tmp_path / "run" / "student.safetensors")
    assert type(opened.model).__name__ == "SegmenterOfSmp" and len(converted_layers(opened.model)) == 8
    assert opened.classes == ("class 0", "class 1", "class 2")
    assert opened.model(torch.randn(1, 3, 40, 56)).shape == (1, 3, 40, 56)


def changed(folder, **said):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **said}))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"_model_class": "Unett"}, "unknown network of segmentation_models_pytorch 'Unett'.*Unet"),
        ({"_model_class": "os"}, "unknown network of segmentation_models_pytorch 'os': known: DPT"),
        ({"in_channels": 4}, "a network of 4 channels: commands take images of three colours"),
        ({"encoder_name": "mit_b9"}, "a Segformer can't be made so: .*mit_b9"),
        ({"depth": 3}, "a Segformer can't be made so: .*depth"),
        ({"classes": 5}, "can't load .*"),
    ],
)
def test_what_a_folder_says_wrongly_is_told_in_one_line(said, told, tmp_path):
    saved(tmp_path)
    changed(tmp_path, **said)
    with pytest.raises(SubquadError, match=told) as caught:
        subquad.open_trained(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_or_for_another_task_is_refused(tmp_path):
    saved(tmp_path)
    with pytest.raises(SubquadError, match="segmentation_models_pytorch's, is for the task segment, not for classify"):
        subquad.open_trained(tmp_path, task="classify")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(SubquadError, match=r"holds no model\.safetensors: the save_pretrained"):
        subquad.open_trained(tmp_path)
