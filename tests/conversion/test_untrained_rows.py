"""Rows without any training stand in front of the steps, judged on the same images, and are measured once."""

import json
from types import SimpleNamespace

import pytest
import torch
from foreign import FOREIGN, sharp, side_of

import subquad
from subquad import ATTENTION, SubquadError
from subquad.cli import main
from subquad.conversion import Judging, Plan, conversion_of, conversion_run, convert_run, untrained_rows
from subquad.conversion.conversion_record import REPORT, read_record
from subquad.conversion.judged_steps import JudgedSteps
from subquad.conversion.judging import Comparison
from subquad.conversion.training_free import NystromAttention
from subquad.conversion.untrained_rows import judge_untrained, untrained_students
from subquad.data import InputConfig

PICTURES = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(1))
LANDMARKS, AGENTS = "4 landmarks, untrained", "agents, untrained"


def judged_steps(model, said, side=64):
    def drawn(update):
        return PICTURES[..., :side, :side]

    drawn.batch_size = 4
    known = {"data": "photos", "data_dir": None, "classes": (), "held_out": lambda **given: None}
    plan = Plan(source="somewhere", images="photos", data_dir="there", batch_size=4)
    opened = SimpleNamespace(model=model, **known)
    return JudgedSteps(opened, InputConfig((side, side)), plan, Judging(max_judged=4), drawn, said.append)


@pytest.mark.parametrize("attention", sorted(ATTENTION))
def test_agents_have_a_row_unless_the_student_is_they(attention):
    model = sharp("timm SigLIP")
    student = subquad.convert(model, attention)
    rows = untrained_students(student, model, Plan(source="a", images="b", attention=attention, blocks=(1,)))
    assert list(rows) == ([LANDMARKS] if attention == "agent" else [LANDMARKS, AGENTS])
    assert all(list(conversion_of(make()).paths) == [1] for make in rows.values())


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_networks_of_every_family_have_a_row_or_one_line_that_says_why(name, tmp_path):
    side, said = side_of(name), []
    model = sharp(name)
    student = subquad.convert(model, "linear", img_size=side)
    judged = judged_steps(model, said, side)
    judged.note("swapped", student)
    rows = untrained_students(student, model, Plan(source="a", images="b", attention="linear", img_size=side))
    said.clear()
    judge_untrained(judged, rows, tmp_path / "rows.json", {}, said.append)
    assert [*rows, "swapped"] == list(judged.steps) and "\n" not in "".join(said)


def test_what_refuses_is_left_out_with_one_line_and_what_is_kept_is_not_made_again(tmp_path):
    said, made = [], []
    model = sharp("timm ViT")
    judged = judged_steps(model, said)
    judged.note("swapped", subquad.convert(model, "linear"))
    said.clear()

    def refused():
        raise SubquadError("no square grid")

    def broken():
        student = subquad.convert(model, "linear")
        torch.nn.init.constant_(next(student.parameters()), torch.nan)
        return student

    def same():
        made.append(1)
        return subquad.convert(model, "softmax")

    students = {"refused": refused, "broken": broken, "same": same}
    for _ in range(2):
        judge_untrained(judged, students, tmp_path / "rows.json", {"seed": 0}, said.append)
    assert made == [1]
    assert list(judged.steps) == ["same", "swapped"]
    assert judged.steps["same"].error < 1e-6 < judged.steps["swapped"].error
    assert said[:2] == ["refused: left out, no square grid", "broken: left out, its features are not finite"]
    assert said[-1].startswith("same: 4 images") and said[-1].endswith(", as measured before")
    # what they are of has changed, or the file is damaged
    judge_untrained(judged, {"same": same}, tmp_path / "rows.json", {"seed": 1}, said.append)
    (tmp_path / "rows.json").write_text("{")
    judge_untrained(judged, {"same": same}, tmp_path / "rows.json", {"seed": 1}, said.append)
    assert made == [1, 1, 1]


def test_a_map_that_is_not_finite_is_refused_in_one_line():
    grid = subquad.TokenGrid(4, 4)
    with pytest.raises(SubquadError, match="no pseudo-inverse"):
        NystromAttention((2, 2))(*[torch.full((1, 1, 16, 4), torch.nan)] * 3, grid=grid, kv_grid=grid)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two blocks on maps of 4×4."""
    sizes = {"model": "deit_tiny", "img_size": 8, "patch_size": 2, "embed_dim": 16, "depth": 2, "num_heads": 2}
    folder = tmp_path_factory.mktemp("runs") / "teacher"
    subquad.train("digits", folder, **sizes, epochs=1, batch_size=16, max_train_images=32, attention="softmax")
    return folder


def test_the_table_of_the_command_has_them_where_they_are_asked_for(trained, tmp_path, capsys):
    fast = ["--align-updates", 2, "--distil-updates", 0, "--batch-size", 16, "--max-judged", 20, "--labelled", "digits"]
    command = ["convert", trained, "--attention", "linear", "--images", "digits", *fast]
    assert main([str(one) for one in [*command, "--output", tmp_path / "plain"]]) == 0
    assert "untrained" not in capsys.readouterr().out
    assert main([str(one) for one in [*command, "--baseline", "--output", tmp_path / "out"]]) == 0
    printed = capsys.readouterr().out
    table = printed[printed.rindex(LANDMARKS) :]
    assert all(line.startswith(f"{name} ") for line, name in zip(table.splitlines(), ROWS, strict=False))
    assert all(len(line) <= 80 for line in table.splitlines()[:4])
    record, plain = read_record(tmp_path / "out"), read_record(tmp_path / "plain")
    assert list(record.steps) == list(record.labelled.steps) == ROWS
    assert {step.images for step in record.steps.values()} == {20}
    assert record.steps[LANDMARKS].teacher_score == record.steps["aligned"].teacher_score
    # the student is the same
    assert {name: record.steps[name] for name in plain.steps} == plain.steps
    page = (tmp_path / "out" / "conversion.html").read_text()
    assert LANDMARKS in page and AGENTS in page and "nobody has trained" in page
    assert "nobody has trained" not in (tmp_path / "plain" / "conversion.html").read_text()
    assert not (tmp_path / "out" / "untrained.json").exists()


ROWS = [LANDMARKS, AGENTS, "swapped", "aligned"]


def test_the_last_step_is_the_students_though_nothing_was_fitted(trained, tmp_path):
    plan = Plan(str(trained), "digits", attention="linear", align_updates=0, distil_updates=0, batch_size=16)
    made = convert_run(plan, tmp_path, max_judged=20, baseline=True)
    assert list(made.steps) == [LANDMARKS, AGENTS, "swapped"]
    content = json.loads((tmp_path / REPORT).read_text())
    assert list(content["steps"]) == list(made.steps)


def test_what_is_broken_off_goes_on_without_measuring_them_again(trained, tmp_path, monkeypatch):
    fits = {"align_updates": 2, "distil_updates": 0, "batch_size": 16}
    plan = Plan(source=str(trained), images="digits", attention="agent:num_agents=4", **fits)
    made, judging = [], {"max_judged": 20, "baseline": True}

    def counted(*given, **settings):
        made.append(given[1])
        return subquad.conversion.convert_without_training(*given, **settings)

    def interrupted(*given, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(untrained_rows, "convert_without_training", counted)
    with monkeypatch.context() as patched:
        patched.setattr(conversion_run, "align", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert_run(plan, tmp_path, **judging)
    record = convert_run(plan, tmp_path, **judging).record
    assert made == [(2, 2)]
    assert list(record.steps) == [LANDMARKS, "swapped", "aligned"]
    assert isinstance(record.steps[LANDMARKS], Comparison)
