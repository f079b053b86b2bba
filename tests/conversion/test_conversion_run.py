"""`subquad convert` and `subquad advise`, from the command line to the files."""

import json
import shutil
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import worlds
from foreign_own import somebodys
from PIL import Image
from safetensors.torch import save_file

import subquad
from subquad import instructions
from subquad.cli import main
from subquad.conversion import Plan, conversion_run, convert_run, load_converted
from subquad.conversion.conversion_record import read_record
from subquad.conversion.opened_conversion import check_size
from subquad.data import InputConfig
from subquad.tasks import ImageNetwork

# networks are trained and written here
pytestmark = pytest.mark.slow

RUN = Path(__file__).parents[1] / "fixtures" / "runs" / "classify"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two blocks."""
    sizes = {"model": "deit_tiny", "img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    folder = tmp_path_factory.mktemp("runs") / "teacher"
    subquad.train("digits", folder, **sizes, epochs=1, batch_size=16, max_train_images=32, attention="softmax")
    return folder


FAST = [
    "--images",
    "digits",
    "--align-updates",
    "6",
    "--distil-updates",
    "4",
    "--batch-size",
    "16",
    "--max-judged",
    "40",
]


def run(*arguments):
    return main([str(one) for one in arguments])


def test_a_network_of_ones_own_is_converted_in_a_folder(tmp_path, monkeypatch, capsys):
    """Of a class that nobody knows: it is handed over, and the folder is opened with it."""
    images = tmp_path / "photos"
    images.mkdir()
    for number in range(12):
        Image.fromarray(worlds.picture(np.random.default_rng(number), 40, 40, [])).save(images / f"{number}.png")
    teacher, folder = somebodys("maps"), tmp_path / "mine"
    plan = Plan("my network", str(images), attention="linear", align_updates=4, distil_updates=4, batch_size=4)
    with pytest.raises(subquad.SubquadError, match=r"say how the network takes images: config="):
        convert_run(plan, folder, teacher=teacher)
    with pytest.raises(subquad.SubquadError, match=r"teacher is to be a network, got 'mine'"):
        convert_run(plan, folder, teacher="mine")
    with pytest.raises(subquad.SubquadError, match=r"config is to be a subquad\.data\.InputConfig, got 32"):
        convert_run(plan, folder, teacher=teacher, config=32)
    with pytest.raises(subquad.SubquadError, match=r"unknown argument of convert_run 'size': did you mean sizes"):
        convert_run(plan, tmp_path / "o", size=(32,))
    config = InputConfig((32, 48))

    def interrupted(*arguments, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion_run, "distil", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert_run(plan, folder, teacher=teacher, config=config, max_judged=8)
    with pytest.raises(subquad.SubquadError, match="unfinished work on other weights than my network"):
        convert_run(plan, folder, teacher=somebodys("biases"), config=config, max_judged=8)
    made = convert_run(plan, folder, teacher=teacher, config=config, max_judged=8)
    again, x = load_converted(folder, teacher), torch.randn(2, 3, 48, 32)
    assert torch.equal(again(x), made.student(x)) and "aligned" in made.steps
    # on the map of the images that it is to take, and not of those that its positions tell of
    assert list(made.record.conversion["grid"]) == [4, 6, 1]
    with pytest.raises(subquad.SubquadError, match=r"of my network, which can't be opened: .*load_converted"):
        subquad.open_trained(folder)
    assert run("report", folder, "--output", tmp_path / "page.html") == 0
    assert "my network" in (tmp_path / "page.html").read_text()
    assert run("upload", folder, f"local-dir:{tmp_path / 'hub'}") == 2
    assert "handed over in Python, which nobody else could make" in capsys.readouterr().err


def test_a_run_is_converted_judged_and_kept(trained, tmp_path, capsys):
    out = tmp_path / "converted"
    assert run("convert", trained, "--attention", "linear", "--keep", 1, "--output", out, *FAST) == 0
    printed = capsys.readouterr().out
    assert "swapped" in printed
    assert "distilled" in printed
    assert all(len(line) <= 80 for line in printed.splitlines() if "│" in line or line.startswith(" "))
    assert sorted(path.name for path in out.iterdir() if path.name != ".lock") == [
        "conversion.html",
        "conversion.json",
        "delta.safetensors",
        "plan.json",
        "student.safetensors",
    ]
    report = json.loads((out / "conversion.json").read_text())
    teacher = subquad.open_trained(trained).model
    depth = len(teacher.blocks)
    assert len(report["conversion"]["paths"]) == depth - 1
    assert len(report["blocks"]) == depth
    assert [len(row["converted"]) for row in report["hybrids"]] == list(range(depth + 1))
    for name in ("delta.safetensors", "student.safetensors"):
        student = load_converted(out / name, teacher)
        assert len(student.subquad_conversion.paths) == depth - 1
        # and by every command that takes a trained network
        reopened = subquad.open_trained(out if name == "delta.safetensors" else out / name)
        assert reopened.classes == subquad.open_trained(trained).classes
        images = torch.rand(2, 3, 32, 32)
        torch.testing.assert_close(reopened.model(images), student(images), rtol=0, atol=0)
    assert run("eval", out) == 0
    assert "top-1" in capsys.readouterr().out
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes((out / "delta.safetensors").read_bytes())
    with pytest.raises(subquad.SubquadError, match=r"no conversion\.json beside it"):
        subquad.open_trained(alone)
    assert set(report["history"]) == {"aligned", "distilled"}
    assert set(report["before"]) == set(report["after"]) == {str(number) for number in range(depth)}
    assert run("report", out, "--output", tmp_path / "again.html") == 0
    assert (tmp_path / "again.html").read_text() == (out / "conversion.html").read_text()
    capsys.readouterr()
    assert run("convert", trained, "--attention", "linear", "--keep", 1, "--output", out, *FAST) == 2
    assert "holds a converted network already" in capsys.readouterr().err


@pytest.mark.parametrize("loops", [True, False])
def test_a_conversion_says_where_bf16_is_slower_than_fp32(trained, tmp_path, monkeypatch, loops):
    monkeypatch.setattr(instructions, "loops_over_bf16", lambda: loops)
    lines = []
    plan = Plan(str(trained), "digits", attention="linear", amp=True, align_updates=1, distil_updates=0, batch_size=4)
    convert_run(plan, tmp_path / "student", max_judged=8, log=lines.append)
    assert any("--amp is several times slower than fp32" in line for line in lines) == loops


def test_a_conversion_finds_its_teacher_from_anywhere(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "runs" / "teacher")
    monkeypatch.chdir(tmp_path)
    fits = {"align_updates": 0, "distil_updates": 0, "batch_size": 16}
    convert_run(Plan("runs/teacher", "digits", attention="linear", **fits), "runs/student", max_judged=20)
    monkeypatch.chdir(tmp_path.parent)
    classes = subquad.open_trained(trained).classes
    assert subquad.open_trained(tmp_path / "runs" / "student").classes == classes
    (tmp_path / "runs").rename(tmp_path / "moved")
    assert subquad.open_trained(tmp_path / "moved" / "student").classes == classes
    (tmp_path / "moved" / "teacher").rename(tmp_path / "gone")
    # the whole file says how the teacher is made
    assert subquad.open_trained(tmp_path / "moved" / "student").classes == classes
    (tmp_path / "moved" / "student" / "student.safetensors").unlink()
    with pytest.raises(subquad.SubquadError, match=r"is a conversion of runs/teacher, which can't be opened"):
        subquad.open_trained(tmp_path / "moved" / "student")


@pytest.mark.slow
def test_what_is_broken_off_goes_on_to_the_same_network(trained, tmp_path, monkeypatch):
    plan = Plan(source=str(trained), images="digits", attention="agent:num_agents=4", batch_size=16, keep=1)
    plan = Plan(**{**vars(plan), "align_updates": 4, "distil_updates": 4})
    made = convert_run(plan, tmp_path / "whole", max_judged=20, labelled="digits")
    whole = made.student.state_dict()
    # features are judged behind each step, and the head where the labels are its classes
    told = made.record.labelled
    assert list(told.steps) == list(made.steps) == ["swapped", "aligned", "some blocks kept", "distilled"]
    assert all(step.head is not None and step.agreement is not None for step in told.steps.values())
    assert read_record(tmp_path / "whole") == made.record
    distil = conversion_run.distil

    def interrupted(student, drawn, **settings):
        def stopping(update):
            if update == 2:
                raise KeyboardInterrupt
            return drawn(update)

        return distil(student, stopping, **settings)

    with monkeypatch.context() as patched:
        patched.setattr(conversion_run, "distil", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert_run(plan, tmp_path / "broken", max_judged=20)
    assert not (tmp_path / "broken" / "delta.safetensors").exists()
    # as it was written before there was a choice of optimizers
    written = json.loads((tmp_path / "broken" / "plan.json").read_text())
    del written["opt"]
    (tmp_path / "broken" / "plan.json").write_text(json.dumps(written))
    other = Plan(**{**vars(plan), "seed": 3})
    with pytest.raises(subquad.SubquadError, match="unfinished work with seed = 0"):
        convert_run(other, tmp_path / "broken", max_judged=20)
    resumed = convert_run(plan, tmp_path / "broken", max_judged=20).student.state_dict()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_what_is_broken_off_is_gone_on_with_by_the_same_teacher_alone(tmp_path, monkeypatch):
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    (tmp_path / "photos").mkdir()
    for number in range(6):
        Image.new("RGB", (16, 16), (40 * number, 0, 0)).save(tmp_path / "photos" / f"{number}.png")

    def teacher():
        model = timm.create_model("vit_tiny_patch16_224", **sizes)
        timm.models.save_for_hf(model, str(tmp_path / "mine"), model_args=sizes, safe_serialization=True)

    def stop(*arguments, **settings):
        raise KeyboardInterrupt

    teacher()
    settings = {"attention": "linear", "align_updates": 1, "distil_updates": 1, "batch_size": 2}
    plan = Plan(source=str(tmp_path / "mine"), images=str(tmp_path / "photos"), **settings)
    with monkeypatch.context() as patched:
        patched.setattr(conversion_run, "distil", stop)
        with pytest.raises(KeyboardInterrupt):
            convert_run(plan, tmp_path / "out", max_judged=4)
    teacher()
    with pytest.raises(subquad.SubquadError, match=r"unfinished work on other weights than .*mine has now: put these"):
        convert_run(plan, tmp_path / "out", max_judged=4)
    # as an earlier version wrote it, which does not say
    written = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert written["began"]["count"] == 6
    written["began"]["teacher"] = subquad.conversion.conversion_of(
        subquad.convert(subquad.open_trained(tmp_path / "mine").model, "linear")
    ).teacher
    (tmp_path / "out" / "plan.json").write_text(json.dumps(written))
    (tmp_path / "photos" / "0.png").rename(tmp_path / "photos" / "another.png")
    said = []
    convert_run(plan, tmp_path / "out", max_judged=4, log=said.append)
    assert any("photos has other images than when this was begun, 6 then, 6 now" in line for line in said)


def test_what_is_broken_off_goes_on_with_the_blocks_that_were_chosen_by_their_time(trained, tmp_path, monkeypatch):
    times = iter([(10.0, 4.0, 3.0), (10.0, 6.0, 3.0)])

    def timed(*given, **settings):
        rows = subquad.conversion.trade_off(*given, **settings | {"at": None})
        return [replace(row, ms=ms) for row, ms in zip(rows, next(times), strict=True)]

    def interrupted(*given, **settings):
        assert settings.pop("state_file").name == conversion_run.DISTILLED
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion_run, "trade_off", timed)
    fits = {"align_updates": 2, "distil_updates": 2, "batch_size": 16}
    plan = Plan(str(trained), "digits", attention="linear", speedup=2.0, at=8, **fits)
    with monkeypatch.context() as patched:
        patched.setattr(conversion_run, "distil", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert_run(plan, tmp_path, max_judged=20)
    made = convert_run(plan, tmp_path, max_judged=20)
    assert len(made.blocks) == 1
    assert [row.ms for row in read_record(tmp_path).hybrids] == [10.0, 4.0, 3.0]
    assert not (tmp_path / conversion_run.CHOSEN).exists()


def test_a_command_that_is_killed_before_its_page_goes_on_with_that(trained, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    command = ["convert", trained, "--attention", "linear", "--output", out, *FAST]

    def interrupted(*given, **settings):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("subquad.api.report", interrupted)
        assert run(*command) == 130
    assert f"what was done is kept in {out}, the same command goes on" in capsys.readouterr().err
    made = (out / "student.safetensors").read_bytes()
    # of one that was killed a moment before
    (out / "distilling.pt").touch()
    assert run(*command, "--seed", 1) == 2
    assert run(*command) == 0
    assert "conversion.html" in capsys.readouterr().out
    assert (out / "conversion.html").is_file() and not (out / "distilling.pt").exists()
    assert (out / "student.safetensors").read_bytes() == made
    assert run(*command) == 2 and "holds a converted network already" in capsys.readouterr().err


def test_a_network_of_timm_with_its_weights_and_a_folder_of_photographs(tmp_path, capsys):
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    photos = tmp_path / "photos"
    photos.mkdir()
    for place in range(4):
        Image.new("RGB", (240, 230), (60 * place, 20, 90)).save(photos / f"{place}.jpg")
    (photos / "broken.jpg").write_bytes(b"none")
    out = tmp_path / "out"
    flags = ["--blocks", 0, 11, "--align-updates", 1, "--distil-updates", 0, "--batch-size", 2, "--max-judged", 2]
    source = ("timm/vit_tiny_patch16_224", "--weights", tmp_path / "weights.safetensors")
    assert run("convert", *source, "--attention", "inline", "--images", photos, "--output", out, *flags) == 0
    said = capsys.readouterr().out
    assert "2 of 12 blocks" in said
    # there are no labels that anything could be kept of
    assert "agreement  features' error" in said and "top-1" not in said and "kept" not in said
    assert f"judged on other parts of {photos}, which it is fitted to" in said
    assert f"1 of 5 images could not be read and were left out, the first is {photos / 'broken.jpg'}" in said
    page = (out / "conversion.html").read_text()
    assert "how well it was fitted, not how it does on others" in page
    assert "held-out images of the network" not in page
    student = load_converted(out / "delta.safetensors", model.eval())
    assert list(student.subquad_conversion.paths) == [0, 11]
    capsys.readouterr()
    assert run("predict", photos / "0.jpg", "--checkpoint", out) == 0
    (tmp_path / "weights.safetensors").unlink()
    shutil.copy(out / "student.safetensors", tmp_path / "alone.safetensors")
    for place in (out, tmp_path / "alone.safetensors"):
        assert run("predict", photos / "0.jpg", "--checkpoint", place) == 0
    (out / "student.safetensors").unlink()
    assert run("predict", photos / "0.jpg", "--checkpoint", out) == 2
    assert "is a conversion of timm/vit_tiny_patch16_224=" in capsys.readouterr().err


def test_images_of_the_data_of_a_run_are_looked_for_where_it_was_trained(tmp_path):
    for split, name in (("train", "cat"), ("train", "owl"), ("val", "cat"), ("val", "owl")):
        (tmp_path / "pets" / split / name).mkdir(parents=True)
        for shade in (40, 90):
            Image.new("RGB", (8, 8), (shade, 9, 9)).save(tmp_path / "pets" / split / name / f"{shade}.png")
    sizes = {"model": "deit_tiny", "img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    given = {"epochs": 1, "batch_size": 2, "attention": "softmax", "data_dir": str(tmp_path / "pets")}
    subquad.train("digits", data="folder", output=tmp_path / "run", **sizes, **given)
    plan = Plan(str(tmp_path / "run"), "folder", attention="linear", align_updates=1, distil_updates=0, batch_size=2)
    assert convert_run(plan, tmp_path / "out").steps["aligned"].images == 4


def test_a_time_budget_is_shared_by_both_fits_as_their_updates_are():
    plan = Plan(source="a", images="b", align_updates=100, distil_updates=300, time_budget=2)
    assert plan.schedule_of(100, 1e-3)["time_budget"] == 30
    assert plan.schedule_of(300, 1e-3)["time_budget"] == 90
    with pytest.raises(subquad.SubquadError, match="in minutes above 0, got -1"):
        Plan(source="a", images="b", time_budget=-1)


def test_updates_of_both_fits_are_halves_and_epochs_are_counted_over_the_images():
    plan = Plan(source="a", images="b", batch_size=10)

    def halves(plan):
        return plan.align_updates, plan.distil_updates

    assert [halves(plan.lasting(updates)) for updates in (2, 7)] == [(1, 1), (3, 4)]
    assert halves(plan.lasting_epochs(3, 45)) == (6, 6)
    assert halves(plan.lasting_epochs(0.5, 100)) == (2, 3)
    # fewer images than those of an update are a batch, and each fit has an update at least
    assert halves(plan.lasting_epochs(4, 3)) == (2, 2)
    assert halves(plan.lasting_epochs(0.01, 45)) == (1, 1)
    with pytest.raises(subquad.SubquadError, match="both fits together are at least 2, got 1"):
        plan.lasting(1)
    for epochs in (0, -1, float("inf"), float("nan")):
        with pytest.raises(subquad.SubquadError, match="both fits together are above 0, got"):
            plan.lasting_epochs(epochs, 45)


def test_a_plan_keeps_what_epochs_come_to_and_the_same_command_goes_on(trained, tmp_path, monkeypatch, capsys):
    photos = tmp_path / "photos"
    photos.mkdir()
    for place in range(9):
        Image.new("RGB", (10, 9), (20 * place, 20, 90)).save(photos / f"{place}.png")
    command = ["convert", trained, "--attention", "linear", "--images", photos, "--batch-size", 4, "--max-judged", 8]
    command += ["--output", tmp_path / "out"]

    def interrupted(*given, **settings):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(conversion_run, "distil", interrupted)
        assert run(*command, "--epochs", 2.5) not in (0, 2)
    written = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert (written["align_updates"], written["distil_updates"]) == (2, 3)
    capsys.readouterr()
    assert run(*command, "--epochs", 4) == 2
    assert "unfinished work with align_updates = 2" in capsys.readouterr().err
    assert run(*command, "--epochs", 2.5) == 0
    assert "2.5 epochs are 2 updates of alignment, 3 of distillation" in capsys.readouterr().out
    # the same number said otherwise
    assert run(*command, "--updates", 5) == 2
    assert "holds a converted network already" in capsys.readouterr().err
    assert run(*command[:-1], tmp_path / "other", "--updates", 5) == 0
    plans = [json.loads((tmp_path / name / "conversion.json").read_text())["plan"] for name in ("out", "other")]
    assert plans[0] == plans[1]


LENGTHS = {"--updates": 9, "--epochs": 1, "--align-updates": 0, "--distil-updates": 3}
OF_BOTH = {"--updates", "--epochs"}
EXCLUDED = [pair for pair in combinations(LENGTHS, 2) if OF_BOTH & set(pair)]


@pytest.mark.parametrize("pair", EXCLUDED)
def test_lengths_of_both_fits_and_of_each_exclude_each_other(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = [part for name in pair for part in (name, LENGTHS[name])]
    assert run("convert", RUN, "--images", "digits", "--output", "o", *given) == 2
    complaint = capsys.readouterr().err
    assert "give one kind of them" in complaint and complaint.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_speed_can_not_be_measured_at_is_said_before_anything_is_fitted(tmp_path):
    sizes = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": [1], "num_heads": [1]}
    teacher = timm.create_model("swin_tiny_patch4_window7_224", **sizes, num_classes=2)
    timm.models.save_for_hf(teacher, str(tmp_path / "teacher"), model_args=sizes)
    lines = []
    plan = Plan(str(tmp_path / "teacher"), "digits", attention="linear", speedup=2.0, at=64)
    with pytest.raises(subquad.SubquadError, match=r"does not run at 64×64 .*: --at says another"):
        convert_run(plan, tmp_path / "out", log=lines.append)
    assert not lines


@pytest.mark.parametrize("file", ["run.json", "best.safetensors", "config.json"])
def test_a_folder_that_holds_another_network_is_no_output(file, tmp_path):
    # as that of the teacher itself, which could be opened no more
    (tmp_path / file).write_text("{}")
    with pytest.raises(subquad.SubquadError, match=rf"holds a network already, whose {file} is there: take another"):
        convert_run(Plan(str(RUN), "digits"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [file]


def test_what_can_not_be_begun_leaves_no_plan_in_the_way(trained, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    for place in range(3):
        (photos / f"{place}.jpg").write_bytes(b"none")
    plan = Plan(source=str(trained), images=str(photos), attention="linear", batch_size=2)
    with pytest.raises(subquad.SubquadError, match="are broken"):
        convert_run(plan, tmp_path / "out", max_judged=2)
    assert not (tmp_path / "out").exists()
    with pytest.raises(subquad.SubquadError, match="unknown attention 'agnt': did you mean agent"):
        Plan(source="timm/never_fetched", images=str(photos), attention="agnt")


@pytest.mark.long
@pytest.mark.slow
def test_a_converted_network_of_timm_is_exported_and_streamed_from_its_folder(tmp_path, capsys):
    torch.manual_seed(0)
    save_file(timm.create_model("vit_tiny_patch16_224", num_classes=3).state_dict(), tmp_path / "weights.safetensors")
    photo = tmp_path / "0.jpg"
    Image.new("RGB", (240, 230), (60, 20, 90)).save(photo)
    source = ("timm/vit_tiny_patch16_224", "--weights", tmp_path / "weights.safetensors", "--images", tmp_path)
    flags = ["--align-updates", 0, "--distil-updates", 0, "--max-judged", 2]
    out, whole = tmp_path / "some", tmp_path / "whole"
    assert run("convert", *source, "--attention", "inline", "--blocks", 0, 11, "--output", out, *flags) == 0
    # of any size, though timm's name is of one
    any_size = ("--format", "pt2", "--dynamic", "batch,size", "--output", tmp_path / "student.pt2")
    assert run("export", out, *any_size) == 0
    assert subquad.open_trained(out, img_size=250).input.img_size == (250, 250)
    capsys.readouterr()
    assert run("stream", out, photo) == 2
    assert "Attention can't be streamed" in capsys.readouterr().err
    assert run("convert", *source, "--attention", "linear", "--output", whole, *flags) == 0
    assert run("stream", whole, photo, "--most-tokens", 64) == 0


def test_a_network_is_converted_judged_and_opened_for_oblong_images(trained, tmp_path, capsys):
    photos, out = tmp_path / "photos", tmp_path / "out"
    photos.mkdir()
    for place in range(3):
        Image.new("RGB", (40, 36), (60 * place, 20, 90)).save(photos / f"{place}.png")
    flags = ["--images", photos, "--align-updates", 1, "--distil-updates", 1, "--batch-size", 2, "--max-judged", 2]
    assert run("convert", trained, "--attention", "agent", "--img-size", "8,16", "--output", out, *flags) == 0
    alone = shutil.copy(out / "student.safetensors", tmp_path / "student.safetensors")
    for file in (out, alone):
        opened = subquad.open_trained(file)
        assert opened.input.img_size == (8, 16) and opened.model.subquad_conversion.grid[:2] == (2, 4)
        assert subquad.open_trained(file, img_size=(12, 8)).input.img_size == (12, 8)
    assert run("export", out, "--format", "pt2", "--output", tmp_path / "n.pt2") == 0
    assert "1×8×16" in capsys.readouterr().out
    assert run("eval", trained, "--img-size", "8x16", "--batch-size", 16) == 0
    assert run("analyze", trained, "--images", photos, "--img-size", "8x16", "--output", tmp_path / "a") == 0


def test_a_segmenter_is_converted_under_its_head(tmp_path, capsys):
    sizes = {"model": "deit_tiny", "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "head_channels": 64}
    photos, data = tmp_path / "photos", tmp_path / "scenes"
    worlds.scenes(data)
    settings = {"epochs": 1, "batch_size": 2, "img_size": (64, 64), "attention": "softmax", "warmup_epochs": 0}
    subquad.train(None, tmp_path / "run", task="segment", data=str(data), **sizes, **settings)
    photos.mkdir()
    for place in range(2):
        Image.new("RGB", (40, 36), (60 * place, 20, 90)).save(photos / f"{place}.png")
    flags = ["--images", photos, "--align-updates", 2, "--distil-updates", 2, "--batch-size", 2, "--max-judged", 2]
    assert run("convert", tmp_path / "run", "--attention", "linear", "--output", tmp_path / "out", *flags) == 0
    printed = capsys.readouterr().out
    assert "agreement" in printed
    # its own scenes are there
    assert "mIoU" in printed
    opened = subquad.open_trained(tmp_path / "run")
    assert len(opened.training_images()) == 6
    model = opened.model
    student = load_converted(tmp_path / "out" / "delta.safetensors", model)
    assert student(torch.zeros(1, 3, 48, 64)).shape == model(torch.zeros(1, 3, 48, 64)).shape


@pytest.mark.slow
def test_advice_on_the_command_line(capsys):
    # timm's test_vit has an MLP of three times its width
    sources = {RUN: "of all products", "timm/test_vit": "of all products", "deit_micro": "1 + n/(6c)"}
    for source, counted in sources.items():
        assert run("advise", source, "--img-size", 16, 32, "--attention", "linear", "--repeats", 1, "--engines") == 0
        printed = capsys.readouterr().out
        assert counted in printed
        assert all(len(line) <= 80 for line in printed.splitlines())


def test_advice_is_given_for_oblong_images_too(tmp_path, capsys):
    """A folder of timm's whose network takes images of one size is opened for each of them."""
    sizes = {"img_size": 32, "embed_dim": 24, "depths": (2,), "num_heads": (2,), "window_size": 4}
    model = timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **sizes)
    timm.models.save_for_hf(model, tmp_path, model_args=sizes)
    given = ["--img-size", "32,48", "48x32", 16, "--attention", "linear", "--repeats", 1, "--engines"]
    assert run("advise", tmp_path, *given) == 0
    printed = capsys.readouterr().out
    for size, tokens in (("32×48", 96), ("48×32", 96), ("16×16", 16)):
        assert len([line for line in printed.splitlines() if line.split()[:2] == [size, str(tokens)]]) == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["convert", RUN, "--images", "digits", "--output", "o", "--keep", 1, "--tolerance", 0.1], "give one of them"),
        (
            ["convert", RUN, "--images", "digits", "--output", "o", "--keep", 1],
            "1 blocks can be converted: keep from 0",
        ),
        (["convert", RUN, "--images", "digits", "--output", "o", "--speedup", 2], "give both speedup and at"),
        (["convert", RUN, "--images", "nowhere/x", "--output", "o"], "nowhere"),
        (["convert", RUN, "--images", "nowhere", "--output", "o"], "there is no folder nowhere in "),
        (["convert", RUN, "--images", "digits", "--output", "o", "--time-budget", 0], "must be a number, above 0"),
        (
            ["convert", RUN, "--images", "digits", "--output", "o", "--weights", "f"],
            "--weights are of a network of timm",
        ),
        (["convert", RUN, "--images", "digits", "--output", "o", "--labelled", "digitz"], "did you mean digits"),
        (["convert", "timm/no_such_net", "--images", "digits", "--output", "o"], "unknown network of timm"),
        (["convert", RUN, "--images", "digits", "--output", "o", "--attention", "lineer"], "did you mean linear"),
        (
            ["convert", RUN, "--images", "digits", "--output", "o", "--attention", "linear", "--train", "new"],
            "this mechanism adds no parameters",
        ),
        (["convert", RUN, "--images", "digits", "--output", "o", "--labelled-dir", "d"], "give labelled too"),
        (
            ["convert", RUN, "--images", "digits", "--output", "o", "--curve", "--align-updates", 0],
            "after alignment: give align_updates",
        ),
        (["advise", "deit_tinny"], "did you mean"),
        (["advise", "timm/resnet18", "--img-size", "64"], "no patch embedding"),
        (["advise", "timm/mvitv2_tiny", "--img-size", "9"], "timm/mvitv2_tiny can't be made"),
        (["advise", "timm/gcvit_xxtiny", "--img-size", "9"], "timm/gcvit_xxtiny can't be made"),
        (["advise", RUN.parent / "detect", "--img-size", "64"], "brings images to a size of its own"),
    ],
    ids=range(18),
)
def test_mistakes_are_one_line_and_leave_nothing(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert printed.err.count("\n") == 1
    # nothing was begun, whose time would be lost
    assert "swapped" not in printed.out
    assert list(tmp_path.iterdir()) == []


def test_low_rank_changes_without_peft_are_refused_before_anything_is_fitted(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    lines = []
    with pytest.raises(subquad.SubquadError, match="pip install peft"):
        convert_run(Plan(str(RUN), "digits", train="lora"), tmp_path / "out", log=lines.append)
    assert not (lines or (tmp_path / "out").exists())


def test_a_converted_network_of_one_size_refuses_others(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    opened = ImageNetwork("classify", model, (), None, None, torch.device("cpu"), InputConfig((224, 224)))
    check_size(opened, 224, tmp_path)
    with pytest.raises(subquad.SubquadError, match=r"converted for images of 224×224 .* --img-size 256"):
        check_size(opened, 256, tmp_path)
