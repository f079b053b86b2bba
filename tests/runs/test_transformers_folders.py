"""Folders that transformers' `save_pretrained` wrote, opened, converted and opened again."""

import json
from importlib.metadata import EntryPoint

import huggingface_hub
import numpy as np
import pytest
import torch
from PIL import Image

import subquad
from subquad import SubquadError
from subquad.conversion import converted_layers
from subquad.tasks import TASKS

transformers = pytest.importorskip("transformers", "5.1")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
SWIN = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "image_size": 32, "patch_size": 4}
KINDS = {
    "ViTForImageClassification": ("ViTConfig", SIZES),
    "Dinov2Model": ("Dinov2Config", SIZES),
    "SwinForImageClassification": ("SwinConfig", SWIN),
    "SiglipVisionModel": ("SiglipVisionConfig", SIZES),
}
PICTURES = {
    "image_processor_type": "ViTImageProcessor",
    "do_center_crop": True,
    "crop_size": {"height": 32, "width": 32},
    "size": {"shortest_edge": 40},
    "resample": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.2, 0.3, 0.4],
}


def network(name):
    config, sizes = KINDS[name]
    labels = {"id2label": {0: "cat", 1: "dog", 2: "owl"}, "label2id": {"cat": 0, "dog": 1, "owl": 2}}
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes, **labels))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def saved(folder, name="ViTForImageClassification", pictures=PICTURES):
    model = network(name)
    model.save_pretrained(folder)
    if pictures is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    return model


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_a_folder_is_opened_as_what_was_saved(name, tmp_path):
    model, opened = saved(tmp_path, name), subquad.open_trained(tmp_path)
    assert not opened.model.training and opened.model.num_classes == 3 * name.endswith("Classification")
    assert opened.classes == (("cat", "dog", "owl") if opened.model.num_classes else ())
    assert opened.input.img_size == (32, 32) and opened.input.crop_pct == 0.8 and opened.input.crop_mode == "center"
    assert opened.input.mean == (0.5, 0.4, 0.3) and opened.input.interpolation == "bilinear"
    x = torch.randn(2, 3, 32, 32)
    expected = model(x)
    torch.testing.assert_close(opened.model(x), next(iter(expected.values())))
    answers = opened.model.features_and_logits(x)
    torch.testing.assert_close(answers["features"], model.base_model(x).last_hidden_state)
    larger = subquad.open_trained(tmp_path / "model.safetensors", img_size=(48, 64))
    assert larger.input.img_size == (48, 64)
    assert larger.model(torch.randn(1, 3, 48, 64)).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViTForImageClassification", "Dinov2Model"])
def test_a_folder_is_converted_and_its_student_opened_alone(name, tmp_path):
    saved(tmp_path / "teacher", name)
    generator = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for number in range(8):
        pixels = generator.integers(0, 255, (40, 40, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    plan = subquad.conversion.Plan(
        str(tmp_path / "teacher"),
        str(tmp_path / "photos"),
        attention="linear",
        align_updates=2,
        distil_updates=2,
        batch_size=4,
    )
    # as many classes as ImageNet's, with their names
    if name.endswith("Classification"):
        labels = {str(number): f"a class with a long name, the {number}th of all" for number in range(1000)}
        larger = transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, id2label=labels))
        larger.save_pretrained(tmp_path / "teacher")
    subquad.conversion.convert_run(plan, tmp_path / "run")
    (tmp_path / "teacher").rename(tmp_path / "gone")
    opened = subquad.open_trained(tmp_path / "run" / "student.safetensors")
    assert type(opened.model).__name__ == "NetworkOfTransformers" and len(converted_layers(opened.model)) == 2
    assert opened.input.mean == (0.5, 0.4, 0.3) and opened.input.crop_pct == 0.8
    assert len(opened.classes) == opened.model.num_classes == 1000 * name.endswith("Classification")
    assert opened.model(torch.randn(1, 3, 32, 32)).isfinite().all()


def test_a_configuration_may_say_nothing_of_labels(tmp_path):
    # PVT's makes none up
    stages = {"hidden_sizes": [16, 16, 16, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]}
    model = transformers.PvtForImageClassification(transformers.PvtConfig(**stages, image_size=64, num_labels=7))
    model.eval().save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PICTURES))
    opened, x = subquad.open_trained(tmp_path, img_size=64), torch.randn(1, 3, 64, 64)
    assert opened.classes == () and opened.model.num_classes == 7
    torch.testing.assert_close(opened.model(x), model(x).logits)


def test_an_encoder_may_lack_the_pooler_that_is_not_asked(tmp_path):
    sizes = transformers.ViTConfig(**SIZES)
    model = transformers.ViTModel(sizes, add_pooling_layer=False).eval()
    model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PICTURES))
    opened, again = subquad.open_trained(tmp_path), subquad.open_trained(tmp_path)
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(opened.model(x), model(x).last_hidden_state)
    assert opened.fingerprint == again.fingerprint


def changed(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda at: changed(at, architectures=["ViTForMaskedImageModeling"]),
            "networks of depth and encoders",
        ),
        (
            lambda at: changed(at, architectures=["BertModel"]),
            "networks of depth and encoders",
        ),
        (lambda at: changed(at, architectures=["MyModel"]), r"transformers .* has no network 'MyModel'"),
        (lambda at: changed(at, architectures=None), "does not say which class the network has"),
        (lambda at: changed(at, hidden_size=48), "can't load .*|holds no weights for"),
        (lambda at: changed(at, num_hidden_layers=3), r"holds no weights for .*layers\.2\."),
        (lambda at: (at / "model.safetensors").unlink(), "holds no model.safetensors"),
        (lambda at: (at / "preprocessor_config.json").unlink(), "does not say how images are brought to the network"),
        (lambda at: (at / "model.safetensors").write_bytes(b"no weights"), "is no safetensors file or is cut short"),
    ],
)
def test_a_folder_that_can_not_be_opened_is_said_in_one_line(spoil, message, tmp_path):
    saved(tmp_path)
    spoil(tmp_path)
    with pytest.raises(SubquadError, match=message) as caught:
        subquad.open_trained(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_is_for_no_other_task(tmp_path):
    saved(tmp_path)
    with pytest.raises(SubquadError, match="a network of transformers', is for the task classify, not for segment"):
        subquad.open_trained(tmp_path, task="segment")


def test_a_task_of_a_plug_in_that_can_not_be_had_is_no_hindrance(tmp_path, monkeypatch):
    saved(tmp_path)
    broken = EntryPoint("broken", "nowhere_at_all:Task", "subquad.tasks")
    monkeypatch.setattr(TASKS, "_found", {"broken": [broken]})
    assert subquad.open_trained(tmp_path).task == "classify"
    changed(tmp_path, architectures=["ViTForMaskedImageModeling"])
    with pytest.raises(SubquadError, match="networks of depth and encoders"):
        subquad.open_trained(tmp_path)


def test_code_of_a_folder_is_not_run(tmp_path):
    saved(tmp_path)
    (tmp_path / "own.py").write_text("raise SystemExit('run')")
    changed(tmp_path, auto_map={"AutoModelForImageClassification": "own.Network", "AutoConfig": "own.Config"})
    assert subquad.open_trained(tmp_path).model.num_classes == 3


def test_a_repository_of_the_hub_is_such_a_folder(tmp_path, monkeypatch):
    model, fetched = saved(tmp_path), []

    def fetch(name, file, revision):
        fetched.append((name, file, revision))
        if not (tmp_path / file).is_file():
            raise huggingface_hub.errors.LocalEntryNotFoundError(file)
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    opened, x = subquad.open_trained("hf-hub:them/theirs@main"), torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(opened.model(x), model(x).logits)
    files = ["config.json", "preprocessor_config.json", "model.safetensors"]
    assert fetched == [("them/theirs", file, "main") for file in files]
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(SubquadError, match="does not say how images are brought"):
        subquad.open_trained("hf-hub:them/theirs@main")


@pytest.mark.parametrize(
    ("pictures", "size", "mode", "share", "mean"),
    [
        ({"size": {"height": 24, "width": 48}, "do_normalize": False}, (24, 48), "squash", 1, (0, 0, 0)),
        # what classes of processors do where the file is silent
        ({"size": 32}, (32, 32), "squash", 1, (0.5, 0.5, 0.5)),
        (
            {"image_processor_type": "DeiTImageProcessor", "size": 40, "crop_size": 32},
            (32, 32),
            "squash",
            0.8,
            (0.5,) * 3,
        ),
        ({"image_processor_type": "BitImageProcessor", "size": 256}, (224, 224), "center", 0.875, None),
        (
            {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 32}, "crop_pct": 0.5},
            (32, 32),
            "center",
            0.5,
            (0.5, 0.5, 0.5),
        ),
    ],
)
def test_images_are_brought_as_the_processor_does_it(pictures, size, mode, share, mean, tmp_path):
    saved(tmp_path, pictures=pictures)
    about = subquad.open_trained(tmp_path).input
    assert (about.img_size, about.crop_mode, about.crop_pct) == (size, mode, share)
    assert mean is None or about.mean == mean


@pytest.mark.parametrize(
    "pictures",
    [
        PICTURES | {"rescale_factor": 1 / 127.5},
        PICTURES | {"do_rescale": False},
        PICTURES | {"resample": 4},
        # what changes numbers or sizes without being asked for by name
        {"image_processor_type": "MobileViTImageProcessor", "size": 32, "do_center_crop": False},
        {"image_processor_type": "DPTImageProcessor", "do_pad": True, "size_divisor": 4},
        {"image_processor_type": "DPTImageProcessor", "keep_aspect_ratio": True},
        {"image_processor_type": "DetrImageProcessor", "do_pad": False},
        {"image_processor_type": "SegGptImageProcessor", "do_resize": False},
    ],
)
def test_what_a_processor_does_otherwise_is_refused(pictures, tmp_path):
    saved(tmp_path, pictures=pictures)
    with pytest.raises(SubquadError, match="brings images to the network in another way"):
        subquad.open_trained(tmp_path)


def test_a_processor_of_code_is_refused(tmp_path):
    saved(tmp_path, pictures={"image_processor_type": "Own", "auto_map": {"AutoImageProcessor": "own.Own"}})
    (tmp_path / "own.py").write_text("raise SystemExit('run')")
    with pytest.raises(SubquadError, match=r"can.t read .*custom code"):
        subquad.open_trained(tmp_path)


def depth_anything():
    backbone = transformers.Dinov2Config(
        **{name: size for name, size in SIZES.items() if name != "intermediate_size"},
        out_features=["stage1", "stage2"],
        reshape_hidden_states=False,
    )
    sizes = {"neck_hidden_sizes": [8, 16], "reassemble_factors": [2, 1], "fusion_hidden_size": 8, "head_hidden_size": 4}
    return transformers.DepthAnythingConfig(
        backbone_config=backbone, reassemble_hidden_size=32, patch_size=8, head_in_index=-1, **sizes
    )


def dpt():
    neck = {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8}
    return transformers.DPTConfig(**SIZES | {"num_hidden_layers": 4}, **neck)


@pytest.mark.parametrize(("name", "config"), [("DepthAnything", depth_anything), ("DPT", dpt)])
def test_networks_of_depth_are_opened_and_their_students_fitted_to_depths(name, config, tmp_path):
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForDepthEstimation")(config()).eval()
    model.save_pretrained(tmp_path)
    pictures = {"keep_aspect_ratio": True, "ensure_multiple_of": 8, "size": {"height": 32, "width": 32}}
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "DPTImageProcessor"} | pictures)
    )
    opened, x = subquad.open_trained(tmp_path), torch.randn(2, 3, 32, 32)
    assert (opened.input.img_size, opened.input.crop_mode, opened.model.num_classes) == ((32, 32), "center", 0)
    student = subquad.convert(opened.model, "linear")
    with torch.no_grad():
        torch.testing.assert_close(opened.model(x), model(x).predicted_depth)
        assert student(x).shape == model(x).predicted_depth.shape
    compared = subquad.conversion.compare_networks(student, opened.model, [(x, None)])
    assert compared.images == 2 and compared.error > 0 and compared.agreement is None
    fitted = subquad.conversion.distil(student, lambda update: x, teacher=opened.model, updates=2)
    assert fitted.judged.keys() == {"depth"}


@pytest.mark.long
@pytest.mark.slow
def test_networks_of_depth_are_written_for_images_of_any_size(tmp_path):
    torch.manual_seed(0)
    transformers.DepthAnythingForDepthEstimation(depth_anything()).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PICTURES))
    student = subquad.convert(subquad.open_trained(tmp_path).model, "linear")
    for parameter in student.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    # what it gives is held against the network at a size that was not traced
    written = subquad.export(student, tmp_path / "depth.pt2", format="pt2", img_size=32, dynamic="batch,size")
    assert written.difference < 1e-5 and len(written.shapes) == 2
