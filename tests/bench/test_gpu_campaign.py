"""The campaign on a GPU, as far as it can be tried without one: its commands are taken, its page holds all of it."""

import importlib.util
import sys
from pathlib import Path

import pytest

from subquad import ATTENTION
from subquad.cli import make_parser
from subquad.models import NETWORKS


@pytest.fixture(scope="module")
def campaign():
    path = Path(__file__).parents[2] / "scripts" / "gpu_campaign.py"
    spec = importlib.util.spec_from_file_location("gpu_campaign", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_campaign"] = module
    spec.loader.exec_module(module)
    return module


def test_every_command_is_one_that_the_program_takes(campaign):
    steps = campaign.steps("cifar10.tar.xz")
    assert len({step.name for step in steps}) == len(steps)
    parser = make_parser()
    for words in {words for step in steps for words in (step.command, step.toy) if words[:1] == ("subquad",)}:
        parser.parse(list(words[1:]))


def test_it_covers_every_mechanism_and_every_file_of_tests(campaign):
    steps = campaign.steps("cifar10.tar.xz")
    for first in ("tune-b1", "operations-b1", "layers-b64-backward", "compiled"):
        words = {word for step in steps if step.name.removesuffix("-newer") == first for word in step.command}
        assert ATTENTION.keys() - {"softmax"} <= words, first
    tested = {word for step in steps for word in step.command if word.startswith("tests/gpu/")}
    assert tested == {f"tests/gpu/{path.name}" for path in (campaign.ROOT / "tests" / "gpu").glob("test_*.py")}
    named = {name for models in campaign.networks().values() for name in models}
    assert named <= NETWORKS.keys()
    # whether it is right stands first, and what is timed is what users have before they tune
    places = [step.name.partition("-")[0] for step in steps]
    assert places.index("correctness") < places.index("operations") < places.index("tune") < places.index("evidence")


def test_steps_are_kept_and_not_run_again(campaign, tmp_path, monkeypatch, capsys):
    ran = []

    def answer(step, seconds, toy):
        ran.append(step.name)
        status = {"operations-b1": 0, "layers-b1": 2, "compiled": -1}[step.name]
        about = {"date": "2026-11-22", "versions": "torch 3", "seconds": 1.0, "command": f"run {step.name}"}
        return about | {"status": status, "said": f"said {step.name}"}

    monkeypatch.setattr(campaign, "run", answer)
    monkeypatch.setattr(
        sys, "argv", ["x", "--toy", "--output", str(tmp_path), "--only", "operations-b1", "layers-b1", "compiled"]
    )
    campaign.main()
    campaign.main()
    assert ran == ["operations-b1", "layers-b1", "compiled", "compiled"]
    page = (tmp_path / "page.md").read_text()
    assert "said operations-b1" in page
    assert "failed with status 2" in page
    assert "time was up" in capsys.readouterr().out


def test_progress_bars_are_left_out(campaign):
    assert campaign.bare("a\n 10%|█   | 1/10\r 20%|██  | 2/10\n\x1b[31mb\x1b[0m  ") == "a\nb"
