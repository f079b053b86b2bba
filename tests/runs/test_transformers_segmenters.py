"""Semantic segmenters from folders that transformers' `save_pretrained` wrote: opened, judged, converted."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

import subquad
from subquad import SubquadError
from subquad.conversion import converted_layers
from subquad.tasks.segmentation import judge_segmenter, predict_scenes

transformers = pytest.importorskip("transformers", "5.1")

PLAIN = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
LABELS = {"id2label": {0: "sky", 1: "road", 2: "tree"}, "label2id": {"sky": 0, "road": 1, "tree": 2}}
PICTURES = {
    "image_processor_type": "SegformerImageProcessor",
    "size": {"height": 32, "width": 48},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.2, 0.3, 0.4],
}


def segformer():
    sizes = {"hidden_sizes": [16, 32], "depths": [1, 1], "sr_ratios": [2, 1], "num_attention_heads": [1, 2]}
    more = {"num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]}
    return transformers.SegformerConfig(**sizes, **more, decoder_hidden_size=16, **LABELS)


def beit():
    sizes = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "use_auxiliary_head": False}
    return transformers.BeitConfig(**PLAIN | {"patch_size": 4}, **sizes, use_relative_position_bias=True, **LABELS)


def upernet():
    sizes = {"embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 2, "image_size": 64}
    backbone = transformers.SwinConfig(**sizes, out_features=["stage1", "stage2", "stage3", "stage4"])
    return transformers.UperNetConfig(backbone_config=backbone, hidden_size=16, use_auxiliary_head=False, **LABELS)


def dpt():
    neck = {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8}
    return transformers.DPTConfig(**PLAIN, num_hidden_layers=4, **neck, use_auxiliary_head=False, **LABELS)


KINDS = {
    "DPTForSemanticSegmentation": dpt,
    "SegformerForSemanticSegmentation": segformer,
    "BeitForSemanticSegmentation": beit,
    "UperNetForSemanticSegmentation": upernet,
}


def saved(folder, name="SegformerForSemanticSegmentation", pictures=PICTURES):
    torch.manual_seed(0)
    model = getattr(transformers, name)(KINDS[name]()).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    return model


def photos(folder, count=8):
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number in range(count):
        # patches of colours, which a network tells apart
        colours = generator.integers(0, 255, (5, 7, 3), np.uint8)
        Image.fromarray(colours.repeat(8, axis=0).repeat(8, axis=1)).save(folder / f"{number}.png")
    return folder


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_a_segmenter_is_opened_as_what_was_saved(name, tmp_path):
    model, opened = saved(tmp_path, name), subquad.open_trained(tmp_path)
    assert opened.task == "segment" and opened.classes == ("sky", "road", "tree") and not opened.model.training
    x = torch.randn(2, 3, 32, 32)
    logits = model(x).logits
    torch.testing.assert_close(opened.model(x), interpolate(logits, size=(32, 32), mode="bilinear"))
    answers = opened.model.features_and_logits(x)
    torch.testing.assert_close(answers["logits"], logits)
    assert ("features" in answers) == (name != "UperNetForSemanticSegmentation")
    looked_at = opened.image_network()
    assert looked_at.input.img_size == (32, 48) and looked_at.model(x).isfinite().all()


def test_pictures_are_segmented_as_the_processor_and_the_network_do_it(tmp_path):
    model, folder = saved(tmp_path / "network"), photos(tmp_path / "photos", 2)
    # no class is always the likeliest
    bias = model.decode_head.classifier.bias
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "network")
    with torch.no_grad():
        bias -= model(**processor(Image.open(folder / "0.png"), return_tensors="pt")).logits.mean((0, 2, 3))
    model.save_pretrained(tmp_path / "network")
    opened = subquad.open_trained(tmp_path / "network")
    found = predict_scenes(opened, [folder], tmp_path / "out")
    for scene in found:
        picture = Image.open(scene.path)
        with torch.no_grad():
            answer = model(**processor(picture, return_tensors="pt"))
        # to the pixels that it saw, and from there to those of the picture
        logits = interpolate(answer.logits, size=(32, 48), mode="bilinear")
        expected = interpolate(logits, size=picture.size[::-1], mode="bilinear").argmax(1)[0].numpy()
        assert len(np.unique(expected)) > 1 and (scene.labels == expected).mean() > 0.99


@pytest.mark.slow
def test_a_segmenter_is_converted_and_its_student_opened_alone(tmp_path):
    saved(tmp_path / "teacher")
    scenes = photos(tmp_path / "scenes" / "images" / "training").parents[1]
    photos(scenes / "images" / "validation", 3)
    for part in ("training", "validation"):
        (scenes / "annotations" / part).mkdir(parents=True)
        for file in (scenes / "images" / part).iterdir():
            labels = np.random.default_rng(0).integers(1, 4, (40, 56), np.uint8)
            Image.fromarray(labels).save(scenes / "annotations" / part / file.name)
    plan = subquad.conversion.Plan(
        str(tmp_path / "teacher"),
        str(scenes),
        attention="linear",
        align_updates=2,
        distil_updates=2,
        batch_size=4,
    )
    converted = subquad.conversion.convert_run(plan, tmp_path / "run")
    # on the held-out scenes, which it is not fitted to
    last = converted.steps["distilled"]
    assert converted.record.on_held_out and last.images == 3 and last.measure == "mIoU" and 0 < last.teacher_score < 1
    (tmp_path / "teacher").rename(tmp_path / "gone")
    opened = subquad.open_trained(tmp_path / "run" / "student.safetensors")
    assert type(opened.model).__name__ == "SegmenterOfTransformers" and len(converted_layers(opened.model)) == 2
    assert opened.task == "segment" and opened.input.size == (32, 48) and opened.classes == ("sky", "road", "tree")
    assert opened.model(torch.randn(1, 3, 48, 32)).shape == (1, 3, 48, 32)
    # at another size it is as whole: what is exported of it tells classes of pixels
    other = subquad.open_trained(tmp_path / "run", img_size=(64, 64))
    assert other.task == "segment" and other.model(torch.randn(1, 3, 64, 64)).shape == (1, 3, 64, 64)


def test_classes_without_names_are_numbered_and_another_size_is_taken(tmp_path):
    config = segformer()
    config.id2label = {number: f"LABEL_{number}" for number in range(3)}
    transformers.SegformerForSemanticSegmentation(config).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PICTURES | {"size": {"shortest_edge": 40}}))
    opened = subquad.open_trained(tmp_path, img_size=(64, 96))
    assert opened.classes == ("class 0", "class 1", "class 2")
    assert (opened.input.size, opened.input.short_side, opened.input.crop) == (None, 64, (64, 96))


def test_segmenters_whose_pictures_are_cropped_are_refused(tmp_path):
    crop = {"do_center_crop": True, "crop_size": {"height": 32, "width": 32}, "size": {"height": 40, "width": 40}}
    saved(tmp_path, pictures={"image_processor_type": "BeitImageProcessor"} | crop)
    with pytest.raises(SubquadError, match="images are cropped for it, so that pixels outside would have no class"):
        subquad.open_trained(tmp_path)


def test_scenes_whose_classes_have_other_names_say_what_to_do(tmp_path):
    saved(tmp_path / "network")
    scenes = photos(tmp_path / "scenes" / "images" / "validation", 1).parents[1]
    (scenes / "annotations" / "validation").mkdir(parents=True)
    Image.fromarray(np.ones((40, 56), np.uint8)).save(scenes / "annotations" / "validation" / "0.png")
    names = scenes / "objectInfo3.txt"
    names.write_text("1\tsky, heaven\n2\tstreet\n3\ttree\n")
    opened = subquad.open_trained(tmp_path / "network")
    with pytest.raises(SubquadError, match=r"they differ: road, street \(if they are the same .*take objectInfo"):
        judge_segmenter(opened, data=str(scenes))
    names.write_text("1\troad\n2\tsky\n3\ttree\n")
    with pytest.raises(SubquadError, match=r"they differ: another order$"):
        judge_segmenter(opened, data=str(scenes))
    names.unlink()
    assert judge_segmenter(opened, data=str(scenes)).count == 1
