import csv
import importlib
import json

import pytest

import subquad
from subquad.errors import SubquadError
from subquad.tasks import task_named
from subquad.tasks.classification.classification_recipe import Recipe
from subquad.training import compare, comparison_table, released_mechanisms
from subquad.training.compare import aggregate, slug
from subquad.weights.links import row_of

COLUMNS = task_named("classify").columns


@pytest.mark.slow
def test_a_comparison_has_a_run_for_each_mechanism_and_seed_and_a_row_for_each_mechanism(tiny, tmp_path):
    rows = compare(tiny, ["softmax", "linear:feature_map=elu,local=true"], [1, 2], tmp_path)
    runs = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    linear = slug("linear:feature_map=elu,local=true")
    assert runs == {"softmax-s1", "softmax-s2", f"{linear}-s1", f"{linear}-s2"}
    assert [row["mechanism"] for row in rows] == ["softmax", "linear:feature_map=elu,local=true"]
    assert json.loads((tmp_path / "compare.json").read_text()) == rows
    with (tmp_path / "compare.csv").open() as file:
        assert [row["mechanism"] for row in csv.DictReader(file)] == [row["mechanism"] for row in rows]
    told = (tmp_path / "compare.md").read_text().splitlines()
    assert len(told) == 9 and told[5] == "| mechanism | top-5 % |"
    # of the epoch whose weights are kept
    for row in rows:
        best = []
        for run in row["runs"]:
            epochs = [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
            best.append(max(epochs, key=lambda epoch: epoch["eval_top1"])["eval_top5"])
        assert row["top5_mean"] == pytest.approx(sum(best) / 2)


def test_every_run_has_its_own_mechanism_and_seed(tiny, tmp_path, monkeypatch):
    costs = dict.fromkeys(("last_top1", "images_per_second", "train_seconds", "peak_memory_mb", "params", "macs"), 1)
    runs = {}

    def train(recipe, folder, **settings):
        runs[folder.name] = recipe.attention, recipe.seed
        return {"best_top1": float(recipe.seed), "best_epoch": 0, **costs}

    monkeypatch.setattr(importlib.import_module("subquad.training.compare"), "train", train)
    rows = compare(tiny, ["softmax", "linear"], [3, 5], tmp_path)
    assert runs == {f"{name}-s{seed}": (name, seed) for name in ("softmax", "linear") for seed in (3, 5)}
    assert [row["top1_mean"] for row in rows] == [4.0, 4.0]


@pytest.mark.slow
def test_each_mechanism_starts_from_the_authors_weights_of_its_own_network(tiny, tmp_path, monkeypatch):
    costs = dict.fromkeys(("last_top1", "images_per_second", "train_seconds", "peak_memory_mb", "params", "macs"), 1)
    module, runs, fetched = importlib.import_module("subquad.training.compare"), {}, []

    def train(recipe, folder, **settings):
        runs[folder.name] = recipe.model, recipe.attention, recipe.initial_checkpoint, recipe.seed
        return {"best_top1": 1.0, "best_epoch": 0, **costs}

    monkeypatch.setattr(module, "train", train)
    monkeypatch.setattr(module, "pretrained_file", lambda row: fetched.append(row) or row_of(row))
    recipe = Recipe(model="swin_tiny", data="digits")
    compare(recipe, ["agent", "pola"], [3], tmp_path, pretrained=True)
    assert runs == {
        f"{name}-s3": (f"{name}_swin_tiny", None, f"pretrained/{name}_swin_tiny", 3) for name in ("agent", "pola")
    }
    assert fetched == ["agent_swin_tiny", "pola_swin_tiny"]
    assert (
        released_mechanisms("agent_swin_tiny")
        == released_mechanisms("swin_tiny")
        == ["agent", "inline", "focused", "pola"]
    )
    with pytest.raises(SubquadError, match="no released weights of 'softmax_swin_tiny' are known here"):
        compare(recipe, ["agent", "softmax"], [3], tmp_path / "new", pretrained=True)
    with pytest.raises(SubquadError, match=r"it starts from a\.pth already: leave out --pretrained"):
        compare(recipe.replace(initial_checkpoint="a.pth"), ["agent"], [3], tmp_path / "new", pretrained=True)
    with pytest.raises(SubquadError, match="each seed is compared once, and 3 1 3 names one again"):
        compare(recipe, ["agent"], [3, 1, 3], tmp_path / "new")
    with pytest.raises(SubquadError, match="each mechanism is compared once, and agent agent names one again"):
        compare(recipe, ["agent", "agent"], [3], tmp_path / "new")
    with pytest.raises(SubquadError, match="compare needs at least one mechanism"):
        subquad.compare(recipe.replace(model="lavit_deit_tiny"), tmp_path / "new", pretrained=True)
    assert not (tmp_path / "new").exists()


def test_what_has_finished_is_kept(tiny, tmp_path):
    lines = []
    first = compare(tiny, ["softmax"], [1], tmp_path)
    assert compare(tiny, ["softmax"], [1], tmp_path, log=lines.append) == first
    assert lines == ["— softmax, seed 1", f"it has finished: {tmp_path / 'softmax-s1'} is kept as it is"]


def test_no_comparison_is_made_in_the_folder_of_a_run(tiny, tmp_path):
    # `report` of that folder would show the run, and nothing of the comparison
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(SubquadError, match="is the folder of a run"):
        compare(tiny, ["softmax"], [1], tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_a_wrong_name_is_found_before_the_first_run(tiny, tmp_path):
    with pytest.raises(SubquadError, match="unknown attention 'agnet'"):
        compare(tiny, ["softmax", "agnet"], [1], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_accuracy_is_mean_and_deviation_over_the_seeds():
    costs = dict.fromkeys(
        ("last_top1", "images_per_second", "train_seconds", "peak_memory_mb", "params", "macs"), 1_234_567
    )
    row = aggregate("agent", [1, 2], [{"best_top1": 90.0, **costs}, {"best_top1": 92.0, **costs}], "top1")
    assert (row["top1_mean"], row["top1_std"]) == (91.0, pytest.approx(2**0.5))


def test_figures_that_some_rows_have_stand_in_a_table_of_their_own():
    costs = dict.fromkeys(("params", "macs", "images_per_second", "train_seconds", "peak_memory_mb"), 1)
    row = {"mechanism": "agent", "metric": "top1", "top1_mean": 90.0, "top1_std": None, **costs}
    more = {"mechanism": "linear", "top5_mean": 99.0, "top5_std": 0.5}
    told = comparison_table([row, {**row, **more}], COLUMNS).split("\n\n")
    assert told[1] == "In the same epochs:"
    assert told[2].split("\n") == ["mechanism       top-5 %", "agent                 –", "linear     99.00 ± 0.50"]


def test_the_table_fits_a_terminal():
    row = {
        "mechanism": "linear:feature_map=elu,local=true,more=settings",
        "metric": "top1",
        "top1_mean": 100.0,
        "top1_std": 10.123,
        "params": 123_456_789,
        "macs": 123_456_789_000,
        "images_per_second": 123456.7,
        "train_seconds": 360_000.0,
        "peak_memory_mb": 140_000.0,
    }
    lines = comparison_table([row, {**row, "mechanism": "agent", "top1_std": None}], COLUMNS).splitlines()
    assert len(lines) == 3
    assert all(len(line) <= 80 for line in lines)
    assert "100.00 ± 10.12" in lines[1]
