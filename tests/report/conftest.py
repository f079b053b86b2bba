"""Run folders as training leaves them, with made-up numbers and no weights."""

import json

import pytest
import yaml

FACTS = {
    "command": "subquad compare --config digits",
    "created": "2026-11-20T12:00:00+00:00",
    "versions": {"python": "3.11.7", "torch": "2.15.0"},
    "device": "cpu",
    "threads": 2,
    "params": 200_000,
    "macs": 3_500_000,
}


@pytest.fixture
def make_run(tmp_path):
    def make(name, attention, *, seed=0, epochs=5, top1=90.0, **recipe):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        recipe = {"model": "deit_micro", "data": "digits", "batch_size": 64, "settings": {}, **recipe}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"attention": attention, "seed": seed}))
        (folder / "run.json").write_text(json.dumps(FACTS))
        rows = [
            {
                "epoch": k,
                "train_loss": 2 / (k + 1),
                "eval_loss": 2 / (k + 1),
                "eval_top1": top1 - epochs + 1 + k,
                "eval_top5": 99.0,
                "epoch_seconds": 2.0,
                "images_per_second": 700.0 + k,
                "peak_memory_mb": 512.0,
            }
            for k in range(epochs)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return make
