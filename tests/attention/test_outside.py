"""A mechanism of somebody else's package, from training to the report, on the command line and without a line here."""

import json
import os
import subprocess
import sys

import pytest
from outside import install

from subquad import ATTENTION
from subquad.cli import main

SMALL = ["--data", "digits", "--epochs", "1", "--warmup-epochs", "0", "--max-train-images", "64", "--depth", "2"]
BENCH = ["--tokens", "16", "--dim", "16", "--num-heads", "2", "--repeats", "1"]


@pytest.mark.slow
def test_the_command_finds_an_installed_package(tmp_path):
    paths = [str(install(tmp_path / "site")), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "subquad", "list", "mechanisms", "--filter", "mean"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "q v padding" in done.stdout


@pytest.mark.slow
def test_a_plug_in_trains_compares_benches_analyses_and_reports(clean, tmp_path, monkeypatch, capsys):
    install(clean)
    monkeypatch.chdir(tmp_path)

    def subquad(*arguments, status=0):
        assert main(list(arguments)) == status
        said = capsys.readouterr()
        return said.out + said.err

    subquad("train", *SMALL, "--attention", "mean+softmax", "--experiment", "one")
    subquad("compare", *SMALL, "--attention", "softmax", "mean", "--experiment", "both")
    assert "mean" in subquad("bench", "--attention", "mean", "softmax", *BENCH, "--picture", "bench.svg")
    runs = ["runs/both/mean-s0", "runs/one"]
    looked = ["--max-images", "2", "--max-held-out", "4", "--removed", "--confusion"]
    assert "mean-s0, top-1 % without keys" in subquad("analyze", *runs, *looked, "--output", "looked")
    rows = json.loads((tmp_path / "looked" / "analysis.json").read_text())["rows"]
    assert {row["mechanism"] for row in rows if row["network"] == "one"} == {"mean", "softmax"}
    subquad("report", "runs/both", "runs/one")
    pages = [(tmp_path / name).read_text() for name in ("report.html", "bench.svg", "looked/analysis.html")]
    assert "mean" in pages[0] and all("3fa2a7" in page for page in pages)
    # without the package its run says what is missing
    monkeypatch.setattr(ATTENTION, "_entries", {k: v for k, v in ATTENTION._entries.items() if k != "mean"})
    assert "unknown attention 'mean'" in subquad("eval", "runs/both/mean-s0", status=2)
