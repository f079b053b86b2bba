"""A task that the package does not know, `depth_task.py`: registered, it is trained, judged, shown and timed."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import depth_task
import numpy as np
import pytest
import torch
from PIL import Image

import subquad
from subquad import SubquadError
from subquad.cli import main
from subquad.tasks import ENTRY_POINTS, TASKS, Task, option, register_task

SMALL = ["--epochs", "2", "--warmup-epochs", "0", "--batch-size", "8", "--depth", "1", "--embed-dim", "16"]
TINY = {
    "max_train_images": 8,
    "batch_size": 8,
    "epochs": 1,
    "warmup_epochs": 0,
    "depth": 1,
    "embed_dim": 16,
    "num_heads": 2,
}
SMALL += ["--num-heads", "2", "--lr", "1e-2"]


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(TASKS, "depth", depth_task.Depth)


def test_a_task_from_outside_does_all_that_ours_do(registered, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def said(*words):
        assert main(list(words)) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    compared = said("depth", "compare", *SMALL, "--attention", "softmax", "linear", "--experiment", "both")
    assert "closeness %" in compared
    run = Path("runs/both/linear-s0")
    assert "best closeness" in said("depth", "train", "--resume", str(run))
    summary = json.loads((run / "summary.json").read_text())
    assert f"closeness {summary['best_closeness']:.2f} %" in said("depth", "eval", str(run))
    assert said("depth", "eval", str(run), "--count", "5").startswith("closeness ")
    Image.new("RGB", (8, 8)).save("black.png")
    assert "black.png: " in said("depth", "predict", "black.png", "--checkpoint", str(run))
    opened = subquad.open_trained(run)
    assert isinstance(opened, depth_task.TrainedDepth) and opened.farthest == 1.0
    said("report", "runs/both", "--no-scaling", "--output", "page.html")
    page = Path("page.html").read_text()
    assert all(text in page for text in ("closeness %", "depth by linear", "closeness to the depth of the held-out"))
    said("analyze", str(run), "--images", "black.png", "--measures", "entropy", "--shown", "0")
    assert json.loads(Path("analysis/analysis.json").read_text())["rows"]
    timed = said("bench", "--model", "deit_micro", "--head", "depth_map", "--img-size", "16", "--repeats", "1")
    assert "deit_micro" in timed
    # one run starts from another, as of every task
    said("depth", "train", *SMALL, "--initial-checkpoint", str(run), "--experiment", "again")


def test_a_task_is_registered_once_and_under_words_of_its_own(monkeypatch):
    monkeypatch.setattr(TASKS, "_entries", dict(TASKS._entries))
    for changes, reason in (
        ({"name": "other"}, "has recipes of the task depth"),
        ({"commands": {"dream": "depth dream"}}, "has a command to dream, known are train, compare"),
        ({"commands": {"train": "detect train"}}, "the command detect train of the task depth is another task's"),
    ):
        with pytest.raises(SubquadError, match=reason):
            register_task(type("Wrong", (depth_task.Depth,), changes))
    with pytest.raises(SubquadError, match=r"derived from subquad\.tasks\.Task"):
        register_task(int)
    assert subquad.register_task(depth_task.Depth) is depth_task.Depth
    register_task(depth_task.Depth)
    with pytest.raises(SubquadError, match="there is a task 'depth' already"):
        register_task(type("Second", (depth_task.Depth,), {}))


class Undecorated(depth_task.DepthRecipe):
    steps: int = option(3, "steps")


@dataclass(frozen=True)
class Unsaid(depth_task.DepthRecipe):
    steps: int = 3


def lacking(*names):
    """The task without some of what its class says."""
    own = {
        name: value for name, value in vars(depth_task.Depth).items() if name not in (*names, "__init__", "__dict__")
    }
    return type("Wrong", (Task,), {**own, "__init__": lambda self, recipe: None})


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        *(
            (lacking(name), f"Wrong can't be a task: .*{name}")
            for name in ("name", "title", "noun", "counted", "columns")
        ),
        (lacking("title", "recipe_class", "commands"), "title is .*; recipe_class is .*, got None; commands has words"),
        (lacking("loss", "judge"), "it has no method judge, loss"),
        ({"__init__": Task.__init__}, r"__init__ takes \(self, recipe\), got \(self, recipe: .*, model"),
        ({"recipe_class": Undecorated}, r"Undecorated is no dataclass: steps is no field of it without @dataclass"),
        ({"recipe_class": Unsaid}, r"are said by subquad\.tasks\.option\(…\), which steps is not"),
        ({"recipe_class": 3}, "recipe_class is a class derived from subquad.tasks.CommonRecipe, got 3"),
        ({"commands": ["depth train"]}, "commands has words of a command for actions"),
        ({"commands": {"train": ""}}, "a command is a word, or two, of small letters, got ''"),
        ({"commands": {"train": "depth do", "predict": "depth do"}}, "two of its commands are called depth do"),
        ({"commands": {"train": "train depth"}}, "the command train depth of the task depth is another task's"),
        ({"commands": {"train": "detect"}}, "the command detect of the task depth is another task's"),
        ({"columns": ()}, "columns is a tuple of subquad.tasks.Column, one at least"),
        ({"columns": ("closeness",)}, "columns is a tuple of subquad.tasks.Column, one at least"),
        ({"evaluation_flags": ("--count",)}, r"evaluation_flags is a tuple of subquad\.flags\.Flag"),
        ({"heads": "depth_map"}, "heads is a tuple of names, got 'depth_map'"),
    ],
)
def test_what_a_task_lacks_is_one_line_where_it_is_registered(task, reason, monkeypatch):
    """A plug-in that lacked a title ended every command of every task."""
    monkeypatch.setattr(TASKS, "_entries", dict(TASKS._entries))
    task = type("Wrong", (depth_task.Depth,), task) if isinstance(task, dict) else task
    with pytest.raises(SubquadError, match=reason) as error:
        register_task(task)
    assert "\n" not in str(error.value) and "depth" not in TASKS.loaded


class Unmade(depth_task.Depth):
    def __init__(self, recipe):
        self.recipe = recipe


class Unnoted(depth_task.Depth):
    @classmethod
    def build(cls, **creation):
        network = super().build(**creation)
        network.creation = {"backbone": network.creation["backbone"]}
        return network


class Unjudged(depth_task.Depth):
    def __init__(self, recipe):
        super().__init__(recipe)
        self.eval_images.count = 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (Unmade, "__init__ calls that of Task, which sets model, train_images, eval_images"),
        (Unnoted, "model.creation has the task depth and the arguments of build, got {'backbone'"),
        (Unjudged, r"there are no held-out images to judge by: shades, 8\+0 images"),
        ({"metadata": lambda self: None}, "metadata gives what JSON holds, got None"),
        (
            {"metadata": lambda self: {"a": torch.ones(1)}},
            "metadata gives what JSON holds, got .*: Object of type Tensor",
        ),
        ({"loss": lambda self, model, batch: 3.0}, "loss gives one number with its gradient, .* got 3.0"),
        ({"loss": lambda self, model, batch: model(batch[0]).mean(1)}, r"got a tensor of \(8,\)"),
        ({"loss": lambda self, model, batch: model(batch[0]).mean().detach()}, "got a tensor of .* without a gradient"),
        ({"judge": lambda self, *given: None}, "judge gives numbers by name, closeness among them, got None"),
        (
            {"judge": lambda self, *given: {"near": 1.0}},
            "judge gives numbers by name, closeness among them, got {'near'",
        ),
        ({"judge": lambda self, *given: {"closeness": "good"}}, "closeness among them, got {'closeness': 'good'}"),
    ],
)
def test_what_a_task_gives_otherwise_is_one_line(changes, reason, monkeypatch, tmp_path):
    """It was a fault of subquad, in epochs that had been trained; or nothing, and the run was no task's any more."""
    task = type("Wrong", (depth_task.Depth,), changes) if isinstance(changes, dict) else changes
    monkeypatch.setitem(TASKS, "depth", task)
    with pytest.raises(SubquadError, match=reason) as error:
        subquad.train(None, tmp_path / "run", task="depth", **TINY)
    assert "\n" not in str(error.value)


def test_figures_of_a_judgement_may_be_of_numpy_and_pytorch_and_the_task_is_noted_by_itself(monkeypatch, tmp_path):
    figures = {"closeness": torch.tensor(3.0), "share": np.float32(0.5), "count": np.int64(4)}
    changes = {"judge": lambda self, *given: figures, "metadata": lambda self: {"data": "shades", "farthest": 1.0}}
    monkeypatch.setitem(TASKS, "depth", type("Numbers", (depth_task.Depth,), changes))
    subquad.train(None, tmp_path / "run", task="depth", **TINY)
    (row,) = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert (row["eval_closeness"], row["eval_share"], row["eval_count"]) == (3.0, 0.5, 4)
    # without it the report took the run for one of classifiers, and called it damaged
    assert main(["report", str(tmp_path / "run"), "--no-scaling", "--output", str(tmp_path / "page.html")]) == 0


@pytest.mark.parametrize(
    ("name", "answer", "words", "reason"),
    [
        ("opened", None, ["eval"], "opened gives a subquad.tasks.Trained, got None"),
        ("evaluate", {"closeness": 3}, ["eval"], "what evaluate gives has a text, got {'closeness': 3}"),
        ("predict", ["near"], ["predict", "black.png", "--checkpoint"], "what predict gives has a text, got 'near'"),
    ],
)
def test_what_is_opened_judged_and_predicted_otherwise_is_one_line(
    name, answer, words, reason, monkeypatch, capsys, tmp_path
):
    monkeypatch.setitem(TASKS, "depth", depth_task.Depth)
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (8, 8)).save("black.png")
    subquad.train(None, "run", task="depth", **TINY)
    changes = {name: classmethod(lambda cls, *given, **settings: answer)}
    monkeypatch.setitem(TASKS, "depth", type("Wrong", (depth_task.Depth,), changes))
    assert main(["depth", *words, "run"]) == 2
    assert reason in capsys.readouterr().err


def test_a_command_of_ours_is_not_taken(registered, monkeypatch, capsys):
    monkeypatch.setattr(depth_task.Depth, "commands", {"evaluate": "bench"})
    assert main(["eval", "nowhere"]) == 2
    assert "two commands are called bench" in capsys.readouterr().err


@pytest.fixture
def plugged_in(tmp_path):
    """A folder with an installed package's entry points: the task, and one that can't be imported."""
    info = tmp_path / "tiny_depth-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-depth\nVersion: 1.0\n")
    lines = [f"[{ENTRY_POINTS}]", "depth = depth_task:Depth", "broken = nowhere_at_all:Task"]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_tasks_of_installed_packages_are_found(plugged_in, monkeypatch, capsys):
    monkeypatch.setattr(TASKS, "_entries", dict(TASKS._entries))
    monkeypatch.setattr(TASKS, "_found", None)
    monkeypatch.syspath_prepend(str(plugged_in))
    assert {"depth", "broken"} <= TASKS.keys() and TASKS["depth"] is depth_task.Depth
    assert main(["depth", "eval", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
    for words in (["broken"], ["broken", "train"], ["broken", "eval", "--epochs", "3"]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "the plug-in nowhere_at_all:Task of tiny-depth 1.0 can't be used" in said


@pytest.mark.slow
@pytest.mark.parametrize(("words", "shown"), [(["depth", "eval", "--help"], "--count"), (["--help"], "  depth  ")])
def test_an_installed_task_is_a_command(plugged_in, words, shown):
    paths = [str(plugged_in), str(Path(depth_task.__file__).parent), str(Path(subquad.__file__).parents[1])]
    command = [sys.executable, "-W", "ignore", "-m", "subquad", *words]
    environment = {"PYTHONPATH": ":".join(paths), "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and shown in done.stdout, done.stderr
