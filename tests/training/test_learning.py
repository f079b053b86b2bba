"""What a run learns from, and what it keeps: every number that it is given counts, each in its own way."""

import copy
import functools
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from subquad import SubquadError, instructions
from subquad.data import load_dataset
from subquad.runs.run_folder import RunFolder
from subquad.runs.run_state import load_state, save_state
from subquad.tasks.classification.classification_task import Classification
from subquad.tasks.network_costs import count_macs_of
from subquad.tasks.task_table import make_task
from subquad.training import loop, train
from subquad.training.journal import epoch_line, summarise

# one step of plain gradient descent at a rate of 1 is the gradient itself
STEP = {"opt": "momentum", "momentum": 0.0, "weight_decay": 0.0, "sched": "constant", "lr": 1.0, "warmup_epochs": 0}


@functools.cache
def few(name, split):
    return load_dataset(name, split=split, max_images=40 if split == "train" else 10)


@pytest.fixture(autouse=True)
def small_data(monkeypatch):
    """Judge by ten images, and read them once."""

    def load(name, *, split, **settings):
        return copy.copy(few(name, split))

    monkeypatch.setattr("subquad.tasks.classification.classification_task.load_dataset", load)


@pytest.fixture
def still(tiny, tmp_path):
    """The recipe of one update, and the weights before it."""
    recipe = tiny.replace(**STEP, epochs=1, updates_per_epoch=1)
    train(recipe.replace(lr=0.0), tmp_path / "still")
    return recipe, load_file(tmp_path / "still" / "last.safetensors")


def learned(recipe, folder, before):
    """How far one update has moved each weight."""
    train(recipe, folder)
    return {name: weight - before[name] for name, weight in load_file(folder / "last.safetensors").items()}


def test_gradients_that_are_accumulated_are_a_mean_and_no_sum(still, tmp_path):
    recipe, before = still
    whole = learned(recipe, tmp_path / "whole", before)
    parts = learned(recipe.replace(batch_size=2, grad_accum_steps=4), tmp_path / "parts", before)
    for name, step in whole.items():
        torch.testing.assert_close(parts[name], step, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("norm", [0.02, 0.005])
def test_a_gradient_is_clipped_to_the_norm_that_is_asked_for(still, tmp_path, norm):
    recipe, before = still
    steps = learned(recipe.replace(clip_grad=norm), tmp_path / "clipped", before)
    assert torch.cat([step.flatten() for step in steps.values()]).norm() == pytest.approx(norm, rel=1e-3)


def scripted(monkeypatch, values):
    """Let judgements say these accuracies, one after the other; what the weights were at each of them."""
    seen = []

    def judge(self, model, loader, device, amp_dtype):
        seen.append({name: weight.clone() for name, weight in model.state_dict().items()})
        return {"loss": 1.0, "top1": values[len(seen) - 1], "top5": 0.0}

    monkeypatch.setattr(Classification, "judge", judge)
    return seen


def assert_kept(file, weights, **noted):
    kept = load_file(file)
    assert all(torch.equal(kept[name], weight) for name, weight in weights.items()), file
    with safe_open(file, framework="pt") as content:
        note = json.loads(content.metadata()["subquad"])
    assert {name: note[name] for name in noted} == noted


def test_the_best_weights_are_the_first_of_the_highest_whether_averaged_or_not(tiny, tmp_path, monkeypatch):
    # of four epochs: the weights, then their average
    seen = scripted(monkeypatch, [10.0, 5.0, 20.0, 30.0, 30.0, 25.0, 15.0, 28.0])
    run = tmp_path / "run"
    summary = train(tiny.replace(epochs=4, model_ema=True, model_ema_decay=0.5), run)
    assert (summary["best_top1"], summary["best_epoch"], summary["last_top1"]) == (30.0, 1, 15.0)
    assert_kept(run / "best.safetensors", seen[3], top1=30.0, epoch=1)
    assert_kept(run / "last.safetensors", seen[6], top1=15.0, epoch=3)
    assert_kept(run / "last_ema.safetensors", seen[7], top1=28.0, epoch=3)
    assert not torch.equal(seen[6]["head.weight"], seen[7]["head.weight"])


def test_weights_that_are_not_averaged_can_be_the_best(tiny, tmp_path, monkeypatch):
    seen = scripted(monkeypatch, [10.0, 5.0, 9.0, 8.0])
    train(tiny.replace(model_ema=True, model_ema_decay=0.5), tmp_path / "run")
    assert_kept(tmp_path / "run" / "best.safetensors", seen[0], top1=10.0, epoch=0)


def rows_of(run):
    timed = ("epoch_seconds", "images_per_second", "peak_memory_mb")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in timed} for row in rows]


def test_a_run_that_was_broken_off_is_the_unbroken_one_in_all_it_keeps(tiny, tmp_path, same_weights):
    recipe = tiny.replace(epochs=4, model_ema=True, model_ema_decay=0.9, model_ema_warmup=True, drop_path=0.3, drop=0.2)
    broken, whole = tmp_path / "broken", tmp_path / "whole"

    def stop(line):
        if line.startswith("epoch 2/"):
            raise KeyboardInterrupt

    with pytest.raises(SubquadError, match="2 of 4 epochs are kept"):
        train(recipe, broken, log=stop)
    # killed between the metrics and the state: the row of an epoch that is not whole
    folder = RunFolder(broken)
    folder.write_rows([*folder.rows(), folder.rows()[-1]])
    summaries = train(recipe, broken, resume=True), train(recipe, whole)
    for name in ("last.safetensors", "last_ema.safetensors", "best.safetensors"):
        assert same_weights(broken / name, whole / name), name
    assert rows_of(broken) == rows_of(whole) and len(rows_of(whole)) == 4
    for name in ("best_top1", "best_epoch", "last_top1", "epochs", "eval_loss"):
        assert summaries[0][name] == summaries[1][name], name


def test_the_best_weights_of_before_stay_the_best_of_a_run_that_goes_on(tiny, tmp_path, monkeypatch):
    seen = scripted(monkeypatch, [10.0, 30.0, 20.0, 25.0])
    run = tmp_path / "run"

    def stop(line):
        if line.startswith("epoch 2/"):
            raise KeyboardInterrupt

    with pytest.raises(SubquadError, match="interrupted"):
        train(tiny.replace(epochs=4), run, log=stop)
    summary = train(tiny.replace(epochs=4), run, resume=True)
    assert (summary["best_top1"], summary["best_epoch"]) == (30.0, 1)
    assert_kept(run / "best.safetensors", seen[1], top1=30.0, epoch=1)


def test_a_run_of_another_number_of_processes_is_not_gone_on_with(tiny, tmp_path):
    run = tmp_path / "run"
    train(tiny, run)
    (run / "summary.json").unlink()
    state = load_state(run / "last.pt")
    state.total_batch *= 2
    save_state(state, run / "last.pt")
    with pytest.raises(SubquadError, match="16 images an update, not 8"):
        train(tiny, run, resume=True)


def test_a_warm_average_is_nearer_to_the_weights_than_a_cold_one(tiny, tmp_path):
    apart = {}
    for warm in (True, False):
        run = tmp_path / str(warm)
        train(tiny.replace(model_ema=True, model_ema_warmup=warm), run)
        last, average = load_file(run / "last.safetensors"), load_file(run / "last_ema.safetensors")
        apart[warm] = sum((last[name] - average[name]).norm() for name in last)
    assert apart[True] < 0.9 * apart[False]


def test_every_epoch_has_other_images_in_front_and_other_random_numbers_in_its_steps(tiny, tmp_path, monkeypatch):
    drawn, images, modes = [], [], set()
    real = Classification.loss

    def loss(self, model, batch):
        drawn.append(torch.rand(()).item())
        images.append(batch[0].clone())
        modes.add(model.training)
        return real(self, model, batch)

    monkeypatch.setattr(Classification, "loss", loss)
    for seed in (1, 2):
        train(tiny.replace(seed=seed), tmp_path / str(seed))
    steps = 5
    first = range(0, len(drawn), steps)
    assert len(drawn) == 4 * steps and len({drawn[k] for k in first}) == 4
    for one, other in itertools.combinations(first, 2):
        assert not torch.equal(images[one], images[other])
    assert modes == {True}


def test_the_loss_of_an_epoch_is_the_mean_of_all_its_steps(tiny, tmp_path, monkeypatch):
    losses = itertools.count(1)

    def loss(self, model, batch):
        return 0 * model(batch[0]).sum() + next(losses)

    monkeypatch.setattr(Classification, "loss", loss)
    train(tiny.replace(epochs=1, log_interval=2), tmp_path / "run")
    assert rows_of(tmp_path / "run")[0]["train_loss"] == 3


def test_speed_is_images_by_the_seconds_of_training_alone(tiny, tmp_path, monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    summary = train(tiny, tmp_path / "run")
    assert summary["images_per_second"] == 40 and summary["train_seconds"] == 4


def test_the_rate_that_is_written_down_is_that_of_the_last_layer(tiny, tmp_path):
    train(tiny.replace(layer_decay=0.5, sched="constant", warmup_epochs=0), tmp_path / "run")
    assert [row["lr"] for row in rows_of(tmp_path / "run")] == [1e-3, 1e-3]


def test_an_evaluation_that_is_not_finite_stops_the_run(tiny, tmp_path, monkeypatch):
    def judge(self, model, loader, device, amp_dtype):
        return {"loss": float("inf"), "top1": 10.0, "top5": 10.0}

    monkeypatch.setattr(Classification, "judge", judge)
    with pytest.raises(SubquadError, match="loss is inf in the evaluation after epoch 1"):
        train(tiny, tmp_path / "run")
    assert not (tmp_path / "run" / "last.pt").exists()


def test_an_epoch_may_have_all_updates_that_there_are_images_for_and_no_more(tiny, tmp_path):
    train(tiny.replace(epochs=1, updates_per_epoch=5), tmp_path / "all")
    for count in (0, 6):
        with pytest.raises(SubquadError, match="updates_per_epoch"):
            train(tiny.replace(updates_per_epoch=count), tmp_path / "more")


def test_a_summary_is_of_all_epochs_and_a_line_counts_from_one(tiny):
    costs = {"eval_loss": 0.5, "epoch_seconds": 2.0, "images_per_second": 8.0, "train_loss": 1.0}
    rows = [costs | {"epoch": k, "eval_top1": 50.0 - k, "peak_memory_mb": 9.0 - k} for k in range(3)]
    found = summarise(rows, "top1", 50.0, 0, 7, 8)
    assert (found["train_seconds"], found["last_top1"], found["peak_memory_mb"]) == (6.0, 48.0, 9.0)
    assert epoch_line(make_task(tiny), rows[0], 3).startswith("epoch 1/3 ")


def test_multiply_adds_are_half_of_the_operations_that_are_counted():
    assert count_macs_of(nn.Linear(3, 5, bias=False), torch.ones(2, 3)) == 30


@pytest.mark.parametrize(("amp", "loops"), [("bf16", True), ("bf16", False), ("", True)])
def test_a_run_says_where_bf16_is_slower_than_fp32(tiny, tmp_path, monkeypatch, amp, loops):
    monkeypatch.setattr(instructions, "loops_over_bf16", lambda: loops)
    lines = []
    train(tiny.replace(epochs=1, amp=amp), tmp_path / "run", log=lines.append)
    said = [line for line in lines if "slower than fp32" in line]
    assert len(said) == (amp == "bf16" and loops)
    # a recipe that asks for it can't be left out
    assert all("--amp ''" in line for line in said)
