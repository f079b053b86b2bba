import itertools
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import subquad
from subquad.errors import InterruptedRunError, SubquadError
from subquad.runs.run_folder import RunFolder, place_of_data
from subquad.tasks.classification import Recipe
from subquad.training import train
from subquad.writing import replacing


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    file = tmp_path / "a"
    file.write_text("old")
    with pytest.raises(RuntimeError), replacing(file) as aside:
        aside.write_text("half")
        raise RuntimeError
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_with_something_in_it_is_not_taken(tmp_path):
    RunFolder(tmp_path / "new").check_new()
    RunFolder(tmp_path).check_new()
    (tmp_path / "mine").write_text("")
    with pytest.raises(SubquadError, match=r"exists already, and has no run but mine: take another --experiment"):
        RunFolder(tmp_path).check_new()
    RunFolder(tmp_path / "run").create(Recipe(), {})
    with pytest.raises(SubquadError, match=r"exists already: go on with --resume .* or take another --experiment"):
        RunFolder(tmp_path / "run").check_new()


@pytest.mark.parametrize("place", [{"data": "photos"}, {"data": "folder", "data_dir": "photos"}], ids=str)
def test_data_are_found_from_anywhere_and_where_they_moved_with_their_run(tiny, place, tmp_path, monkeypatch):
    """They were looked for in the folder that the next command was given in, and a report came without its maps."""
    for part, name, k in itertools.product(("train", "val"), ("cat", "dog"), range(4)):
        file = tmp_path / "work" / "photos" / part / name / f"{k}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (k, k, k)).save(file)
    monkeypatch.chdir(tmp_path / "work")
    train(tiny.replace(**place, epochs=1, warmup_epochs=0, batch_size=4), Path("runs/mine"))
    monkeypatch.chdir(tmp_path)
    for folder in ("work", "moved"):
        if folder == "moved":
            (tmp_path / "work").rename(tmp_path / folder)
        assert subquad.evaluate(f"{folder}/runs/mine").result.count == 8
        held_out = subquad.open_trained(f"{folder}/runs/mine").held_out()
        assert sum(len(labels) for _, labels in held_out.batches(4)) == 8
    lines = []
    subquad.report("moved/runs/mine", "report.html", scaling=False, log=lines.append)
    assert not [line for line in lines if "no attention maps" in line]
    (tmp_path / "moved" / "photos").rename(tmp_path / "moved" / "gone")
    with pytest.raises(SubquadError, match=f"there is no folder .*photos in {tmp_path}"):
        subquad.evaluate("moved/runs/mine")


def test_a_run_goes_on_with_its_own_data_from_wherever_it_is_resumed(tiny, tmp_path, monkeypatch):
    """It went on with what the current folder has under that name, and said nothing where there were as many images."""
    for folder, light in (("work", 10), ("elsewhere", 200)):
        for part, name, k in itertools.product(("train", "val"), ("cat", "dog"), range(4)):
            file = tmp_path / folder / "photos" / part / name / f"{k}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (light, k, k)).save(file)
    monkeypatch.chdir(tmp_path / "work")
    recipe = tiny.replace(data="photos", epochs=2, warmup_epochs=0, batch_size=4)
    train(recipe, Path("runs/whole"))

    def stopped(line):
        if line.startswith("epoch 1/"):
            raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError):
        train(recipe, Path("runs/mine"), log=stopped)
    for folder in (tmp_path / "elsewhere", Path("/")):
        monkeypatch.chdir(folder)
        mine = tmp_path / "work" / "runs" / "mine"
        train(recipe, mine, resume=True)
    whole = [load_file(tmp_path / "work" / "runs" / run / "last.safetensors") for run in ("whole", "mine")]
    assert all(torch.equal(whole[0][name], whole[1][name]) for name in whole[0])
    assert (mine / "recipe.yaml").read_text() == (mine.parent / "whole" / "recipe.yaml").read_text()


@pytest.mark.parametrize("data", [".", "photos"])
def test_data_of_a_run_are_those_beside_it_where_the_current_folder_has_others_of_that_name(
    data, tmp_path, monkeypatch
):
    """A run on `.` or `photos` was judged on those of the folder that the command was given in, without a word."""
    for folder in ("work", "elsewhere"):
        (tmp_path / folder / "photos").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    folder = RunFolder(tmp_path / "work" / "runs" / "mine")
    folder.create(Recipe(data=data), {"paths_from": "../.."})
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = place_of_data(folder.path, data)
    assert found is not None
    assert Path(found).resolve() == (tmp_path / "work" / data).resolve()
    (tmp_path / "work" / "photos").rmdir()
    assert place_of_data(folder.path, "photos") == "photos"


@pytest.mark.parametrize("begun", [None, 3, "\0", "~nobody"], ids=repr)
@pytest.mark.parametrize("data", [None, "digits", "pathfinder:count=20", "\0", ["a"], "photos"], ids=repr)
def test_what_a_run_says_of_its_data_stays_as_it_is_where_nothing_is_there(begun, data, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"paths_from": begun}))
    assert place_of_data(tmp_path, data) == data


def test_a_run_goes_on_with_its_own_recipe_only(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(SubquadError, match=r"no run in .* to resume"):
        folder.check_resumable(Recipe())
    folder.create(Recipe(), {})
    folder.check_resumable(Recipe(workers=4, data_dir="elsewhere"))
    assert "begun on the data in digits, and is taken to be of those in elsewhere now" in folder.moved_data(
        Recipe(data_dir="elsewhere")
    )
    assert folder.moved_data(Recipe(workers=4)) is None
    with pytest.raises(SubquadError, match=r"another recipe \(epochs 300 → 5\)"):
        folder.check_resumable(Recipe(epochs=5))


def test_metrics_are_rows_of_jsonl_and_csv(tmp_path):
    folder, rows = RunFolder(tmp_path), [{"epoch": 0, "lr": 0.5}, {"epoch": 1, "lr": 0.25}]
    folder.write_rows(rows)
    assert folder.rows() == rows
    assert (tmp_path / "metrics.csv").read_text() == "epoch,lr\n0,0.5\n1,0.25\n"
