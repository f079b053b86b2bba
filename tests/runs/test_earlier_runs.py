"""Runs that an earlier version left are opened, judged and gone on with: `tests/fixtures/runs` holds one of each task.

They were broken off behind their first epoch; `second_epochs.json` says what their second one came to then. The
segmenter's training loss is of later: `--distort` exchanged the channels of colours before, which it does not say.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import worlds
from safetensors.torch import load_file

import subquad
from subquad.runs import open_trained
from subquad.tasks import TASKS, fields_of, load_recipe
from subquad.tasks.backbone_arguments import arguments_of
from subquad.training import train

FIXTURES = Path(__file__).parents[1] / "fixtures" / "runs"
RUNS = sorted(path.parent.name for path in FIXTURES.glob("*/run.json"))
SECOND = json.loads((FIXTURES / "second_epochs.json").read_text())


@pytest.fixture
def run(request, tmp_path, monkeypatch):
    """A copy of a run beside the data that it names."""
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    if request.param == "segment":
        worlds.scenes(tmp_path / "scenes")
    if request.param == "detect":
        worlds.objects(tmp_path / "objects")
    return shutil.copytree(FIXTURES / request.param, tmp_path / request.param)


def task_of(run):
    return TASKS[json.loads((run / "run.json").read_text())["task"]]


def test_there_is_a_run_of_every_task():
    assert {task_of(FIXTURES / name).name for name in RUNS} == set(TASKS)


@pytest.mark.parametrize("run", RUNS, indirect=True)
def test_an_earlier_run_is_opened_and_judged(run):
    task = task_of(run)
    trained = open_trained(run)
    assert trained.task == task.name and trained.classes and not trained.model.training
    row = json.loads((run / "metrics.jsonl").read_text())
    title = task.columns[0].short.removeprefix("box ")
    said = task.evaluate(trained).text
    best = max(
        value for name, value in row.items() if name in {f"{k}_{task.columns[0].entry}" for k in ("eval", "ema")}
    )
    assert title in said and any(f"{best:.{digits}f}" in said for digits in (1, 2))
    assert open_trained(run / "best.safetensors", task=task.name, device="cpu").fingerprint == trained.fingerprint


@pytest.mark.parametrize("run", RUNS, indirect=True)
def test_an_earlier_run_goes_on_to_what_it_came_to_then(run):
    train(load_recipe(run / "recipe.yaml", task_of(run).recipe_class), run, resume=True)
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
    assert {name: row[name] for name in SECOND[run.name]} == pytest.approx(SECOND[run.name], rel=1e-3)


@pytest.mark.parametrize("run", RUNS, indirect=True)
def test_another_task_is_refused_in_one_line(run):
    other = next(name for name in TASKS if name != task_of(run).name)
    words = "a classifier" if other == "classify" else f"for `subquad {other}`"
    with pytest.raises(subquad.SubquadError, match=f"it is .*, not {words}"):
        subquad.open_trained(run, task=other)


def test_weights_are_read_once_and_behind_their_note(monkeypatch):
    from subquad.models import restoring
    from subquad.weights import files

    order = []
    for module, name in ((restoring, "read_weights"), (files, "_note_in")):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, own=own, name=name: order.append(name) or own(*given))
    open_trained(FIXTURES / "detect")
    assert order[0] == "_note_in" and order.count("read_weights") == 1


def test_what_no_task_here_is_for_is_said(tmp_path):
    from subquad.models import save_weights

    model = torch.nn.Linear(2, 2)
    model.creation = {"task": "depth"}
    save_weights(model, tmp_path / "a.safetensors")
    with pytest.raises(subquad.SubquadError, match="for the task 'depth', which is not here"):
        open_trained(tmp_path / "a.safetensors")


@pytest.mark.parametrize("run", RUNS, indirect=True)
def test_every_task_starts_from_the_best_weights_of_a_run(run, tmp_path):
    """Dense networks from a classifier that their backbone fits, the others from a run of their own."""
    task = task_of(run)
    recipe = load_recipe(run / "recipe.yaml", task.recipe_class)
    start = tmp_path / "start"
    if "head" in fields_of(task.recipe_class):
        classifier = subquad.create_model(**arguments_of(recipe), num_classes=5)
        start.mkdir()
        subquad.save_weights(classifier, start / "best.safetensors")
        weights = classifier.state_dict()
    else:
        shutil.copytree(run, start)
        weights = load_file(start / "best.safetensors")
    made = task(recipe.replace(initial_checkpoint=str(start))).model
    own = (made.pyramid.backbone if hasattr(made, "pyramid") else made).state_dict()
    compared = [name for name in own if name in weights]
    assert len(compared) > 5 and all(torch.equal(own[name], weights[name]) for name in compared)


@pytest.mark.parametrize("run", RUNS, indirect=True)
def test_every_kind_of_run_is_reported_and_looked_into(run, tmp_path):
    said = []
    page = subquad.report(run, tmp_path / "report.html", scaling=False, log=said.append)
    label = task_of(run).columns[0].title
    assert page.stat().st_size > 5000 and label in page.read_text()
    settings = {"measures": ["entropy"], "max_images": 2, "shown": 1, "img_size": None}
    if run.name in ("segment", "detect"):
        settings["images"] = [Path("scenes" if run.name == "segment" else "objects")]
    try:
        found = subquad.analyze(run, tmp_path / "analysis", **settings)
    except subquad.SubquadError as error:
        # sequences are no images, and that is said
        assert run.name == "lra" and "there are no images" in str(error)
        return
    assert found.rows[run.name] and (tmp_path / "analysis" / "analysis.html").is_file()


@pytest.mark.parametrize("name", ["classify", "segment", "detect"])
def test_an_opened_network_and_its_backbone_say_how_they_see_images(name):
    trained = open_trained(FIXTURES / name)
    backbone = trained.model.pyramid.backbone if name != "classify" else trained.model
    about = trained.model.creation if name == "detect" else vars(trained.input)
    for network in (trained.model, backbone):
        assert all(tuple(network.pretrained_cfg[key]) == tuple(about[key]) for key in ("mean", "std"))
    assert trained.model.pretrained_cfg["label_names"] == trained.classes


CLASSIFIER = FIXTURES / "classify"
PICTURE = Path(__file__)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: subquad.report([], "report.html"), "no runs to report: name"),
        (lambda: subquad.analyze([]), "no networks to analyze: name"),
        (lambda: subquad.analyze((), "analysis"), "no networks to analyze: name"),
        (lambda: subquad.predict(CLASSIFIER, PICTURE, top_k=0), "top_k must be a whole number of at least 1, got 0"),
        (lambda: subquad.predict(CLASSIFIER, PICTURE, top_k=-1), "top_k must be .*, got -1"),
        (lambda: subquad.predict(FIXTURES / "detect", PICTURE, threshold=2), "threshold must be .* at most 1, got 2"),
        (lambda: subquad.evaluate(CLASSIFIER, batch_size=0), "batch_size must be a whole number of at least 1, got 0"),
        (lambda: subquad.evaluate(CLASSIFIER, workers=-1), "workers must be .*, got -1"),
        (lambda: open_trained(CLASSIFIER, img_size=(24, 16, 3)), r"img_size must be .*, got \(24, 16, 3\)"),
        (
            lambda: open_trained(CLASSIFIER, img_size="a"),
            "img_size must be .* at least 1 or .*, got 'a'",
        ),
        (lambda: open_trained(CLASSIFIER, device="nosuch"), "device 'nosuch' can't be used: "),
        (lambda: open_trained(CLASSIFIER, device="cuda:99"), "device 'cuda:99' can't be used: "),
    ],
)
def test_arguments_of_functions_are_refused_in_one_line(call, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(subquad.SubquadError, match=words) as refusal:
        call()
    assert "\n" not in str(refusal.value) and not list(tmp_path.iterdir())
