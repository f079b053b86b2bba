"""Two processes train one dense network and judge it together, as one process judges it."""

import json
import os
import subprocess
import sys

import pytest
import worlds

from subquad.runs import open_trained
from subquad.tasks.detection import DetectRecipe, judge_detector
from subquad.tasks.segmentation import SegmentRecipe, judge_segmenter

CODE = """
import sys
import torch
from subquad.tasks import TASKS, load_recipe
from subquad.training import train
torch.set_num_threads(1)
kind = TASKS[sys.argv[1]].recipe_class
train(load_recipe("recipe.yaml", kind), "run")
"""
SMALL = {
    "model": "pvt_tiny",
    "settings": {"embed_dims": [8, 16, 24, 32], "num_heads": [1, 2, 2, 4], "depths": [1, 1, 1, 1]},
    "epochs": 1,
    "warmup_epochs": 0,
    "lr": 1e-3,
}


def trained(recipe, folder):
    """The last row of a run in two processes."""
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    (folder / "script.py").write_text(CODE)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, "script.py", recipe.task],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.long
@pytest.mark.slow
def test_scenes_of_both_processes_are_counted_once(tmp_path):
    data = str(worlds.scenes(tmp_path / "scenes"))
    row = trained(SegmentRecipe(data=data, img_size=(32, 32), batch_size=2, **SMALL), tmp_path)
    alone = judge_segmenter(open_trained(tmp_path / "run")).result
    assert (alone.miou, alone.accuracy) == pytest.approx((row["eval_miou"], row["eval_accuracy"]), abs=0.01)


@pytest.mark.long
@pytest.mark.slow
def test_objects_of_both_processes_are_judged_together(tmp_path):
    data = str(worlds.objects(tmp_path / "objects"))
    sizes = {"img_size": (64, 64), "short_side": (64,), "long_side": 96, "head_channels": 16, "batch_size": 1}
    row = trained(DetectRecipe(data=data, head="retinanet", **sizes, **SMALL), tmp_path)
    alone = judge_detector(open_trained(tmp_path / "run")).result
    assert alone.box["ap50"] == pytest.approx(row["eval_box_ap50"], abs=0.5)
