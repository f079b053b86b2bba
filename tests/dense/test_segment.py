"""`subquad segment`, from scenes to a table: trained, gone on with, judged, and shown."""

import json
from dataclasses import replace

import numpy as np
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
from subquad.tasks.conventions import CONVENTIONS, OWN
from subquad.tasks.segmentation import SEGMENTERS, Segmentation, SegmentRecipe, judge_segmenter
from subquad.tasks.segmentation.intersection_over_union import segment
from subquad.training import train


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return worlds.scenes(tmp_path_factory.mktemp("data") / "scenes")


@pytest.fixture(scope="module")
def recipe(scenes):
    settings = {"embed_dims": [8, 16, 24, 32], "num_heads": [1, 2, 2, 4], "depths": [1, 1, 1, 1]}
    sizes = {"img_size": (32, 32), "batch_size": 2, "epochs": 2, "warmup_epochs": 0, "lr": 1e-3, "scale": (1.0, 1.0)}
    return SegmentRecipe(model="pvt_tiny", attention="inline", settings=settings, data=str(scenes), **sizes)


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "first"
    train(recipe, folder)
    return folder


def test_a_run_says_everything_and_is_restored(run, recipe):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {"eval_miou", "eval_accuracy", "eval_class_accuracy", "train_loss"} <= rows[0].keys()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["best_miou"] == max(row["eval_miou"] for row in rows)
    assert load_recipe(run / "recipe.yaml", SegmentRecipe) == recipe
    found = judge_segmenter(open_trained(run))
    assert found.result.miou == pytest.approx(summary["best_miou"], abs=1e-4) and found.count == 3


def test_a_run_is_trained_further_with_its_head(run, recipe, tmp_path):
    further = recipe.replace(initial_checkpoint=str(run), initial_head=True)
    made, before = Segmentation(further).model.state_dict(), open_trained(run).model.state_dict()
    assert made.keys() == before.keys() and all(torch.equal(made[name], tensor) for name, tensor in before.items())
    for changed, said in (
        ({"initial_checkpoint": None}, "takes the head of initial_checkpoint, and none is given"),
        ({"head": "linear"}, "has head fpn, and linear is asked for: leave initial_head out"),
        ({"head_channels": 64}, r"is \(64,.* here, and .* has \(256,.*: leave initial_head out"),
        ({"conventions": "openmmlab"}, "has conventions own, and openmmlab is asked for"),
    ):
        with pytest.raises(SubquadError, match=said):
            Segmentation(further.replace(**changed))
    others = worlds.scenes(tmp_path / "others")
    (others / "objectInfo.txt").write_text("1\tsky\n2\tred\n3\tgreen\n")
    with pytest.raises(SubquadError, match="has 3 classes, the model 3, and they differ"):
        Segmentation(further.replace(data=str(others)))


def test_training_on_masks_that_are_void_is_no_success(recipe, tmp_path):
    data = worlds.scenes(tmp_path / "void", counts=(4, 2))
    for mask in (data / "annotations" / "training").iterdir():
        with Image.open(mask) as labels:
            void = Image.new("L", labels.size, 0)
        void.save(mask)
    with pytest.raises(SubquadError, match=r"^every loss of epoch 1 is 0: the training images have no label"):
        train(recipe.replace(data=str(data), epochs=1), tmp_path / "run")
    assert not (tmp_path / "run" / "best.safetensors").exists()


def test_the_backbone_is_looked_into(run, scenes, tmp_path, capsys):
    command = ["analyze", str(run), "--images", str(scenes), "--max-images", "2", "--output", str(tmp_path)]
    assert main([*command, "--measures", "entropy", "local"]) == 0
    about = json.loads((tmp_path / "analysis.json").read_text())
    assert {row["mechanism"] for row in about["rows"]} == {"inline"} and {row["layer"] for row in about["rows"]} == {
        1,
        2,
        3,
        4,
    }
    for wrong, complaint in (([*command, "--removed"], "gives none: leave it out"), (command[:2], "name photographs")):
        assert main(wrong) == 2 and complaint in capsys.readouterr().err
    assert main(["eval", str(run)]) == 2 and "it is for `subquad segment`, not a classifier" in capsys.readouterr().err


def test_predictions_from_python_lie_where_the_command_writes_them(run, scenes, tmp_path, monkeypatch):
    """Without `output` they ended in a TypeError about a function of the task."""
    monkeypatch.chdir(tmp_path)
    picture = scenes / "images" / "validation" / "0.png"
    (found,) = subquad.predict(run, str(picture))
    assert found.path == picture and (tmp_path / "segmented" / "0-overlay.png").is_file()


def test_data_without_names_of_classes_are_judged_by_the_networks_names(recipe, tmp_path):
    unnamed = worlds.scenes(tmp_path / "unnamed", counts=(2, 2), names=False)
    own = recipe.replace(data=str(unnamed), num_classes=3, epochs=1)
    train(own, tmp_path / "run")
    trained = open_trained(tmp_path / "run")
    assert trained.classes == ("class 1", "class 2", "class 3")
    found = judge_segmenter(trained)
    assert found.count == 2 and found.classes == trained.classes
    assert len(trained.training_images()) == 2 and trained.held_out() is not None
    assert len(Segmentation.gallery([("it", trained)], 1).rows) == 1
    named = replace(trained, classes=("ground", "red", "green"))
    assert torch.equal(judge_segmenter(named).result.confusion, found.result.confusion)
    with pytest.raises(SubquadError, match="has label 3, and there are 2 classes"):
        judge_segmenter(replace(trained, classes=("ground", "red")))


def test_what_can_not_be_judged_or_learnt_is_said_before_an_epoch(recipe, tmp_path):
    data = worlds.scenes(tmp_path / "scenes", counts=(2, 2), names=False)
    own = recipe.replace(data=str(data), epochs=1)
    with pytest.raises(SubquadError, match=r"one class alone can't be learnt, .* labels 1 and 2$"):
        train(own.replace(num_classes=1), tmp_path / "run")
    said = []
    train(own.replace(num_classes=5), tmp_path / "five", log=said.append)
    assert said[0].startswith("none of 2 maps of labels has 5, the last class")
    Image.fromarray(np.full((40, 56), 9, np.uint8)).save(data / "annotations/validation/0.png")
    with pytest.raises(SubquadError, match="has label 9, and there are 3 classes"):
        train(own.replace(num_classes=3), tmp_path / "run")
    for path in (data / "annotations/validation").iterdir():
        Image.fromarray(np.zeros((40, 56), np.uint8)).save(path)
    with pytest.raises(SubquadError, match=r"none of 2 maps of labels of .* has a pixel with a class: .* 0 or 255"):
        train(own.replace(num_classes=3), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("conventions", CONVENTIONS)
@pytest.mark.parametrize("head", SEGMENTERS)
def test_a_batch_of_which_one_scene_is_left_is_trained_on(recipe, head, conventions):
    """Decoders with batch norms of maps of a single place take no single image."""
    task = Segmentation(recipe.replace(head=head, conventions=conventions, drop_path=0.0))
    scenes, labels = task.collate([task.train_images[k] for k in range(2)])
    torch.manual_seed(0)
    loss = task.loss(task.model.train(), (scenes[:1], labels[:1]))
    loss.backward()
    torch.manual_seed(0)
    both = task.loss(task.model, (scenes[[0, 0]], labels[[0, 0]]))
    torch.testing.assert_close(loss, both)


def test_a_decoder_that_takes_no_single_scene_is_said(recipe, tmp_path):
    single = recipe.replace(head="upernet", head_channels=16, batch_size=1)
    with pytest.raises(SubquadError, match=r"^a batch norm has one number .* of 1 scene of 32×32 px: give .* 2"):
        train(single, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("conventions", CONVENTIONS)
@pytest.mark.parametrize("head", SEGMENTERS)
def test_an_image_of_one_place_is_answered_or_refused_in_words(recipe, head, conventions):
    """Of a narrow Semantic FPN it was PyTorch's error about values per channel, called a fault of subquad."""
    model = Segmentation(recipe.replace(head=head, conventions=conventions, head_channels=64)).model.eval()
    image = torch.zeros(3, 32, 32)
    try:
        assert segment(model, image, (30, 32)).isfinite().all()
    except SubquadError as error:
        assert "images of 32×32 px leave the head fpn maps of one place" in str(error)
        assert head == "fpn" and conventions == OWN


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [2, 3])
def test_a_scene_that_a_network_refuses_is_named_where_it_is_judged(recipe, tmp_path, batch_size):
    """Its size was said alone, in the middle of a run; broken ones before it do not change its name."""
    folder = worlds.scenes(tmp_path / "scenes")
    file = folder / "images/validation/3.png"
    Image.new("RGB", (3, 3)).save(file)
    Image.fromarray(np.ones((3, 3), np.uint8)).save(folder / "annotations/validation/3.png")
    (folder / "images/validation/1.png").write_bytes(b"no picture")
    given = recipe.replace(data=str(folder), conventions="openmmlab", batch_size=batch_size, drop_path=0.0)
    with pytest.raises(SubquadError, match=f"^{file}: a map of 3×3 holds no patch"):
        train(given, tmp_path / "run")


def test_a_broken_off_run_ends_with_the_same_weights(run, recipe, tmp_path):
    def stop(line):
        if line.startswith("epoch 1/"):
            raise KeyboardInterrupt

    with pytest.raises(SubquadError, match=r"1 of 2 epochs are kept|0 of 2 epochs are kept"):
        train(recipe, tmp_path / "run", log=stop)
    train(recipe, tmp_path / "run", resume=True)
    first, second = (load_file(folder / "last.safetensors") for folder in (run, tmp_path / "run"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_boxes_are_learned(recipe, tmp_path):
    learning = recipe.replace(
        epochs=25, lr=3e-3, model_ema=True, model_ema_decay=0.5, head="upernet", head_channels=32, slide=True
    )
    summary = train(learning, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["train_loss"] < 0.6 * rows[0]["train_loss"] and summary["best_miou"] > 60
    assert "ema_miou" in rows[0]


@pytest.mark.slow
def test_the_commands_train_judge_and_show(scenes, tmp_path, capsys):
    config = tmp_path / "small.yaml"
    config.write_text(
        "settings: {embed_dims: [8, 16, 24, 32], num_heads: [1, 2, 2, 4], depths: [1, 1, 1, 1]}\n"
        "img_size: 32\nbatch_size: 2\nepochs: 1\nwarmup_epochs: 0\nlr: 1.0e-3\n"
    )
    base = ["--config", str(config), "--data", str(scenes), "--output", str(tmp_path / "runs")]
    assert main(["segment", "compare", "--attention", "agent", "softmax", *base, "--experiment", "both"]) == 0
    shown = capsys.readouterr().out
    assert "mIoU %" in shown and "agent" in shown and max(map(len, shown.splitlines()[-5:-2])) <= 80
    subquad.report([tmp_path / "runs" / "both"], tmp_path / "page.html", scaling=False)
    page = (tmp_path / "page.html").read_text()
    assert "mIoU %" in page and "Predictions against truth" in page
    assert page.count("<figcaption>truth") == 3 and page.count("agent (IoU") == 2 * 3
    run = tmp_path / "runs" / "both" / "agent-s0"
    assert main(["segment", "eval", str(run), "--slide", "--output", str(tmp_path / "confusion")]) == 0
    shown = capsys.readouterr().out
    assert "3 images: mIoU" in shown and "pixel accuracy" in shown and "ground" in shown
    assert (tmp_path / "confusion.csv").is_file()
    pictures = scenes / "images" / "validation"
    assert main(["segment", "predict", str(pictures), "--checkpoint", str(run), "--output", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"{k}{kind}.png" for k in range(3) for kind in ("", "-overlay")
    }
    with Image.open(tmp_path / "out" / "0.png") as labels:
        values = np.asarray(labels)
    assert values.shape == (40, 56) and values.min() >= 1 and values.max() <= 3


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["train", "--data", "nowhere"], "there is no folder or archive nowhere"),
        (["train", "--data", "SCENES", "--head", "fpm"], "unknown head 'fpm': did you mean fpn"),
        (
            ["train", "--data", "SCENES", "--dense-agents", "--model", "deit_tiny"],
            "for pvt and swin, not for vit",
        ),
        (["train", "--data", "SCENES", "--scale", "2", "1"], "scale goes from the smallest to the largest"),
        (
            [
                "train",
                "--config",
                "camvid_small",
                "--data",
                "SCENES",
                "--img-size",
                "32",
                "--short-side",
                "48",
                "--batch-size",
                "2",
            ],
            "images of 32×32 px leave the head fpn maps of one place",
        ),
        (["eval", "RUNS"], "holds no best.safetensors"),
    ],
)
def test_mistakes_are_one_line(scenes, tmp_path, capsys, arguments, reason):
    places = {"SCENES": str(scenes), "RUNS": str(tmp_path)}
    given = [places.get(argument, argument) for argument in arguments]
    own = ["--output", str(tmp_path / "runs")] if arguments[0] == "train" else []
    assert main(["segment", *given, *own]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("subquad: ") and reason in said[-1] and not (tmp_path / "runs").exists()
