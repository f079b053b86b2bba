"""A mechanism of somebody else's package, from training to the report, on the command line and without a line here."""

import json
import os
import subprocess
import sys

import pytest
from outside import install

SMALL = ["--data", "digits", "--epochs", "1", "--warmup-epochs", "0", "--max-train-images", "64", "--depth", "2"]
BENCH = ["--tokens", "16", "--dim", "16", "--num-heads", "2", "--repeats", "1"]


@pytest.mark.slow
def test_a_plug_in_trains_compares_benches_analyses_and_reports(tmp_path):
    site = install(tmp_path / "site")
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]

    def subquad(*arguments, status=0):
        command = [sys.executable, "-m", "subquad", *arguments]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    subquad("train", *SMALL, "--attention", "mean+softmax", "--experiment", "one")
    subquad("compare", *SMALL, "--attention", "softmax", "mean", "--experiment", "both")
    assert "mean" in subquad("bench", "--attention", "mean", "softmax", *BENCH, "--picture", "bench.svg")
    runs = ["runs/both/mean-s0", "runs/one"]
    looked = ["--max-images", "2", "--max-held-out", "4", "--removed", "--confusion"]
    assert "mean-s0, top-1 % without keys" in subquad("analyze", *runs, *looked, "--output", "looked")
    rows = json.loads((tmp_path / "looked" / "analysis.json").read_text())["rows"]
    assert {row["mechanism"] for row in rows if row["network"] == "one"} == {"mean", "softmax"}
    subquad("report", "runs/both", "runs/one")
    page, picture = (tmp_path / "report.html").read_text(), (tmp_path / "bench.svg").read_text()
    looked = (tmp_path / "looked" / "analysis.html").read_text()
    assert "mean" in page and all("colour-3fa2a7" in markup for markup in (page, picture, looked))
    assert "mean" in subquad("list", "mechanisms")
    # without the package its run says what is missing
    paths.pop(0)
    assert "unknown attention 'mean'" in subquad("eval", "runs/both/mean-s0", status=2)
