"""Folders that timm saved are opened as run folders are, and what is wrong with them is said in one line."""

import json
from itertools import product
from types import SimpleNamespace

import pytest
import timm
import torch
from PIL import Image
from timm.models import save_for_hf
from torch.testing import assert_close

from subquad.cli import main
from subquad.conversion import Plan, convert_run
from subquad.errors import SubquadError
from subquad.runs import open_trained
from subquad.tasks.classification.trained_classifier import images_of

SIZES = {"img_size": 32, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
CLASSES = ("cat", "dog", "owl")


@pytest.fixture
def saved(tmp_path):
    """A network of timm's with sizes of its own, saved by timm, and its folder."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=len(CLASSES), **SIZES).eval()
    save_for_hf(
        model,
        str(tmp_path / "mine"),
        model_config={"num_classes": len(CLASSES), "label_names": list(CLASSES)},
        model_args=SIZES,
        safe_serialization=True,
    )
    return model, tmp_path / "mine"


def edit(folder, **changed):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))


@pytest.mark.parametrize("called", ["{}", "{}/model.safetensors", "local-dir:{}"])
def test_a_folder_of_timms_is_opened_with_its_sizes_and_classes(saved, called):
    model, folder = saved
    opened = open_trained(called.format(folder), device="cpu")
    images = torch.randn(2, 3, 32, 32)
    assert_close(opened.model(images), model(images))
    assert opened.classes == CLASSES
    # at another size it is what timm makes of it
    assert open_trained(folder, img_size=64, device="cpu").model(torch.randn(1, 3, 64, 64)).shape == (1, 3)


def test_a_network_of_any_size_takes_images_of_the_size_that_its_folder_makes_it_for(tmp_path):
    # of such networks timm notes the size of its own weights beside
    sizes = SIZES | {"img_size": (32, 48), "dynamic_img_size": True}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **sizes)
    save_for_hf(model, str(tmp_path), model_args=sizes, safe_serialization=True)
    assert json.loads((tmp_path / "config.json").read_text())["pretrained_cfg"]["input_size"] == [3, 224, 224]
    assert open_trained(tmp_path, device="cpu").input.img_size == (32, 48)
    assert open_trained(tmp_path, img_size=64, device="cpu").input.img_size == (64, 64)


@pytest.mark.parametrize("size", [(48, 32), (64, 32), (64, 64)])
def test_positions_are_moved_from_the_map_that_the_folder_says(size, tmp_path):
    sizes = SIZES | {"img_size": (32, 48)}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **sizes)
    save_for_hf(model, str(tmp_path), model_args=sizes, safe_serialization=True)
    opened = open_trained(tmp_path, img_size=size, device="cpu")
    model.set_input_size(size)
    images = torch.randn(2, 3, *size)
    assert_close(opened.model(images), model.eval()(images))


def test_a_student_is_judged_on_held_out_images_of_its_teachers_classes_and_opened_again(saved, tmp_path, capsys):
    model, folder = saved
    for place, (split, name) in enumerate(product(("train", "validation"), CLASSES)):
        (tmp_path / "photos" / split / name).mkdir(parents=True)
        for shade in range(2):
            Image.new("RGB", (36, 32), (40 * place, 90 * shade, 9)).save(
                tmp_path / "photos" / split / name / f"{shade}.png"
            )
    plan = Plan(str(folder), str(tmp_path / "photos"), attention="softmax", align_updates=0, distil_updates=0)
    done = convert_run(plan, tmp_path / "out")
    # with the same attention nothing is lost, so that the teacher has what timm's own network has
    assert (done.steps["swapped"].measure, done.steps["swapped"].images) == ("top-1", 6)
    opened = open_trained(tmp_path / "out", device="cpu")
    images = torch.randn(2, 3, 32, 32)
    assert_close(opened.model(images), model(images), rtol=1e-5, atol=1e-6)
    assert opened.classes == CLASSES
    assert main(["eval", str(tmp_path / "out"), "--data", str(tmp_path / "photos")]) == 0
    assert "6 images: top-1" in capsys.readouterr().out


def test_weights_that_pickle_holds_are_read_without_running_code(saved):
    model, folder = saved
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    images = torch.randn(2, 3, 32, 32)
    assert_close(open_trained(folder, device="cpu").model(images), model(images))


def test_what_is_wrong_is_said_in_one_line(saved):
    _, folder = saved
    with pytest.raises(SubquadError, match="a network of timm's, is for the task classify, not for segment"):
        open_trained(folder, task="segment")
    edit(folder, architecture="vit_of_nobody")
    with pytest.raises(SubquadError, match="vit_of_nobody"):
        open_trained(folder)
    edit(folder, architecture="vit_tiny_patch16_224", model_args={**SIZES, "depth": 3})
    with pytest.raises(SubquadError, match=r"can't load .*mine: .*blocks\.2"):
        open_trained(folder)
    edit(folder, model_args={"wings": 2})
    with pytest.raises(SubquadError, match=r"can't load .*wings"):
        open_trained(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(SubquadError, match="holds no weights"):
        open_trained(folder)


@pytest.mark.parametrize("names", [{"0": "cat", "1": "dog", "2": "owl"}, ["cat", "dog"], None])
def test_classes_are_known_where_all_of_them_are_named(saved, names):
    _, folder = saved
    edit(folder, label_names=names)
    assert open_trained(folder, device="cpu").classes == (CLASSES if isinstance(names, dict) else ())


@pytest.mark.parametrize("size", [{"img_size": 32}, {"img_size": None, "input_size": [3, 32, 32]}])
def test_what_timms_training_script_wrote_beside_its_weights_is_heard(tmp_path, size):
    torch.manual_seed(0)
    kwargs = {"embed_dim": 32, "depth": 2, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32, **kwargs).eval()
    torch.save({"state_dict": model.state_dict(), "args": SimpleNamespace(lr=1)}, tmp_path / "model_best.pth.tar")
    args = {"model": "vit_tiny_patch16_224", "mean": [0.1, 0.2, 0.3], "std": [0.5, 0.5, 0.5], "crop_pct": 0.9}
    args |= {"interpolation": "random", "model_kwargs": kwargs, **size}
    (tmp_path / "args.yaml").write_text(json.dumps(args))
    source = f"timm/vit_tiny_patch16_224={tmp_path / 'model_best.pth.tar'}"
    opened, x = open_trained(source, device="cpu"), torch.randn(2, 3, 32, 32)
    assert opened.input.mean == (0.1, 0.2, 0.3) and opened.input.std == (0.5, 0.5, 0.5)
    assert opened.input.img_size == (32, 32) and opened.input.crop_pct == 0.9
    assert opened.input.interpolation == "bicubic"
    assert_close(opened.model(x), model(x))
    # of another network it says nothing
    (tmp_path / "args.yaml").write_text(json.dumps(args | {"model": "resnet50"}))
    with pytest.raises(SubquadError, match="can't load"):
        open_trained(source, device="cpu")


def pictures_of(folder, names):
    """Folders of one picture each, of a colour of its own."""
    for place, name in enumerate(names):
        (folder / "val" / name).mkdir(parents=True)
        Image.new("RGB", (32, 32), (20 * place, 0, 255 - 20 * place)).save(folder / "val" / name / "0.png")
    return folder


def of_classes(count, tmp_path, **config):
    """The folder of a network that tells so many classes apart."""
    model = timm.create_model("vit_tiny_patch16_224", num_classes=count, **SIZES).eval()
    about = {"num_classes": count, **config}
    save_for_hf(model, str(tmp_path / "it"), model_config=about, model_args=SIZES, safe_serialization=True)
    return tmp_path / "it"


def labels_of(source, data):
    return images_of(open_trained(source, device="cpu"), data=str(data)).labels


def test_data_of_other_classes_than_a_network_without_names_tells_apart_are_refused(tmp_path):
    data = pictures_of(tmp_path / "data", ["a", "b", "c"])
    assert labels_of(of_classes(3, tmp_path), data) == [0, 1, 2]
    with pytest.raises(SubquadError, match="has 3 classes, and the model tells 12 apart and has no names for them"):
        labels_of(of_classes(12, tmp_path), data)


def test_a_network_of_imagenets_classes_knows_them_by_their_folders_whoever_names_none(tmp_path):
    data = pictures_of(tmp_path / "data", ["n01440764", "n02102040", "n03000684"])
    assert labels_of(of_classes(1000, tmp_path), data) == [0, 217, 491]
    with pytest.raises(SubquadError, match="has a class a, which is no class of ImageNet"):
        labels_of(of_classes(1000, tmp_path), pictures_of(tmp_path / "others", ["a", "b"]))


def test_classes_are_found_by_their_names_in_any_order(tmp_path):
    data = pictures_of(tmp_path / "data", ["cat", "dog", "owl"])
    assert labels_of(of_classes(3, tmp_path, label_names=["owl", "cat", "dog"]), data) == [1, 2, 0]


def test_folders_that_libraries_order_otherwise_are_said_where_a_network_has_no_names(tmp_path):
    data = pictures_of(tmp_path / "data", [str(number) for number in range(1, 11)])
    with pytest.warns(UserWarning, match="in the order 1, 2, 3, …; where .* theirs was 1, 10, 2, …: let its label_"):
        assert labels_of(of_classes(10, tmp_path), data) == list(range(10))
