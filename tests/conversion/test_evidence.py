"""`scripts/convert_evidence.py` on a segmenter: a JSON for each cell, gone on with, its table, and the speeds."""

import json
import sys
from pathlib import Path

import pytest
import worlds

import subquad

SCRIPTS = Path(__file__).parents[2] / "scripts"
SIZES = {"model": "deit_tiny", "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "head_channels": 64}


@pytest.mark.slow
def test_a_segmenter_is_judged_by_its_scenes(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPTS)
    import convert_evidence

    data = worlds.scenes(tmp_path / "scenes")
    settings = {"epochs": 2, "batch_size": 2, "img_size": (64, 64), "attention": "softmax"}
    settings |= {"warmup_epochs": 0, "warmup_updates": 1}
    subquad.train(None, tmp_path / "teacher", task="segment", data=str(data), **SIZES, **settings)

    def run(*more):
        flags = ["--data-dir", str(data), "--output", str(tmp_path / "out"), "--attention", "linear", "--seeds", "0"]
        flags += ["--updates", "4", "--judged", "10"]
        monkeypatch.setattr(sys, "argv", ["convert_evidence.py", str(tmp_path / "teacher"), *flags, *more])
        convert_evidence.main()
        return capsys.readouterr().out

    def stopped(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(convert_evidence, "from_scratch", stopped)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert "distilled:" in capsys.readouterr().out
    # the student that is there is gone on with
    told = run()
    assert "mIoU of" in told and "distilled:" not in told
    cell = json.loads((tmp_path / "out" / "linear-keep0-seed0.json").read_text())
    assert cell["measure"] == "mIoU"
    assert all(0 <= cell[step] <= 1 for step in ("teacher", *convert_evidence.STEPS))
    # what is there is not made again
    assert "distilled:" not in run()
    assert list((tmp_path / "out").glob("*-work")) == []
    assert "linear at 128×128" in run("--speed")
    speed = json.loads((tmp_path / "out" / "speed-linear.json").read_text())
    assert speed["gain"] == speed["teacher"] / speed["student"] > 0
    assert f"{speed['gain']:.2f}" in run("--status")
