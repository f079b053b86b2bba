"""Predictions for image files, and the picture of them."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from subquad.data import InputConfig, load_dataset
from subquad.errors import SubquadError
from subquad.tasks.classification import Prediction, predict, save_picture_grid

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
RED = (200, 30, 30)


class MeanColour(nn.Module):
    """Tells red, green and blue apart."""

    def forward(self, images):
        return 4 * images.mean((2, 3))


@pytest.fixture
def folder(tmp_path):
    """A folder for each colour with two pictures, and a blue one among the red."""
    for name, colour in COLOURS.items():
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (9, 7), colour).save(tmp_path / "pictures" / name / f"{i}.png")
    Image.new("RGB", (200, 90), COLOURS["blue"]).save(tmp_path / "pictures" / "red" / "odd.png")
    return tmp_path / "pictures"


def guess(paths, **settings):
    given = {"classes": tuple(COLOURS), "input_config": InputConfig((8, 8))} | settings
    return predict(MeanColour(), paths, **given)


def test_a_folder_gives_names_probabilities_and_true_classes(folder):
    predictions = guess(folder)
    assert [(p.path.parent.name, p.path.name) for p in predictions[-3:]] == [
        ("red", "0.png"),
        ("red", "1.png"),
        ("red", "odd.png"),
    ]
    assert [p.true for p in predictions] == [p.path.parent.name for p in predictions]
    assert [p.is_wrong for p in predictions] == [False] * 6 + [True]
    for prediction in predictions:
        shares = [share for _, share in prediction.probabilities]
        assert sum(shares) == pytest.approx(1) and shares == sorted(shares, reverse=True)
        assert {name for name, _ in prediction.probabilities} == COLOURS.keys()


def test_a_single_file_is_predicted_and_its_folder_need_not_be_a_class(folder, tmp_path):
    path = tmp_path / "some.png"
    Image.new("L", (5, 5), 200).save(path)
    (prediction,) = guess(str(path), top_k=1)
    assert prediction.true is None and not prediction.is_wrong and len(prediction.probabilities) == 1
    assert len(guess([path, folder / "red"])) == 4


def test_true_classes_are_those_that_training_would_read(folder, tmp_path, monkeypatch):
    inner = folder / "red" / "day" / "blue"
    inner.mkdir(parents=True)
    Image.new("RGB", (4, 4), COLOURS["red"]).save(inner / "deep.png")
    # a store of files, whose links lie in the folders of classes
    (tmp_path / "blue").mkdir()
    Image.new("RGB", (4, 4), COLOURS["green"]).save(tmp_path / "blue" / "stored.png")
    (folder / "green" / "link.png").symlink_to(tmp_path / "blue" / "stored.png")
    images = load_dataset(str(folder), split="train"), load_dataset(str(folder), split="validation")
    trained = {part.path(i): part.classes[part.labels[i]] for part in images for i in range(len(part))}
    assert {str(p.path): p.true for p in guess(folder)} == trained
    assert {p.true for p in guess(folder / "red")} == {"red", "blue"}
    (link,) = guess(folder / "green" / "link.png")
    assert link.true == "green"
    monkeypatch.chdir(folder / "green")
    assert {p.true for p in guess([".", "0.png"])} == {"green"}


def test_more_images_than_a_batch_keep_their_order(folder):
    paths = [folder / name / "0.png" for name in COLOURS] * 30
    assert [p.path for p in guess(paths)] == paths
    assert not any(p.is_wrong for p in guess(paths))


def test_broken_files_are_skipped_and_reported_or_fatal(folder):
    broken = folder / "green" / "1.png"
    broken.write_bytes(broken.read_bytes()[:40])
    lines = []
    assert len(guess(folder, log=lines.append)) == 6
    assert len(lines) == 1 and lines[0].startswith(f"skipped broken image {broken}: ")
    with pytest.raises(SubquadError, match=f"^broken image {broken}: "):
        guess(folder, strict=True)
    with pytest.raises(SubquadError, match="can't be read as an image"):
        guess(broken)


def test_outputs_without_a_name_are_numbered(folder):
    (prediction,) = guess(folder / "blue" / "0.png", classes=("red", "green"))
    assert prediction.name == "class 2"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"paths": "nowhere.png"}, "there is no image or folder nowhere.png"),
        ({"paths": []}, "no images to predict"),
        ({"classes": "abcd"}, "3 classes apart, but 4 have names"),
    ],
)
def test_mistakes_are_named(folder, settings, message):
    with pytest.raises(SubquadError, match=message):
        guess(**{"paths": folder} | settings)


def test_a_folder_without_images_is_named(tmp_path):
    with pytest.raises(SubquadError, match="has no images"):
        guess(tmp_path)


@pytest.mark.parametrize("count", [1, 2, 7, 50])
def test_the_grid_shows_up_to_so_many_pictures(folder, tmp_path, count):
    (tmp_path / "grids").mkdir()
    predictions = (guess(folder) * 10)[:count]
    save_picture_grid(predictions, tmp_path / "grids" / "grid.png", columns=3, max_images=9)
    assert [path.name for path in (tmp_path / "grids").iterdir()] == ["grid.png"]
    with Image.open(tmp_path / "grids" / "grid.png") as image:
        assert image.format == "PNG"
        rows = -(-min(count, 9) // 3)
        assert image.height > rows * 240 and image.width >= 240 * min(count, 3)


def red_share(path):
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    return float((np.abs(pixels - RED).sum(-1) < 10).mean())


def test_wrong_predictions_are_red_and_right_ones_are_not(folder, tmp_path):
    right, wrong = guess(folder / "green" / "0.png"), guess(folder / "red" / "odd.png")
    for name, predictions in (("right", right), ("wrong", wrong)):
        save_picture_grid(predictions, tmp_path / f"{name}.png")
    assert red_share(tmp_path / "right.png") == 0 and red_share(tmp_path / "wrong.png") > 0.002


def test_small_pictures_are_enlarged_to_sharp_squares(tmp_path):
    path = tmp_path / "checks.png"
    Image.fromarray((np.indices((8, 8)).sum(0) % 2 * 255).astype(np.uint8)).save(path)
    save_picture_grid([Prediction(path, [("$checks$ \\frac", 0.5)], None)], tmp_path / "grid.svg")
    save_picture_grid([Prediction(path, [("checks", 0.5)], None)], tmp_path / "grid.png")
    middle = np.asarray(Image.open(tmp_path / "grid.png").convert("L"))[-150:-50, 230:250]
    assert ((middle < 10) | (middle > 245)).mean() > 0.95


def test_an_unknown_format_or_no_pictures_are_refused(folder, tmp_path):
    with pytest.raises(SubquadError, match="its name must end in one of"):
        save_picture_grid(guess(folder), tmp_path / "grid.xyz")
    with pytest.raises(SubquadError, match="0 predictions"):
        save_picture_grid([], tmp_path / "grid.png")


def test_what_the_model_computes_does_not_depend_on_the_company(folder):
    torch.testing.assert_close(guess(folder)[0].probabilities[0][1], guess(folder / "blue")[0].probabilities[0][1])
