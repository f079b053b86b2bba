"""Runs in processes of their own: killed ones, and several at once."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from subquad.runs import open_trained
from subquad.tasks.classification import Recipe
from subquad.tasks.classification.trained_classifier import judge
from subquad.training import train

CODE = """
import sys
import torch
from subquad.tasks import load_recipe
from subquad.tasks.classification import Recipe
from subquad.training import train
torch.set_num_threads(1)
train(load_recipe(sys.argv[1], Recipe), sys.argv[2], resume=sys.argv[3] == "resume")
"""


def start(recipe, folder, mode, tmp_path, processes=1):
    """Train a recipe with `processes` processes."""
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    (tmp_path / "script.py").write_text(CODE)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.Popen(
        [sys.executable, *(launch if processes > 1 else []), "script.py", "recipe.yaml", folder, mode],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_with_the_weights_of_an_unbroken_one(tiny, tmp_path, same_weights):
    recipe = tiny.replace(
        epochs=8,
        max_train_images=200,
        model_ema=True,
        model_ema_decay=0.9,
        mixup=0.8,
        cutmix=1.0,
        rotation=10,
        crop_padding=1,
        reprob=0.2,
        drop_path=0.2,
        attention="agent",
    )
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    process = start(recipe, "broken", "new", tmp_path)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if (broken / "last.pt").exists() and len(metrics(broken)) >= 3:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.01)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert 3 <= len(metrics(broken)) < 8
    finish(start(recipe, "broken", "resume", tmp_path))
    finish(start(recipe, "unbroken", "new", tmp_path))
    for name in ("last.safetensors", "last_ema.safetensors", "best.safetensors"):
        assert same_weights(broken / name, unbroken / name), name
    learned = ("epoch", "train_loss", "eval_loss", "eval_top1", "ema_loss", "ema_top1", "lr")
    assert [[row[name] for name in learned] for row in metrics(broken)] == [
        [row[name] for name in learned] for row in metrics(unbroken)
    ]


@pytest.mark.slow
def test_two_processes_learn_as_one_with_twice_the_batch(tiny, tmp_path):
    recipe = tiny.replace(
        epochs=3,
        max_train_images=100,
        rotation=10,
        crop_padding=1,
        clip_grad=1.0,
        lr=None,
        lr_base_size=16,
        opt="momentum",
        lr_base=0.05,
    )
    finish(start(recipe, "two", "new", tmp_path, processes=2))
    train(recipe.replace(batch_size=16), tmp_path / "one")
    for two, one in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        for name in ("train_loss", "eval_loss", "eval_top1", "eval_top5", "lr"):
            assert two[name] == pytest.approx(one[name], rel=1e-4), name


@pytest.mark.long
@pytest.mark.slow
def test_several_processes_judge_the_weights_that_are_kept(tmp_path):
    """Batch norms of each process have seen its own images alone."""
    settings = {"depths": [1, 1, 1, 1], "embed_dims": [32, 32, 32, 32]}
    small = {"img_size": (32, 32), "max_train_images": 32, "batch_size": 4, "epochs": 1, "warmup_epochs": 0, "lr": 1e-3}
    average = {"model_ema": True, "model_ema_decay": 0.5}
    recipe = Recipe(model="softnet_tiny", settings=settings, **small, **average)
    finish(start(recipe, "two", "new", tmp_path, processes=2))
    (row,) = metrics(tmp_path / "two")
    for kind, file in (("eval", "last.safetensors"), ("ema", "last_ema.safetensors")):
        kept = judge(open_trained(tmp_path / "two" / file)).result
        assert kept.loss == pytest.approx(row[f"{kind}_loss"], rel=1e-5)
