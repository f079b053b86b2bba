"""SIGINT and SIGTERM at any moment of a run: one line, the whole epochs are kept, and it ends as if unbroken."""

import json
import os
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
import worlds
from run_parts import draw, listing, little_garbage, short  # noqa: F401
from safetensors.torch import load_file

from subquad.cli import main
from subquad.errors import SubquadError, Terminated
from subquad.tasks.classification import Recipe
from subquad.tasks.detection import DetectRecipe
from subquad.tasks.segmentation import SegmentRecipe
from subquad.tasks.sequences import LraRecipe
from subquad.tasks.task_table import TASKS
from subquad.training import compare, engine, loop, running, train
from subquad.training.engine import Interruptions
from subquad.training.loop import Trainer


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return draw(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture(scope="module")
def unbroken(pictures, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(short(pictures), folder)
    return folder


@pytest.fixture(autouse=True)
def as_in_a_terminal():
    """What was started in the background of a shell ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupting(patch, owner, name, call, number):
    """Let a function be interrupted in the middle of its `call`-th call."""
    whole, calls = getattr(owner, name), []

    def interrupted(*args, **kwargs):
        calls.append(name)
        if len(calls) == call:
            signal.raise_signal(number)
        return whole(*args, **kwargs)

    patch.setattr(owner, name, interrupted)


def same_weights(first, second):
    for name in ("last.safetensors", "best.safetensors"):
        one, other = load_file(first / name), load_file(second / name)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one), name
    return True


# where, in which call, and how many of 2 epochs are whole then
MOMENTS = {
    "set-up": (running, "make_task", 1, 0),
    "the network's cost": (running, "Trainer", 1, 0),
    "the first step": (Trainer, "_step", 1, 0),
    "the first evaluation": (Trainer, "_evaluate", 1, 0),
    "the first save": (loop, "save_weights", 1, 1),
    "the end of the first save": (loop, "save_state", 1, 1),
    "a later step": (Trainer, "_step", 4, 1),
    "a later evaluation": (Trainer, "_evaluate", 2, 1),
    "the last save": (loop, "save_state", 2, 2),
    "the summary": (loop, "summarise", 1, 2),
}


FIRST = "set-up", "the first save", "a later evaluation"


@pytest.mark.parametrize(
    "moment", [*FIRST, *(pytest.param(m, marks=pytest.mark.slow) for m in MOMENTS if m not in FIRST)]
)
def test_an_interruption_is_one_line_and_keeps_the_whole_epochs(moment, pictures, unbroken, tmp_path, monkeypatch):
    owner, name, call, epochs = MOMENTS[moment]
    number = (signal.SIGINT, signal.SIGTERM)[len(moment) % 2]
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupting(patch, owner, name, call, number)
        with pytest.raises(SubquadError) as error:
            train(short(pictures), run)
    kept = f"{epochs} of 2 epochs are kept, subquad train --resume {run} goes on" if epochs else "no epoch is kept"
    assert str(error.value) == f"interrupted: {kept}"
    assert handlers == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    assert run.exists() == bool(epochs)
    train(short(pictures), run, resume=bool(epochs))
    assert same_weights(run, unbroken)
    assert {name for name in listing(run) if "/" not in name} == {name for name in listing(unbroken) if "/" not in name}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_is_one_line(pictures, tmp_path, monkeypatch, capsys, number, status):
    interrupting(monkeypatch, Trainer, "_evaluate", 2, number)
    (tmp_path / "short.yaml").write_text(short(pictures).to_yaml())
    command = ["train", "--config", tmp_path / "short.yaml", "--output", tmp_path, "--experiment", "x"]
    assert main(list(map(str, command))) == status
    said = capsys.readouterr().err
    assert said.startswith("subquad: interrupted: 1 of 2 epochs are kept") and said.count("\n") == 1


@pytest.fixture(autouse=True)
def handlers():
    """Python's own, whatever a test before has left."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler or signal.SIG_DFL)


def test_a_second_signal_does_not_break_off_what_tidies_up(monkeypatch):
    # it is one that comes soon after the first: a machine that does much else must not make it a late one
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: 7.0))
    with Interruptions():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)


def test_what_is_held_back_comes_afterwards_and_once():
    done = []
    with Interruptions() as interruptions:
        with pytest.raises(Terminated), interruptions.held_back():
            signal.raise_signal(signal.SIGTERM)
            done.append("the save")
        with interruptions.held_back():
            done.append("another")
    assert done == ["the save", "another"]


def test_an_interruption_that_python_swallows_comes_at_the_next_step(capsys):
    class Last:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    with Interruptions() as interruptions:
        Last()
        with pytest.raises(KeyboardInterrupt):
            interruptions.check()
        interruptions.check()
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_loader_process_ends_without_a_word(capfd):
    with Interruptions():
        child = os.fork()
        if not child:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGTERM
    assert capfd.readouterr().err == ""


def test_a_handler_that_was_there_before_says_what_is_raised_but_not_within_a_save():
    class Own(KeyboardInterrupt):
        pass

    def handler(number, frame):
        raise Own

    signal.signal(signal.SIGINT, handler)
    with Interruptions() as interruptions:
        with pytest.raises(KeyboardInterrupt), interruptions.held_back():
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(Own):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is handler


def test_who_ignores_sigint_goes_on_ignoring_it():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interruptions():
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.slow
def test_a_comparison_keeps_what_has_finished(pictures, tmp_path, monkeypatch):
    lines, recipe = [], short(pictures, epochs=1)
    with monkeypatch.context() as patch:
        interrupting(patch, Trainer, "_evaluate", 2, signal.SIGINT)
        with pytest.raises(SubquadError, match="no epoch is kept; the same comparison, called again, goes on"):
            compare(recipe, ["softmax", "linear"], [0], tmp_path / "x")
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["softmax-s0"]
    rows = compare(recipe, ["softmax", "linear"], [0], tmp_path / "x", log=lines.append)
    assert len(rows) == 2 and sum(line.startswith("epoch") for line in lines) == 1


LOST = (
    "[/src/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:30360: Connection reset by peer. This is typical.",
    "Rank 0 has failed to pass monitoredBarrier; gloo",
)


@pytest.mark.parametrize("words", LOST)
def test_a_process_that_has_gone_is_one_line(words, pictures, tmp_path, monkeypatch):
    whole = Trainer._evaluate

    def lose(self):
        if self.epochs_done:
            raise RuntimeError(words)
        return whole(self)

    monkeypatch.setattr(Trainer, "_evaluate", lose)
    with pytest.raises(SubquadError, match=r"another process of this run has gone \([^[].*\): 1 of 2 epochs are kept"):
        train(short(pictures), tmp_path / "x")


def test_other_errors_are_not_taken_for_it(pictures, tmp_path, monkeypatch):
    def fail(self):
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(Trainer, "_evaluate", fail)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        train(short(pictures), tmp_path / "x")
    assert listing(tmp_path) == []


PYRAMID = {"embed_dims": [8, 16, 24, 32], "num_heads": [1, 2, 2, 4], "depths": [1, 1, 1, 1]}
DENSE = {"model": "pvt_tiny", "attention": "inline", "settings": PYRAMID, "batch_size": 2, "epochs": 2, "lr": 1e-3}


def recipe_of(kind, folder, pictures):
    """A short run of each task."""
    if kind is SegmentRecipe:
        data = worlds.scenes(folder / "scenes", counts=(4, 2))
        return kind(data=str(data), img_size=(32, 32), warmup_epochs=0, **DENSE)
    if kind is DetectRecipe:
        sizes = {"img_size": (64, 64), "short_side": (48, 64), "long_side": 96, "head_channels": 16}
        data = worlds.objects(folder / "objects", counts=(4, 2))
        return kind(data=str(data), head="retinanet", warmup_epochs=0, **(DENSE | sizes))
    if kind is LraRecipe:
        data = {"data_settings": {"count": 200, "shortest": 5, "longest": 24}, "max_length": 24, "epochs": 2}
        return kind(attention="linear", updates_per_epoch=2, warmup_epochs=0, batch_size=8, embed_dim=16, **data)
    assert kind is Recipe, f"{kind.__name__}: give it a short run here"
    return short(pictures)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [task.recipe_class for task in TASKS.values()])
@pytest.mark.parametrize("name", ["_step", "_evaluate"])
def test_every_task_goes_on_where_it_was_interrupted(kind, name, pictures, tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path / "home"))
    recipe = recipe_of(kind, tmp_path, pictures)
    train(recipe, tmp_path / "unbroken")
    with monkeypatch.context() as patch:
        interrupting(patch, Trainer, name, {"_step": 3, "_evaluate": 2}[name], signal.SIGTERM)
        with pytest.raises(SubquadError, match=r"interrupted: 1 of 2 epochs are kept, .* goes on"):
            train(recipe, tmp_path / "run")
    train(recipe, tmp_path / "run", resume=True)
    assert same_weights(tmp_path / "run", tmp_path / "unbroken")
    rows = [
        [json.loads(line)["train_loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("run", "unbroken")
    ]
    assert rows[0] == rows[1]


@pytest.mark.slow
def test_a_count_over_a_data_set_goes_on_where_it_was_interrupted(unbroken, tmp_path, monkeypatch, capsys):
    surveys = sys.modules["subquad.analysis.survey"]

    def counted(output):
        command = ["analyze", str(unbroken), "--removed", "--measures", "entropy", "--output", str(output)]
        code = main([*command, "--max-images", "1"])
        return code, json.loads((output / "removed-run.json").read_text())

    code, whole = counted(tmp_path / "whole")
    assert code == 0
    with monkeypatch.context() as patch:
        patch.setattr(surveys, "EVERY", 0.0)
        interrupting(patch, surveys, "write_json", 1, signal.SIGINT)
        assert counted(tmp_path / "broken")[0] == 130
        assert "Traceback" not in capsys.readouterr().err
    assert counted(tmp_path / "broken") == (0, whole)
    shutil.rmtree(tmp_path / "broken")
