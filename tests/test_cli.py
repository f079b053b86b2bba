"""The commands, as a user types them: what they print, and that a mistake is one line and a non-zero exit."""

import argparse
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from subquad import BACKENDS, starting
from subquad.analysis import ALL_MEASURES
from subquad.cli import analyze, conversion_commands, main, make_parser
from subquad.cli.recipes import given_fields
from subquad.command_table import COMMANDS
from subquad.conversion import Plan, distilling
from subquad.tasks import TASKS, fields_of
from subquad.tasks.classification import Classification, Recipe

TINY = ["--data", "digits", "--epochs", "1", "--warmup-epochs", "0", "--max-train-images", "64", "--depth", "1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder of a very short training."""
    output = tmp_path_factory.mktemp("runs")
    assert main(["train", *TINY, "--attention", "agent", "--output", str(output), "--experiment", "first"]) == 0
    return output / "first"


@pytest.fixture
def pictures(tmp_path):
    """A folder with a picture in the folder of its class, and one that is broken."""
    folder = tmp_path / "pictures" / "7"
    folder.mkdir(parents=True)
    Image.new("L", (8, 8), 90).save(folder / "grey.png")
    (folder / "broken.png").write_bytes(b"no image")
    return folder.parent


def complaint(capsys, *argv):
    """What a command says that must fail: one line, exit status 2."""
    assert main(list(argv)) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("subquad: ") and shown.err.count("\n") == 1, shown.err
    return shown.err


def test_a_run_folder_holds_the_whole_run(run):
    names = {path.name for path in run.iterdir()}
    assert names >= {"recipe.yaml", "run.json", "metrics.jsonl", "metrics.csv", "tensorboard", "summary.json"}
    assert names >= {"last.pt", "last.safetensors", "best.safetensors"}


def test_eval_prints_accuracy_confusion_and_throughput_at_80_columns(run, capsys):
    assert main(["eval", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "360 images: top-1" in shown and "top-5" in shown and "images/s" in shown
    assert "rows true, columns predicted" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_eval_takes_a_weight_file_alone(run, capsys, tmp_path):
    lonely = tmp_path / "weights.safetensors"
    lonely.write_bytes((run / "best.safetensors").read_bytes())
    assert main(["eval", str(lonely), "--output", str(tmp_path / "confusion")]) == 0
    assert "360 images" in capsys.readouterr().out
    assert (tmp_path / "confusion.csv").is_file() and (tmp_path / "confusion.png").is_file()


def test_predict_names_classes_skips_broken_images_and_draws_a_grid(run, pictures, capsys, tmp_path):
    grid = tmp_path / "grid.png"
    assert main(["predict", str(pictures), "--checkpoint", str(run), "--grid", str(grid)]) == 0
    shown = capsys.readouterr().out
    assert "grey.png: " in shown and "(true: 7)" in shown and "skipped broken image" in shown
    with Image.open(grid) as picture:
        assert picture.width > 100


def test_predict_with_strict_stops_at_a_broken_image(run, pictures, capsys):
    assert "broken.png" in complaint(capsys, "predict", str(pictures), "--checkpoint", str(run), "--strict")


@pytest.mark.slow
def test_list_shows_everything_and_filters(capsys):
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("agent", "vit", "deit_tiny", "num_agents=49"))
    assert main(["list", "models", "--filter", "*small*"]) == 0
    shown = capsys.readouterr().out
    assert "deit_small" in shown and "deit_tiny" not in shown
    assert main(["list", "--backends"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{name} " in shown for name in BACKENDS)


def test_resuming_a_finished_run_gives_its_summary(run, capsys):
    assert main(["train", "--resume", str(run)]) == 0
    assert "best top-1" in capsys.readouterr().out


def test_every_field_of_a_recipe_has_a_flag():
    parser = make_parser()
    arguments = parser.parse(["train", "--max-train-images", "7", "--no-model-ema", "--hflip", "0.5"])
    assert arguments.max_train_images == "7" and arguments.model_ema is False
    flags = {flag for action in arguments.parser._actions for flag in action.option_strings}
    assert {f"--{name.replace('_', '-')}" for name in fields_of(Recipe)} <= flags


def test_the_table_of_commands_says_what_the_parsers_say():
    shown = {action.dest: action.help for action in make_parser()._subparsers._group_actions[0]._choices_actions}
    assert list(shown.items()) == [(name, text) for name, (_, text) in COMMANDS.items()]


def test_what_parsers_repeat_of_the_library_is_what_it_says():
    usual = {field.name: field.default for field in dataclasses.fields(Plan)}
    assert conversion_commands.USUAL.items() <= usual.items()
    assert conversion_commands.TRAINED == distilling.TRAINED
    assert tuple(ALL_MEASURES) == analyze.MEASURES


QUICK = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS if COMMANDS[name][0] != "task_commands")]


def test_help_says_defaults_that_say_something():
    """It had "(default: None)" behind flags that must be given, and "(default: False)" behind switches."""
    texts = {" ".join(name): parser.format_help() for name, parser in leaves(make_parser())}
    assert len(texts) > 20
    for name, text in texts.items():
        assert not re.search(r"\(default:\s+(None|False|\[\]|)\)", text), name
    assert re.search(r"\(default:\s+agent\)", texts["convert"]) and re.search(r"\(default:\s+0\)", texts["eval"])


def leaves(parser, words=()):
    """The parsers of commands, with their words."""
    for action in parser._actions:
        if isinstance(action.choices, dict) and action.nargs == argparse.PARSER:
            for word, own in action.choices.items():
                yield from leaves(own, (*words, word))
            return
    yield words, parser


def test_help_is_shown_without_what_takes_seconds_to_import(tmp_path):
    code = f"""
import sys, contextlib, io
sys.argv[0] = "subquad"
from subquad.cli import main
for words in {QUICK!r}:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main(words)
    assert shown.getvalue(), words
    found = {{"torch", "timm", "torchvision", "numpy", "PIL"}} & set(sys.modules)
    assert not found, (words, found)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


@pytest.mark.parametrize("written", [["0.5", "1.0"], ["0.5,1.0"]])
def test_two_numbers_may_be_written_with_a_comma_or_a_space(written):
    assert given_fields(make_parser().parse(["train", "--scale", *written]), Classification)["scale"] == "0.5,1.0"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["eval", "run", "--img-size", "40", "72"],
            "unknown argument '72': height and width are one word, --img-size 40,72",
        ),
        (["train", "--lrr", "3"], "unknown argument '--lrr': did you mean --lr?"),
        (["trian"], "unknown command 'trian': did you mean train"),
        (["train", "--epochs", "many"], "epochs must be a whole number, got 'many'"),
        (["train", "--attention", "agnet"], "unknown attention 'agnet': did you mean agent?"),
        (["train", "--model", "deit_tinny"], "did you mean deit_tiny"),
        (["train", "--config", "digts"], "unknown recipe 'digts': did you mean digits"),
        (["train", "--data", "digts"], "digits"),
        (["train", "--data", "no/such/folder"], "no/such/folder"),
        (["train", "--num-heads", "5"], "5 heads do not divide a width of 64"),
        (["train", "--settings", "num_agents=50", "--attention", "agent"], "not a perfect square"),
        (["train", "--opt", "adamww"], "did you mean adamw"),
        (["train", "--resume", "nowhere"], "no run in nowhere to resume"),
        (["compare", "--attention", "softmax", "liner"], "unknown attention 'liner': did you mean linear"),
        (["eval", "nowhere"], "nowhere"),
        (["predict", "nothing.png", "--checkpoint", "nowhere"], "no image or folder nothing.png"),
        (["list", "modles"], "unknown listing 'modles': did you mean models?"),
        (["list", "--filter", "zzz"], "no name matches 'zzz'"),
        (["report", "nowhere"], "nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_writes_nothing(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in complaint(capsys, *argv)
    assert not list(tmp_path.iterdir())


def test_a_run_that_exists_is_not_overwritten(run, capsys):
    said = complaint(capsys, "train", *TINY, "--output", str(run.parent), "--experiment", run.name)
    assert "exists already" in said and "--resume" in said


@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if "train" in task.commands])
@pytest.mark.parametrize("flag", ["--config", "--output", "--experiment"])
def test_a_run_that_goes_on_is_not_asked_for_another_recipe_or_place(task, flag, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = TASKS[task].commands["train"].split()
    assert f"leave out {flag}" in complaint(capsys, *command, "--resume", "run", flag, "other")


def test_a_checkpoint_of_another_model_is_refused_with_its_keys(run, capsys, tmp_path):
    start = ["--initial-checkpoint", str(run / "best.safetensors"), "--output", str(tmp_path)]
    said = complaint(capsys, "train", *TINY, "--attention", "softmax", *start)
    assert "does not fit this model" in said and "agent_bias" in said


def test_a_folder_with_an_empty_class_is_refused_and_named(capsys, tmp_path):
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            if name == "cat":
                Image.new("RGB", (8, 8)).save(tmp_path / "images" / split / name / "0.png")
    assert "dog" in complaint(capsys, "train", "--data", str(tmp_path / "images"), "--output", str(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


def test_a_loss_that_is_not_a_number_stops_the_run_in_one_line(capsys, tmp_path):
    said = complaint(capsys, "train", *TINY, "--lr", "1e30", "--output", str(tmp_path), "--experiment", "nan")
    assert "the loss is" in said and "--lr" in said


@pytest.mark.slow
def test_the_module_runs_as_a_program_and_a_closed_pipe_is_no_error(tmp_path):
    command = f"{sys.executable} -m subquad list | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=os.environ, cwd=tmp_path, check=True)
    assert done.stdout.startswith("mechanism") and done.stderr == ""
    assert not Path(tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("program", "interpreter", "is_it"),
    [
        ("subquad", ["python", "/somewhere/subquad"], True),
        ("-m", ["python", "-X", "dev", "-m", "subquad", "train"], True),
        ("/somewhere/subquad/__main__.py", ["python", "-m", "subquad", "train"], True),
        ("/somewhere/mine/__main__.py", ["python", "-m", "mine"], False),
        ("-m", ["python", "-m", "mine", "-m", "subquad"], False),
        ("pytest", ["python", "-m", "pytest"], False),
    ],
)
def test_only_the_command_itself_takes_signals_and_imports_late(monkeypatch, program, interpreter, is_it):
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.setattr(sys, "orig_argv", interpreter)
    assert starting.is_command() is is_it


@pytest.mark.parametrize("program", ["/somewhere/subquad/__main__.py", "/somewhere/bin/subquad", "mine.py"])
def test_a_command_is_kept_as_it_can_be_typed_again(monkeypatch, program):
    """Cards and pages named the file in the environment that it was run from."""
    monkeypatch.setattr(sys, "argv", [program, "train", "--data", "a b"])
    said = "mine.py" if program == "mine.py" else "subquad"
    assert starting.command_line() == f"{said} train --data 'a b'"


def test_what_the_package_warns_of_is_one_line_and_others_say_where():
    import warnings

    from subquad.cli import boundary

    before = warnings.formatwarning
    with boundary.warnings_in_a_line():
        ours = warnings.formatwarning("folders\nare ordered", UserWarning, boundary.__file__, 1)
        theirs = warnings.formatwarning("x", UserWarning, "/elsewhere/file.py", 7)
        old = warnings.formatwarning("x", DeprecationWarning, boundary.__file__, 7)
    assert ours == "subquad: folders are ordered\n"
    assert "file.py:7: UserWarning: x" in theirs and "DeprecationWarning" in old
    assert warnings.formatwarning is before
