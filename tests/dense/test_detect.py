"""`subquad detect`, from images with objects to a table: trained, gone on with, judged, and shown."""

import json

import pytest
import torch
import worlds
from PIL import Image
from safetensors.torch import load_file

import subquad
from subquad import SubquadError
from subquad.cli import main
from subquad.runs import open_trained
from subquad.tasks import load_recipe
from subquad.tasks.detection import Detection, DetectRecipe, judge_detector
from subquad.training import train

# networks are trained and written here
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    return worlds.objects(tmp_path_factory.mktemp("data") / "objects")


@pytest.fixture(scope="module")
def recipe(objects):
    settings = {"embed_dims": [8, 16, 24, 32], "num_heads": [1, 2, 2, 4], "depths": [1, 1, 1, 1]}
    sizes = {"img_size": (64, 64), "short_side": (48, 64), "long_side": 96, "batch_size": 2, "head_channels": 16}
    schedule = {"epochs": 2, "warmup_epochs": 0, "lr": 1e-3}
    return DetectRecipe(model="pvt_tiny", attention="inline", settings=settings, data=str(objects), **sizes, **schedule)


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "first"
    train(recipe, folder)
    return folder


def test_a_run_is_trained_further_with_its_head(run, recipe):
    further = recipe.replace(initial_checkpoint=str(run), initial_head=True)
    made, before = Detection(further).model.state_dict(), open_trained(run).model.state_dict()
    assert made.keys() == before.keys() and all(torch.equal(made[name], tensor) for name, tensor in before.items())


def test_a_run_says_everything_and_is_restored(run, recipe):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {"eval_box_ap", "eval_box_ap50", "eval_mask_ap", "train_loss"} <= rows[0].keys()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["best_box_ap"] == max(row["eval_box_ap"] for row in rows)
    assert load_recipe(run / "recipe.yaml", DetectRecipe) == recipe
    with pytest.raises(SubquadError, match="is of `subquad detect`, whose networks give lists"):
        subquad.export(run, run / "no.pt2", format="pt2")
    found = judge_detector(open_trained(run))
    assert found.count == 3 and found.result.box["ap"] == pytest.approx(summary["best_box_ap"], abs=0.5)


def test_sizes_that_do_not_fit_and_nothing_found_are_no_surprise(recipe, tmp_path):
    folder = worlds.objects(tmp_path / "objects", counts=(2, 2))
    own = recipe.replace(data=str(folder), head="retinanet", lr=1e-12, epochs=2)
    summary = train(own, tmp_path / "found")
    # of epochs in which nothing was found the last
    assert (summary["best_box_ap"], summary["best_epoch"]) == (0, 1)
    Image.new("RGB", (10, 20)).save(folder / "val2017" / "000001.png")
    with pytest.raises(SubquadError, match=r"has 10×20 px, its annotations are for 64×48"):
        train(own, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_masks_that_are_not_there_to_judge_by_are_said_before_training(run, recipe, tmp_path):
    folder = worlds.objects(tmp_path / "objects")
    file = folder / "annotations/instances_val2017.json"
    content = json.loads(file.read_text())
    for annotation in content["annotations"]:
        annotation["segmentation"] = []
    file.write_text(json.dumps(content))
    reason = r"instances_val2017\.json: annotation 1 has no mask"
    with pytest.raises(SubquadError, match=reason):
        Detection(recipe.replace(data=str(folder)))
    with pytest.raises(SubquadError, match=reason):
        judge_detector(open_trained(run), data=str(folder))
    Detection(recipe.replace(data=str(folder), head="faster_rcnn"))


@pytest.mark.slow
def test_a_broken_off_run_ends_with_the_same_weights(run, recipe, tmp_path):
    def stop(line):
        if line.startswith("epoch 1/"):
            raise KeyboardInterrupt

    with pytest.raises(SubquadError, match="detect train --resume"):
        train(recipe, tmp_path / "run", log=stop)
    train(recipe, tmp_path / "run", resume=True)
    first, second = (load_file(folder / "last.safetensors") for folder in (run, tmp_path / "run"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.long
@pytest.mark.slow
def test_boxes_are_learned(recipe, tmp_path):
    learning = recipe.replace(head="faster_rcnn", epochs=40, lr=3e-3, head_channels=32, short_side=(64,), hflip=0.0)
    summary = train(learning, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["train_loss"] < 0.6 * rows[0]["train_loss"]
    assert max(row["eval_box_ap50"] for row in rows) > 20 and summary["best_box_ap"] > 5


def test_the_commands_judge_and_show(run, objects, tmp_path, capsys):
    assert main(["detect", "eval", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "3 images" in shown and "masks" in shown and "AP75" in shown and "green" in shown
    assert max(map(len, shown.splitlines())) <= 80
    out = tmp_path / "out"
    images = str(objects / "val2017")
    assert (
        main(["detect", "predict", images, "--checkpoint", str(run), "--threshold", "0.05", "--output", str(out)]) == 0
    )
    assert len(list(out.glob("*-objects.png"))) == 3 and "objects" in capsys.readouterr().out
    subquad.report([run], tmp_path / "page.html", scaling=False)
    page = (tmp_path / "page.html").read_text()
    assert "box AP %" in page and "Predictions against truth" in page and "truth: 2 objects" in page


def test_an_image_that_a_network_refuses_is_named(run, objects, tmp_path, capsys):
    """Its size was said alone, which among thousands is no help."""
    Image.new("RGB", (300, 2)).save(tmp_path / "thin.png")
    assert main(["detect", "predict", str(tmp_path), "--checkpoint", str(run), "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"subquad: {tmp_path / 'thin.png'}: an image of 300×2 px is less than a pixel thin")


def with_a_thin_image(folder, part):
    """A folder of objects with one image more, without any, of 300×2 px; its file."""
    file = worlds.objects(folder) / f"annotations/instances_{part}2017.json"
    content = json.loads(file.read_text())
    content["images"].append({"id": 99, "file_name": "thin.png", "height": 2, "width": 300})
    file.write_text(json.dumps(content))
    Image.new("RGB", (300, 2)).save(folder / f"{part}2017" / "thin.png")
    return folder / f"{part}2017" / "thin.png"


@pytest.mark.parametrize("part", ["train", "val"])
def test_an_image_that_is_too_thin_is_named_before_training(recipe, tmp_path, part):
    """It ended the epoch that met it, by its size alone."""
    file = with_a_thin_image(tmp_path / "objects", part)
    with pytest.raises(SubquadError, match=f"^1 of . images of .* at a long_side of 96, the first is {file} of 300×2"):
        Detection(recipe.replace(data=str(tmp_path / "objects")))


def test_a_refused_image_is_named_where_data_are_judged(run, tmp_path):
    file = with_a_thin_image(tmp_path / "objects", "val")
    with pytest.raises(SubquadError, match=f"^{file}: an image of 300×2 px is less than a pixel thin"):
        judge_detector(open_trained(run), data=str(tmp_path / "objects"))


def test_training_and_judging_agree_whatever_stands_beside_an_image(run, objects):
    summary = json.loads((run / "summary.json").read_text())
    judged = judge_detector(open_trained(run), data=str(objects))
    assert judged.result.box["ap"] == pytest.approx(summary["best_box_ap"], abs=1e-3)


def test_detectors_are_not_fitted_and_have_no_files(run, objects, tmp_path, capsys):
    (tmp_path / "n.pt2").write_bytes(b"")
    flags = ["--images", str(objects / "train2017"), "--output", str(tmp_path / "out")]
    assert main(["convert", str(run), "--attention", "linear", *flags]) == 2
    assert "is of `subquad detect`, whose networks are not fitted here" in capsys.readouterr().err
    assert main(["train", "--resume", str(run)]) == 2
    assert f"the run in {run} is of another task: subquad detect train --resume {run}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["train", "--data", "nowhere"], "there is no folder or archive nowhere"),
        (["train", "--data", "OBJECTS", "--head", "retinanett"], "did you mean retinanet"),
        (["train", "--data", "OBJECTS", "--short-side", "800", "--long-side", "600"], "short_side goes from 1 to"),
        (["train", "--data", "OBJECTS", "--sched", "multistep"], "decay_epochs: give both or neither"),
        (
            ["predict", "a.png", "--checkpoint", "RUN", "--threshold", "2"],
            "--threshold: must be a number, at least 0 and at most 1, got '2'",
        ),
        (["predict", "a.png", "--checkpoint", "RUN"], "there is no image or folder a.png"),
    ],
)
def test_mistakes_are_one_line(run, objects, tmp_path, capsys, arguments, reason):
    places = {"OBJECTS": str(objects), "RUN": str(run)}
    given = [places.get(argument, argument) for argument in arguments]
    assert main(["detect", *given, "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("subquad: ") and reason in said[-1] and not (tmp_path / "out").exists()
