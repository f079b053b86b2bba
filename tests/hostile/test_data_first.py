"""Words for data and images: what is wrong with them is said before a network is opened, which may be fetched."""

import pytest
from PIL import Image

import subquad
from subquad.cli import main
from subquad.data import load_dataset
from subquad.data.opening import check_places, check_words
from subquad.errors import SubquadError
from subquad.models import pretrained
from subquad.tasks.classification import Recipe

CLASSIFIER = ["--model", "agent_pvt_tiny", "--pretrained"]
SEGMENTER = ["--pretrained", "agent_pvt_tiny/fpn"]
DETECTOR = ["--pretrained", "agent_pvt_tiny/retinanet"]


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Two folders of images, x and y, in a folder of their own; nothing can be fetched there."""
    for name in ("x", "y"):
        for part in ("train", "val"):
            for kind in ("cat", "dog"):
                folder = tmp_path / name / part / kind
                folder.mkdir(parents=True)
                Image.new("RGB", (8, 8)).save(folder / "0.png")
    monkeypatch.chdir(tmp_path)

    def fetch(*args, **settings):
        raise AssertionError("weights were asked for")

    monkeypatch.setattr(pretrained, "_make", fetch)
    return tmp_path


def complaint(capsys, *words):
    assert main(list(words)) == 2
    said = capsys.readouterr().err
    assert said.startswith("subquad: ") and said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    "words",
    [
        ["eval", *CLASSIFIER, "--data", "imagenet", "--data-dir", "nothere"],
        ["eval", *CLASSIFIER, "--data", "gone/nothere"],
        ["eval", *CLASSIFIER, "--data", "digits", "--engine", "nothere.onnx"],
        ["segment", "eval", *SEGMENTER, "--data", "nothere"],
        ["detect", "eval", *DETECTOR, "--data", "nothere"],
        ["predict", "nothere.png", *CLASSIFIER],
        ["segment", "predict", "x", "nothere.png", *SEGMENTER],
        ["detect", "predict", "nothere.png", *DETECTOR],
        ["train", *CLASSIFIER, "--data", "folder", "--data-dir", "nothere"],
        ["compare", "--model", "pvt_tiny", "--pretrained", "--data", "folder", "--data-dir", "nothere"],
        ["segment", "train", *CLASSIFIER, "--data", "nothere"],
        ["stream", "pretrained/agent_pvt_tiny", "nothere.png"],
        ["analyze", *CLASSIFIER, "--images", "x", "nothere", "--output", "out"],
        ["analyze", *CLASSIFIER, "--data", "folder", "--data-dir", "nothere", "--output", "out"],
        ["convert", "pretrained/agent_pvt_tiny", "--images", "gone/nothere", "--output", "out"],
        ["convert", "pretrained/agent_pvt_tiny", "--images", "x", "--labelled", "gone/nothere", "--output", "out"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_what_is_not_there_is_said_before_weights_are_fetched(places, capsys, words):
    """The network was asked for the authors' file, of hundreds of megabytes, and then the folder was not there."""
    said = complaint(capsys, *words)
    assert "there is no " in said and "nothere" in said


@pytest.mark.parametrize("command", ["eval", "train", "analyze"])
def test_data_that_need_a_folder_ask_for_it_first(places, capsys, command):
    output = ["--output", "out"] if command == "analyze" else []
    assert "needs data_dir" in complaint(capsys, command, *CLASSIFIER, "--data", "imagenet", *output)


@pytest.mark.parametrize(
    "words",
    [
        ["eval", *CLASSIFIER],
        ["train"],
        ["compare", "--attention", "linear"],
        ["segment", "train"],
        ["detect", "train"],
        ["analyze", *CLASSIFIER, "--output", "out"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_two_places_of_data_are_refused(places, capsys, words):
    """The second was read in silence."""
    said = complaint(capsys, *words, "--data", "x", "--data-dir", "y")
    assert (
        said == "subquad: data x and data_dir y are two places, and the second would be read: leave out one of them\n"
    )
    assert not (places / "runs").exists()


def test_two_places_of_data_are_refused_in_python_and_of_conversions_too(places, capsys):
    for recipe in ("digits", Recipe()):
        with pytest.raises(SubquadError, match="are two places"):
            subquad.train(recipe, "out", data="x", data_dir="y")
    two = ["--images", "x", "--data-dir", "y"]
    assert "are two places" in complaint(capsys, "convert", "pretrained/deit_tiny", *two, "--output", "out")
    assert not (places / "out").exists()


def test_data_that_have_moved_and_names_are_let_through(places):
    """What lay elsewhere in training has both words as well."""
    for data, folder in [
        ("gone/x", "y"),
        (None, "y"),
        ("", None),
        ("folder", "y"),
        ("hfds/x", "made"),
        ("digits", None),
    ]:
        check_words(data, folder)
    check_places("gone/x", "y")
    check_places(None)
    assert len(load_dataset("gone/x", data_dir="y", split="train")) == 2
    with pytest.raises(SubquadError, match="did you mean"):
        check_words("imagenett", None)
