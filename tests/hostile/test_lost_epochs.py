"""Epochs that can not be kept or counted: a full disk, numbers that are none, batches without an image."""

import ast
import json
import math
import resource
import shutil
from pathlib import Path

import pytest
import torch
from run_parts import listing, little_garbage, same, short  # noqa: F401

from subquad.data.dataset import DataError
from subquad.errors import SubquadError
from subquad.models import save_weights
from subquad.runs.run_state import load_state
from subquad.tasks.task import Task
from subquad.training import train
from subquad.training.journal import add_row, event_writer
from subquad.training.loop import Trainer
from subquad.writing import WriteError, json_text

SOURCE = Path(__file__).parents[2] / "src" / "subquad"


# a full disk


def test_a_full_disk_keeps_the_last_epoch_and_says_how_to_go_on(pictures, run, tmp_path, small_disk):
    folder = tmp_path / "x"

    def fill(line):
        if line.startswith("epoch 1/"):
            small_disk((folder / "last.pt").stat().st_size - 1000)

    with pytest.raises(
        WriteError, match=r"last\.pt can't be written: File too large; 1 of 2 epochs are kept, .*goes on"
    ):
        train(short(pictures), folder, log=fill)
    small_disk(resource.RLIM_INFINITY)
    train(short(pictures), folder, resume=True)
    assert same(folder, run)


@pytest.mark.slow
def test_a_disk_that_is_full_at_once_leaves_nothing(pictures, tmp_path, small_disk):
    with pytest.raises(WriteError, match=r"best\.safetensors can't be written: File too large; no epoch is kept"):
        train(short(pictures), tmp_path / "x", log=lambda line: small_disk(2000))
    small_disk(resource.RLIM_INFINITY)
    assert listing(tmp_path) == []


def test_weights_on_a_full_disk_are_one_line(tmp_path, small_disk):
    model = torch.nn.Linear(100, 100)
    small_disk(1000)
    with pytest.raises(WriteError, match=r"a\.safetensors can't be written: File too large"):
        save_weights(model, tmp_path / "a.safetensors")
    # pytest writes its dots before it tears down, maybe into a file
    small_disk(resource.RLIM_INFINITY)
    assert listing(tmp_path) == []


# what goes away while it is used


@pytest.mark.parametrize("gone", ["train/dark/3.png", "val/dark"])
def test_images_that_go_away_end_the_epoch_and_it_goes_on_when_they_are_back(pictures, run, tmp_path, gone):
    """They were called broken: an epoch of fewer images, or judged by those of one class, was the best one."""
    folder, aside = tmp_path / "x", tmp_path / "aside"

    def take(line):
        if line.startswith("epoch 1/"):
            (pictures / gone).rename(aside)

    try:
        with pytest.raises(DataError, match=r"\.png is gone, which was there .* 1 of 2 epochs are kept, .* goes on"):
            train(short(pictures), folder, log=take)
    finally:
        aside.rename(pictures / gone)
    train(short(pictures), folder, resume=True)
    assert same(folder, run)


def test_a_link_to_nothing_is_a_broken_image_and_none_that_went_away(pictures, tmp_path):
    link = pictures / "val/dark/link.png"
    link.symlink_to("nowhere")
    said = []
    try:
        train(short(pictures, epochs=1), tmp_path / "x", log=said.append)
    finally:
        link.unlink()
    assert any(line.startswith(f"skipped 1 broken held-out image, the first is {link}") for line in said)


@pytest.mark.parametrize("what", ["moved", "removed"])
def test_a_run_folder_that_goes_away_is_not_made_again(pictures, run, tmp_path, what):
    """It was, without a recipe, and "1 of 2 epochs are kept" was said of it."""
    folder, other = tmp_path / "x", tmp_path / "y"

    def take(line):
        if line.startswith("epoch 1/"):
            folder.rename(other)
            if what == "removed":
                shutil.rmtree(other)

    with pytest.raises(SubquadError, match="x is gone, moved or removed while it was written"):
        train(short(pictures), folder, log=take)
    assert not folder.exists()
    if what == "moved":
        train(short(pictures), other, resume=True)
        assert same(other, run)


def test_what_tensorboard_can_not_write_is_raised_and_shows_no_trace(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr("threading.excepthook", shown.append)
    folder = tmp_path / "tensorboard"
    with pytest.raises(FileNotFoundError), event_writer(folder, 0) as writer:
        add_row(writer, {"epoch": 0})
        shutil.rmtree(folder)
        add_row(writer, {"epoch": 1})
    assert not shown


# numbers that are none


def test_json_has_no_word_that_readers_do_not_know():
    content = {"a": [math.nan, 1.5, (math.inf, {"b": -math.inf})], "c": "ü", "d": None, "e": True}
    assert json_text(content) == '{"a": [null, 1.5, [null, {"b": null}]], "c": "ü", "d": null, "e": true}'


def test_all_json_is_made_in_one_place():
    """Where it is strict; elsewhere it may be made only to be read back at once, or to compare."""
    allowed = {"writing.py", "runs/run_records.py"}
    for file in SOURCE.rglob("*.py"):
        if "json.dump" not in (text := file.read_text()):
            continue
        tree = ast.parse(text)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        loaded = {id(each) for node in calls if ast.unparse(node.func) == "json.loads" for each in node.args}
        made = [node for node in calls if ast.unparse(node.func) in ("json.dumps", "json.dump")]
        stray = [node.lineno for node in made if id(node) not in loaded]
        assert str(file.relative_to(SOURCE)) in allowed or not stray, f"{file}: {stray}"


def test_text_is_read_in_the_encoding_that_it_is_written_in():
    """Whatever a machine's language is; files of the system's own are of ASCII letters."""
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "read_text":
                named = any(word.arg == "encoding" for word in node.keywords)
                assert named or "/proc/" in ast.unparse(node), f"{file}, line {node.lineno}"


def test_weights_that_are_no_numbers_after_the_last_update_are_not_kept(pictures, tmp_path, monkeypatch):
    whole = Trainer._train

    def spoil(self, epoch):
        result = whole(self, epoch)
        if epoch:
            next(self.bare.parameters()).data.view(-1)[0] = math.inf
        return result

    monkeypatch.setattr(Trainer, "_train", spoil)
    with pytest.raises(SubquadError, match=r"the weights are not finite after epoch 2.*1 whole epochs are kept"):
        train(short(pictures), tmp_path / "x")
    assert load_state(tmp_path / "x" / "last.pt").epochs == 1


# batches of nothing but broken images


def test_batches_without_images_update_nothing_and_do_not_count(pictures, tmp_path, monkeypatch):
    folder = shutil.copytree(pictures, tmp_path / "pictures")
    for file in (folder / "train" / "dark").iterdir():
        file.write_bytes(b"broken")
    steps, seen, whole = [], [], Trainer._step

    def step(self, batch):
        seen.append(len(batch[0]))
        before = [parameter.detach().clone() for parameter in self.bare.parameters()]
        loss, counts = whole(self, batch)
        moved = any(not torch.equal(a, b) for a, b in zip(before, self.bare.parameters(), strict=True))
        assert moved == bool(seen[-1]) == bool(counts)
        steps.append(float(loss) if counts else None)
        return torch.stack([loss, counts])

    monkeypatch.setattr(Trainer, "_step", step)
    train(short(folder, batch_size=1, epochs=1, weight_decay=0.5), tmp_path / "run")
    losses = [loss for loss in steps if loss is not None]
    assert 0 in seen and len(losses) == 8
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert row["train_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def test_an_epoch_without_an_image_stops_in_one_line_and_leaves_nothing(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(Task, "size", lambda self, batch: 0)
    with pytest.raises(SubquadError, match=r"none of the 16 training images of epoch 1 can be read"):
        train(short(pictures), tmp_path / "run")
    assert listing(tmp_path) == []
