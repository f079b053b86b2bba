import csv
import json
import math
import signal
import threading
import time

import pytest
import torch

from subquad.cli.boundary import explain
from subquad.errors import InterruptedRunError, SubquadError
from subquad.models import restore_model
from subquad.tasks import load_recipe
from subquad.tasks.classification import Recipe
from subquad.tasks.classification.mixed_loss import Objective
from subquad.tasks.task_table import make_task
from subquad.training import train
from subquad.training.journal import describe_schedule, epoch_line

SUMMARY = {
    "status",
    "epochs",
    "best_top1",
    "best_epoch",
    "last_top1",
    "eval_loss",
    "params",
    "macs",
    "train_seconds",
    "images_per_second",
    "peak_memory_mb",
}


def test_a_warm_up_that_never_ends_is_said(tiny):
    def schedule(**changes):
        return describe_schedule(make_task(tiny.replace(epochs=3, **changes)), 3, 5, 8, 1e-3)

    assert schedule(warmup_epochs=5).endswith(", which a warm-up of 25 updates does not reach")
    assert schedule(warmup_updates=15).endswith(", which a warm-up of 15 updates does not reach")
    assert schedule(warmup_epochs=2).endswith("adamw at 0.001") and schedule(warmup_updates=14).endswith(" 0.001")


def test_a_run_leaves_everything_in_its_folder(tiny, tmp_path):
    lines = []
    run = tmp_path / "a" / "run"
    summary = train(tiny, run, log=lines.append)
    assert {path.name for path in run.iterdir()} == {
        "recipe.yaml",
        "run.json",
        "metrics.jsonl",
        "metrics.csv",
        "tensorboard",
        "last.pt",
        "last.safetensors",
        "best.safetensors",
        "summary.json",
    }
    assert load_recipe(run / "recipe.yaml", Recipe) == tiny
    assert json.loads((run / "summary.json").read_text()) == summary
    assert summary.keys() == SUMMARY
    assert len(lines) == 4
    assert lines[1].startswith("2 epochs of ") and lines[1].endswith(" images, adamw at 0.001")
    assert all(len(line) <= 80 for line in lines)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0, 1]
    with (run / "metrics.csv").open() as file:
        assert list(csv.DictReader(file))[1] == {name: str(value) for name, value in rows[1].items()}
    facts = json.loads((run / "run.json").read_text())
    assert facts["classes"] == [str(digit) for digit in range(10)]
    assert facts["params"] == summary["params"] and facts["macs"] == summary["macs"]
    torch.load(run / "last.pt", weights_only=True)
    with pytest.raises(
        SubquadError, match=r"last\.pt is what a run goes on from: name its folder, .*run, or best\.safe"
    ):
        restore_model(run / "last.pt")


def test_the_weights_say_what_they_are(tiny, tmp_path):
    train(tiny.replace(attention="agent", settings="num_agents=4"), tmp_path / "run")
    model, note = restore_model(tmp_path / "run" / "best.safetensors")
    assert model(torch.zeros(1, 3, 8, 8)).shape == (1, 10)
    assert note["creation"]["attention"] == "agent"
    assert note["data"] == "digits"
    assert note["input"].keys() == {"mean", "std", "interpolation", "crop_pct", "crop_mode"}
    assert len(note["classes"]) == 10


@pytest.mark.slow
def test_the_same_seed_gives_the_same_weights(tiny, tmp_path, same_weights):
    recipe = tiny.replace(rotation=10, mixup=0.8, drop_path=0.2)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(recipe.replace(seed=seed), tmp_path / name)
    a, b, c = (tmp_path / name / "last.safetensors" for name in "abc")
    assert same_weights(a, b)
    assert not same_weights(a, c)


@pytest.mark.slow
def test_loader_processes_change_nothing(tiny, tmp_path, same_weights):
    recipe = tiny.replace(rotation=10, crop_padding=1, drop_path=0.2, epochs=1)
    for workers in (0, 2):
        train(recipe.replace(workers=workers), tmp_path / str(workers))
    assert same_weights(tmp_path / "0" / "last.safetensors", tmp_path / "2" / "last.safetensors")


@pytest.mark.slow
def test_accumulated_gradients_are_those_of_the_large_batch(tiny, tmp_path):
    recipe = tiny.replace(clip_grad=0.5, opt="momentum", lr=0.1)
    train(recipe.replace(batch_size=16), tmp_path / "large")
    train(recipe.replace(batch_size=4, grad_accum_steps=4), tmp_path / "small")
    large, small = (restore_model(tmp_path / name / "last.safetensors")[0].state_dict() for name in ("large", "small"))
    for name, weight in large.items():
        torch.testing.assert_close(small[name], weight, rtol=1e-4, atol=1e-5)


def test_every_part_of_a_recipe_works_together(tiny, tmp_path):
    recipe = tiny.replace(
        model_ema=True,
        model_ema_decay=0.5,
        mixup=0.8,
        cutmix=1.0,
        aa="rand-m9-mstd0.5-inc1",
        reprob=0.25,
        scale="0.5,1",
        hflip=0.5,
        color_jitter=0.4,
        layer_decay=None,
        clip_grad=1.0,
        grad_checkpointing=True,
        drop=0.1,
        drop_path=0.1,
        amp="bf16",
        cooldown_epochs=1,
        grad_accum_steps=2,
        attention="linear:feature_map=elu",
    )
    summary = train(recipe, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == summary["epochs"] == 3
    assert {"ema_loss", "ema_top1", "ema_top5"} <= rows[0].keys()
    assert summary["best_top1"] == max(max(row["eval_top1"], row["ema_top1"]) for row in rows)
    assert len(epoch_line(make_task(recipe), rows[0], 300)) <= 80


def test_blocks_in_chunks_learn_the_same(tiny, tmp_path):
    recipe = tiny.replace(attention="linear", drop_path=0.1, drop=0.0)
    losses = []
    for name, chunk_tokens in (("whole", None), ("chunks", 3)):
        train(recipe.replace(chunk_tokens=chunk_tokens), tmp_path / name)
        rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(row)["train_loss"] for row in rows])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    with pytest.raises(SubquadError, match="softmax attention can't be streamed"):
        make_task(tiny.replace(attention="softmax", chunk_tokens=3))


def test_a_network_starts_from_given_weights(tiny, tmp_path, same_weights):
    train(tiny, tmp_path / "first")
    weights = tmp_path / "first" / "last.safetensors"
    train(tiny.replace(initial_checkpoint=str(weights), lr=0.0, warmup_lr=0.0), tmp_path / "second")
    assert same_weights(weights, tmp_path / "second" / "last.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "deit_tinny"}, "unknown model 'deit_tinny': did you mean deit_tiny"),
        ({"attention": "agnet"}, "unknown attention 'agnet': did you mean agent"),
        ({"data": "digit"}, "did you mean digits"),
        ({"num_heads": 3}, "16.*3|3.*16"),
        ({"opt": "adamv"}, "unknown opt 'adamv'"),
        ({"settings": {"patch_size": 2}}, "patch_size is a field of the recipe"),
        ({"num_classes": 5}, "num_classes 5 is less than the 10 classes"),
        ({"batch_size": 64}, "40 training images are less than one batch of 64"),
        ({"initial_checkpoint": "nowhere.safetensors"}, r"nowhere\.safetensors"),
        ({"interpolation": "bicubik"}, "did you mean bicubic"),
        pytest.param(
            {"amp": "fp16"},
            "fp16 training needs a CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_folder(changes, message, tiny, tmp_path):
    with pytest.raises(SubquadError, match=message) as error:
        train(tiny.replace(**changes), tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_a_number_stops_the_run_and_keeps_the_last_good_epoch(tiny, tmp_path, monkeypatch):
    good = Objective.loss

    def spoil(self, logits, target):
        spoil.calls += 1
        return good(self, logits, target) * (math.nan if spoil.calls == 8 else 1)

    spoil.calls = 0
    monkeypatch.setattr(Objective, "loss", spoil)
    with pytest.raises(
        SubquadError, match=r"loss is nan in epoch 2, step 3, at lr .*; 1 whole epochs are kept"
    ) as error:
        train(tiny, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    state = restore_model(tmp_path / "run" / "last.safetensors")[0].state_dict()
    assert all(weight.isfinite().all() for weight in state.values() if weight.is_floating_point())
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_folder_that_exists_is_not_overwritten(tiny, tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(SubquadError, match=r"exists already, and has no run but mine: take another --experiment"):
        train(tiny, tmp_path)


def test_a_run_that_has_finished_is_left_as_it_is(tiny, tmp_path):
    summary = train(tiny, tmp_path / "run")
    before = (tmp_path / "run" / "last.pt").stat().st_mtime_ns
    assert train(tiny, tmp_path / "run", resume=True) == summary
    assert (tmp_path / "run" / "last.pt").stat().st_mtime_ns == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_how_it_goes_on_and_does(number, tiny, tmp_path, same_weights, request):
    handler = signal.getsignal(signal.SIGTERM)
    # what was started in the background of a shell ignores SIGINT
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    recipe = tiny.replace(epochs=4)

    def interrupt(line):
        if line.startswith("epoch 2/"):
            threading.Timer(0.01, signal.pthread_kill, (threading.main_thread().ident, number)).start()
            time.sleep(0.5)

    with pytest.raises(
        InterruptedRunError, match=r"2 of 4 epochs are kept, subquad train --resume .*run goes on"
    ) as caught:
        train(recipe, tmp_path / "run", log=interrupt)
    assert explain(caught.value)[1] == 128 + number
    assert signal.getsignal(signal.SIGTERM) is handler
    train(recipe, tmp_path / "run", resume=True)
    train(recipe, tmp_path / "unbroken")
    assert same_weights(tmp_path / "run" / "last.safetensors", tmp_path / "unbroken" / "last.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda names: names[::-1], r"other classes than when .*run was begun \(in another order\)"),
        (lambda names: [*names[:-1], "apple"], r"begun \(without apple and now with "),
        (lambda names: names[:-1], r"begun \(now with "),
    ],
)
def test_a_run_does_not_go_on_with_other_classes(tiny, tmp_path, change, message):
    train(tiny, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(facts | {"classes": change(facts["classes"])}))
    with pytest.raises(SubquadError, match=message):
        train(tiny, tmp_path / "run", resume=True)


def test_a_run_that_goes_on_with_other_images_says_so(tiny, tmp_path):
    lines = []
    train(tiny, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("subquad.training.loop.count_updates", lambda *given: 1)
        train(tiny, tmp_path / "run", resume=True, log=lines.append)
    assert any(line.startswith("the training images are others: epochs of") for line in lines)


def test_a_run_says_so_where_epochs_of_the_same_length_are_of_other_images(tiny, tmp_path):
    lines = []
    train(tiny, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    file = tmp_path / "run" / "run.json"
    facts = json.loads(file.read_text())
    now = "+".join(map(str, facts["images"]))
    file.write_text(json.dumps(facts | {"images": [7, 3]}))
    train(tiny, tmp_path / "run", resume=True, log=lines.append)
    assert f"the data are others: 7+3 when {tmp_path / 'run'} was begun, {now} now" in "\n".join(lines)


def test_metrics_that_are_cut_short_are_whole_where_a_run_goes_on(tiny, tmp_path):
    train(tiny, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    files = [tmp_path / "run" / name for name in ("metrics.jsonl", "metrics.csv")]
    whole = [file.read_bytes() for file in files]
    for file, content in zip(files, whole, strict=True):
        file.write_bytes(content[:-9])
    train(tiny, tmp_path / "run", resume=True)
    assert [file.read_bytes() for file in files] == whole


def test_the_hint_how_to_go_on_can_be_pasted(tiny, tmp_path):
    train(tiny, tmp_path / "my runs")
    with pytest.raises(SubquadError, match=r"go on with --resume '.*my runs'"):
        train(tiny, tmp_path / "my runs")


def test_a_damaged_state_is_named(tiny, tmp_path):
    train(tiny, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "last.pt").write_bytes(b"damaged")
    with pytest.raises(SubquadError, match=r"last\.pt is no state of a run"):
        train(tiny, tmp_path / "run", resume=True)


def test_a_whole_batch_of_broken_images_is_survived(tiny, tmp_path, monkeypatch):
    from subquad.data import BrokenImageError, ImageDataset

    real = ImageDataset.picture

    def picture(self, index):
        if self.labels[index]:
            raise BrokenImageError("cut short")
        return real(self, index)

    monkeypatch.setattr(ImageDataset, "picture", picture)
    lines = []
    summary = train(tiny.replace(batch_size=2, max_train_images=12), tmp_path / "run", log=lines.append)
    assert any("broken training images, the first is " in line for line in lines)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == summary["epochs"] == 2 and all(math.isfinite(row["train_loss"]) for row in rows)
    start, state = (
        make_task(tiny).model.state_dict(),
        restore_model(tmp_path / "run" / "last.safetensors")[0].state_dict(),
    )
    assert all(weight.isfinite().all() for weight in state.values())
    assert not torch.equal(state["head.weight"], start["head.weight"])
