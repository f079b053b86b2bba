"""What predict writes: each image in a place of its own, no image lost, and an error where nothing could be read."""

import os

import numpy as np
import pytest
import torch
import worlds
from PIL import Image
from torch import nn

from subquad.cli import main
from subquad.data import InputConfig
from subquad.tasks import ImageNetwork
from subquad.tasks.detection.trained_detector import TrainedDetector
from subquad.tasks.segmentation.scene_transforms import SceneInput
from subquad.tasks.segmentation.trained_segmenter import TrainedSegmenter

CLASSES = ("red", "green", "blue")


class Colours(nn.Module):
    """Finds red, green and blue; `answer` stands for damaged weights."""

    has_masks = False

    def __init__(self, task, answer=1.0):
        super().__init__()
        self.task, self.answer = task, answer

    def forward(self, images):
        if self.task == "detect":
            box = self.answer * torch.tensor([[0.0, 0.0, 4.0, 4.0]])
            return [{"boxes": box, "labels": torch.ones(1).long(), "scores": torch.ones(1)} for _ in images]
        return self.answer * (images.mean((2, 3)) if self.task == "classify" else images)


def trained(task, answer=1.0):
    model, device = Colours(task, answer), torch.device("cpu")
    if task == "segment":
        given = SceneInput((8, 8), None, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
        return TrainedSegmenter(task, model, CLASSES, "none", None, device, given, False)
    if task == "detect":
        return TrainedDetector(task, model, CLASSES, "none", None, device)
    return ImageNetwork(task, model, CLASSES, None, None, device, InputConfig((8, 8)))


WRITING = ("segment", "detect")


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Run predict of a task with a network that stands for a trained one; its status and what it said."""

    def run(task, *images, answer=1.0, output=tmp_path / "out", more=()):
        monkeypatch.setattr("subquad.runs.open_trained", lambda *_, **__: trained(task, answer))
        monkeypatch.chdir(tmp_path)
        words = ["predict"] if task == "classify" else [task, "predict"]
        own = [] if task == "classify" else ["--output", str(output)]
        status = main([*words, *map(str, images), "--checkpoint", "run", *own, *more])
        return status, capsys.readouterr()

    return run


def write(path, colour="red"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), colour).save(path)
    return path


def written(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("task", WRITING)
def test_images_of_one_name_in_two_folders_are_both_kept(task, command, tmp_path):
    write(tmp_path / "in/a/x.png", "red")
    write(tmp_path / "in/b/x.jpg", "blue")
    assert command(task, tmp_path / "in")[0] == 0
    endings = (".png", "-overlay.png") if task == "segment" else ("-objects.png",)
    assert written(tmp_path / "out") == sorted(f"{folder}/x{ending}" for folder in "ab" for ending in endings)
    if task == "segment":
        assert [int(np.asarray(Image.open(tmp_path / f"out/{k}/x.png"))[0, 0]) for k in "ab"] == [1, 3]


@pytest.mark.parametrize("task", WRITING)
@pytest.mark.parametrize("names", [("a/x.png", "b/x.jpg"), ("x.png", "x.jpg")])
def test_images_that_would_be_written_to_one_file_are_refused(task, names, command, tmp_path):
    images = [write(tmp_path / name) for name in names]
    status, said = command(task, *images)
    assert status == 2 and "would both be written to" in said.err and not (tmp_path / "out").exists()
    assert all(str(image) in said.err for image in images) and said.err.count("\n") == 1


def test_a_map_is_not_written_over_an_overlay(command, tmp_path):
    write(tmp_path / "in/x.png")
    write(tmp_path / "in/x-overlay.png")
    status, said = command("segment", tmp_path / "in")
    assert status == 2 and "x-overlay.png" in said.err


@pytest.mark.parametrize("task", WRITING)
def test_images_are_not_written_over(task, command, tmp_path):
    image = write(tmp_path / "in/x.png")
    write(tmp_path / "in/x-objects.png")
    before = image.read_bytes()
    status, said = command(task, tmp_path / "in", output=tmp_path / "in")
    assert status == 2 and "is one of the images: name another --output" in said.err
    assert image.read_bytes() == before and len(written(tmp_path / "in")) == 2


@pytest.mark.parametrize(
    ("image", "more"),
    [
        ("in/a.png", ("--grid", "in/a.png")),
        ("in", ("--grid", "out/../in/a.png")),
        ("link", ("--grid", "in/a.png")),
        (".", ()),
    ],
)
def test_the_picture_grid_is_not_written_over_an_image(image, more, command, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    write(tmp_path / "in" / "a.png")
    write(tmp_path / "predictions.png")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    before = (tmp_path / "in" / "a.png").read_bytes(), (tmp_path / "predictions.png").read_bytes()
    monkeypatch.setattr(Colours, "forward", lambda *_: pytest.fail("it has begun"))
    status, said = command("classify", image, more=more)
    assert status == 2 and "is one of the images: name another --grid" in said.err and said.err.count("\n") == 1
    assert before == ((tmp_path / "in" / "a.png").read_bytes(), (tmp_path / "predictions.png").read_bytes())


@pytest.mark.parametrize("name", ["grid.xyz", "grid"])
def test_a_picture_grid_of_no_known_kind_is_refused_in_front_of_the_work(name, command, tmp_path, monkeypatch):
    write(tmp_path / "in" / "a.png")
    monkeypatch.setattr(Colours, "forward", lambda *_: pytest.fail("it has begun"))
    status, said = command("classify", "in/a.png", more=("--grid", name))
    assert status == 2 and "its name must end in one of" in said.err and said.err.count("\n") == 1


@pytest.mark.parametrize("task", WRITING)
def test_what_was_written_is_not_looked_at(task, command, tmp_path):
    write(tmp_path / "in/x.png")
    for _ in range(2):
        assert command(task, tmp_path / "in", output=tmp_path / "in/out")[0] == 0
    assert len(written(tmp_path / "in/out")) == (2 if task == "segment" else 1)


@pytest.mark.parametrize("task", WRITING)
def test_an_image_that_is_named_twice_is_looked_at_once(task, command, tmp_path):
    image = write(tmp_path / "in/x.png")
    status, said = command(task, image, tmp_path / "in")
    assert status == 0 and said.out.count(str(image)) == 1


@pytest.mark.parametrize("task", ("classify", *WRITING))
def test_nothing_readable_is_an_error(task, command, tmp_path):
    for name in ("x", "y"):
        write(tmp_path / f"in/{name}.png").write_bytes(b"no image")
    status, said = command(task, tmp_path / "in")
    assert status == 2 and said.err == f"subquad: none of 2 images can be read, the first is {tmp_path}/in/x.png\n"
    assert said.out.count("skipped broken image") == 2 and not (tmp_path / "out").exists()
    for wrong in (tmp_path / "nowhere.png", tmp_path / ("x" * 300), tmp_path / "in/x.png/y.png"):
        status, said = command(task, wrong)
        assert status == 2 and said.err.count("\n") == 1 and said.err.startswith("subquad: there is no ")


@pytest.mark.parametrize("task", ("classify", *WRITING))
def test_broken_images_are_named_and_counted(task, command, tmp_path):
    for name in ("w", "x", "y", "z"):
        write(tmp_path / f"in/{name}.png")
    for name in ("x", "z"):
        (tmp_path / f"in/{name}.png").write_bytes(b"no image")
    status, said = command(task, tmp_path / "in")
    assert status == 0 and "skipped 2 of 4 images, which are broken" in said.out
    assert all(f"skipped broken image {tmp_path}/in/{name}.png: it is no picture" in said.out for name in ("x", "z"))
    assert command(task, tmp_path / "in", more=["--strict"])[0] == 2


@pytest.mark.parametrize("task", ("classify", *WRITING))
@pytest.mark.parametrize("answer", [float("nan"), float("inf")])
def test_a_network_that_answers_no_numbers_is_an_error(task, answer, command, tmp_path):
    status, said = command(task, write(tmp_path / "x.png", "white"), answer=answer)
    assert status == 2 and "is not finite: its weights are damaged" in said.err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("task", WRITING)
def test_names_that_are_too_long_and_folders_that_are_none_are_said(task, command, tmp_path):
    status, said = command(task, write(tmp_path / f"{'x' * 240}.png"))
    assert status == 2 and "is too long to write" in said.err
    (tmp_path / "file").write_text("")
    status, said = command(task, write(tmp_path / "x.png"), output=tmp_path / "file/below")
    assert status == 2 and f"{tmp_path}/file" in said.err and said.err.count("\n") == 1


@pytest.mark.parametrize("task", ("classify", *WRITING))
def test_names_that_are_no_utf8_are_read_and_shown(task, command, tmp_path):
    write(tmp_path / "in/x.png").rename(tmp_path / "in" / os.fsdecode(b"\xff.png"))
    status, said = command(task, tmp_path / "in")
    assert status == 0 and "/in/\\udcff.png: " in said.out


SMALL = ["--model", "pvt_tiny", "--epochs", "1", "--warmup-epochs", "0", "--batch-size", "2", "--lr", "1e-3"]
SETTINGS = "settings: {embed_dims: [8, 16, 24, 32], num_heads: [1, 2, 2, 4], depths: [1, 1, 1, 1]}\n"
COMMANDS = {
    "classify": (["train", "--img-size", "32"], "a/{}.png"),
    "segment": (["segment", "train", "--img-size", "32"], "{}.png"),
    "detect": (["detect", "train", "--img-size", "64", "--short-side", "48", "--head-channels", "16"], "{:06}.png"),
}


def broken_data(task, folder, split):
    """Data of a task whose images of a split are all broken; the first of them."""
    if task == "classify":
        for part in ("train", "val"):
            for name in "ab":
                for k in range(3):
                    write(folder / part / name / f"{k}.png")
        place = folder / split
    elif task == "segment":
        worlds.scenes(folder)
        place = folder / "images" / {"train": "training", "val": "validation"}[split]
    else:
        worlds.objects(folder)
        place = folder / f"{split}2017"
    for path in place.rglob("*.png"):
        path.write_bytes(b"no image")
    return sorted(place.rglob("*.png"))[0]


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("task", COMMANDS)
def test_training_on_nothing_but_broken_images_ends_in_one_line(task, split, tmp_path, capsys):
    first = broken_data(task, tmp_path / "data", split)
    (tmp_path / "small.yaml").write_text(SETTINGS)
    words = COMMANDS[task][0]
    places = ["--config", str(tmp_path / "small.yaml"), "--data", str(tmp_path / "data")]
    assert main([*words, *SMALL, *places, "--output", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("subquad: all ") and f"are broken, the first is {first}: it is no picture" in said
    assert not (tmp_path / "runs").exists()


def test_terminals_obey_no_name_of_a_file(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "images"
    folder.mkdir()
    Image.new("RGB", (8, 8), "red").save(folder / "a\n\x1b[31m\x9bé.png")
    (folder / "b\x1b]0;title\x07.png").write_bytes(b"no image")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subquad.runs.open_trained", lambda *_, **__: trained("classify"))
    assert main(["predict", str(folder), "--checkpoint", "here"]) == 0
    said = capsys.readouterr()
    assert r"a\n\x1b[31m\x9bé.png: red" in said.out and r"b\x1b]0;title\x07.png" in said.out
    assert main(["predict", "none\x1b[31m.png", "--checkpoint", "here"]) == 2
    said = said.out + said.err + capsys.readouterr().err
    assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in said if letter != "\n")
