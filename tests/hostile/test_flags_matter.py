"""Every flag of every command reaches the library: with another value it is asked for something else.

What the commands import of the library is replaced by recorders, which are found by reading the commands, so that a new
command or flag is tried without being named. What cannot be guessed of a flag stands in `TOGETHER` and `VALUES`.
"""

import argparse
import ast
import functools
import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import subquad.cli
from subquad.cli import diffuse, main, make_parser
from subquad.data import InputConfig
from subquad.tasks import TASKS, load_recipe
from subquad.tasks.classification import class_predictions

REAL = {"load_recipe", "fields_of", "holding", "names_in", "recipe_names", "slug", "task_named", "values_of"}
"""What makes the arguments of the library's calls, and stays."""

NETWORK = {"model": ["--pretrained"], "pretrained": ["--model", "agent_pvt_tiny"]}
ASKED = {"evaluate": ["here"], "predict": ["--checkpoint", "here"]}
WEIGHTS = {
    task.commands[action]: {"checkpoint": words}
    for task in TASKS.values()
    for action, words in ASKED.items()
    if task.has_released
}
"""What a command needs unless a network is named."""

TOGETHER = {
    "bench": {
        "model": ["--img-size", "64"],
        "head": ["--model", "deit_tiny"],
        "img_size": ["--model", "deit_tiny"],
        "ratio": ["--unet", "sd15"],
        "agents": ["--unet", "sd15"],
        "reuse": ["--unet", "sd15"],
    },
    "diffuse": {
        action: ["--agent"]
        for flags in (diffuse.COMMON, diffuse.AGENTS, diffuse.SWITCHES)
        for action in (flag[0].replace("-", "_") for flag in flags)
    },
    "tune": {"img_size": ["--model", "deit_tiny"]},
    "analyze": {"no_branches": ["--removed"], "max_held_out": ["--removed"], **NETWORK},
    "convert": {"speedup": ["--at", "64"], "at": ["--speedup", "2"]},
    "eval": NETWORK,
    "predict": NETWORK,
    # data are looked at before weights are fetched
    **{
        f"{task} {action}": {"pretrained": ["--data", task]}
        for task in ("segment", "detect")
        for action in ("train", "compare")
    },
    "": {"decay_epochs": ["--sched", "multistep"], "sched": ["--decay-epochs", "3"]},
}
"""Flags that mean something only beside others, by command; the last ones are of recipes."""

VALUES = {
    "features": ["f.npy"],
    "heat": ["h.npy"],
    "sched": ["constant", "multistep"],
    "opt": ["sgd"],
    "amp": ["bf16"],
    "remode": ["const"],
    "interpolation": ["nearest"],
    "train_interpolation": ["nearest"],
    "crop_mode": ["border"],
    "conventions": ["openmmlab"],
    "model": ["pvt_small", "deit_small"],
    "attention": ["linear"],
    "mechanisms": ["linear"],
    "head": ["upernet", "retinanet", "fpn"],
    # the last one is there
    "data": ["folder", "image", "text", "classify"],
    "aa": ["rand-m9-mstd0.5-inc1"],
    "settings": ["num_agents=16"],
    "data_settings": ["count=200"],
    "config": ["cifar10", "camvid_small", "pennfudan_small", "listops_small"],
    "resume": ["classify", "segment", "detect"],
    "scale": ["0.2,0.9"],
    "ratio": ["0.5,0.9", "0.25"],
    "short_side": ["64", "480"],
    "long_side": ["2000"],
    "picture": ["there.svg"],
    "target": ["there.safetensors"],
    "what": ["hosts"],
    "measures": ["entropy"],
    "vocab_size": ["300"],
    "source": ["timm/vit_tiny_patch16_224"],
    "dtype": ["bf16"],
    "device": ["cuda"],
    "unet": ["sd21"],
    "img_size": ["48"],
}
"""What to ask for, where no number and no file will do; the first that is taken counts."""

NUMBERS = ["3", "2", "0.25", "1", "16,24", "0.1,0.2", "0.2,0.3,0.4", "0.2,0.9", "64", "4"]
FILES = ["there", "there.json", "there.svg", "there.html", "there.png", "there.safetensors"]


class Anything:
    """Stands for whatever the library gives back: has every attribute, and prints as any number."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        return Anything()

    def __iter__(self) -> Any:
        return iter(())

    def __gt__(self, other: Any) -> bool:
        return False

    def __len__(self) -> int:
        return 2

    def __getitem__(self, place: Any) -> Any:
        return Anything()

    def __add__(self, other: Any) -> Any:
        return self

    def __format__(self, form: str) -> str:
        return "?"

    def __repr__(self) -> str:
        return "?"


class Pictures(list):
    """A data set of forty images."""

    def __init__(self) -> None:
        super().__init__((torch.zeros(3, 8, 8), 0) for _ in range(40))

    def path(self, place: int) -> str:
        return str(place)

    def picture(self, place: int) -> Any:
        return Anything()


def looked_at(task: str) -> Any:
    found = SimpleNamespace(task=task, model=Anything(), data="digits", device="cpu", fingerprint="7")
    found.input = InputConfig((8, 8))
    found.classes, found.data_dir = ("cat",), None
    found.image_network = lambda img_size=None: found
    return found


GIVEN = {
    "in_engine": lambda trained, path: trained,
    "open_trained": lambda *_, task=None, **__: looked_at(task or "classify"),
    "images_of": lambda *_, **__: Pictures(),
    "image_files": lambda paths: [Path(f"{k}.png") for k in range(40)],
    "readable_images": lambda files, *_, **__: [(path, torch.zeros(3, 8, 8)) for path in files],
    "measure_network": lambda *_, **__: [SimpleNamespace(layer=1)],
    "convert_checkpoint": lambda *_, **__: ("name", Anything()),
    "make_images": lambda *_, **__: (Anything(), Anything()),
    "is_kept": lambda *_, **__: False,
    "looking": lambda *_: [["a layer"]],
    "group_runs": lambda *_: [run_of_an_agent()],
    "survey": lambda *_, **__: {"confused": [1.0]},
    "listing": lambda *_, **__: "a table",
}
"""What a command needs to have back to go on."""


BEHIND = ("subquad.api", "subquad.analysis.study")
"""Modules whose functions commands call, and that ask the rest of the library themselves."""


def run_of_an_agent() -> Any:
    """What a report is about."""
    run = SimpleNamespace(attention="agent", task="classify", path="here")
    return SimpleNamespace(label="agent", first=run, runs=[run])


def shown(value: Any) -> Any:
    """An argument, so that it can be compared."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {key: shown(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, Pictures):
        return [shown(one) for one in value]
    if hasattr(value, "__next__"):
        return [shown(one) for one in value]
    if isinstance(value, torch.utils.data.Subset):
        return list(value.indices)
    return re.sub(r" at 0x\w+", "", repr(value))


def library_calls() -> set[tuple[str, str]]:
    """(module, function) of all that the commands import when they run, and that the functions behind them call."""
    found = set()
    for module in BEHIND:
        tree = ast.parse(Path(importlib.import_module(module).__file__).read_text())
        imported = [
            node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module.startswith("subquad")
        ]
        found |= {(module, name.asname or name.name) for node in imported for name in node.names if name.name.islower()}
    for file in Path(subquad.cli.__file__).parent.glob("*.py"):
        functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
        for node in [inner for function in functions for inner in ast.walk(function)]:
            if isinstance(node, ast.ImportFrom) and node.module and re.match(r"subquad(?!\.cli)", node.module):
                found |= {(node.module, name.name) for name in node.names if name.name.islower()}
    return {(module, name) for module, name in found if name not in REAL and name != "api"}


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """What the library was asked for."""
    made: list[Any] = []

    def recorder(name: str) -> Any:
        def record(*arguments: Any, **settings: Any) -> Any:
            made.append((name, shown(arguments), shown(settings)))
            if name.endswith(" evaluate"):
                return SimpleNamespace(text="?", save=lambda path: made.append(("save", shown(path), {})) or [])
            return GIVEN.get(name, lambda *_, **__: Anything())(*arguments, **settings)

        return record

    for module, name in library_calls():
        # some functions are called as the module that they are in
        home = importlib.import_module(module)
        if callable(function := getattr(home, name)):
            # what a function takes is looked up in its signature
            monkeypatch.setattr(home, name, functools.update_wrapper(recorder(name), function))
    for task in TASKS.values():
        for name in ("evaluate", "predict", "test"):
            monkeypatch.setattr(task, name, recorder(f"{task.name} {name}"))
    cached = functools.cache(load_recipe)
    for module in ("subquad.tasks", "subquad.tasks.task", "subquad.tasks.sequences.lra_task"):
        monkeypatch.setattr(importlib.import_module(module), "load_recipe", cached)
    parser = make_parser()
    monkeypatch.setattr(subquad.cli, "make_parser", lambda argv: parser)
    for name, task in TASKS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").write_text(task.recipe_class().to_yaml())
    monkeypatch.chdir(tmp_path)
    return made


def leaves(parser: argparse.ArgumentParser, names: tuple[str, ...] = ()) -> dict[str, argparse.ArgumentParser]:
    """The commands by their names."""
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, own in action.choices.items():
                found |= leaves(own, (*names, name))
    return found or {" ".join(names): parser}


COMMANDS = leaves(make_parser())


def needed(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """What a command can't do without, by argument."""
    found = {}
    for action in parser._actions:
        if action.required or (not action.option_strings and action.nargs != "?"):
            value = next(iter(action.choices)) if action.choices else VALUES.get(action.dest, ["here"])[0]
            found[action.dest] = [*action.option_strings[:1], value]
    return found


def attempts(action: argparse.Action) -> list[list[str]]:
    """Ways to ask for something else."""
    if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
        return [[flag] for flag in action.option_strings]
    values = [*(action.choices or ()), *VALUES.get(action.dest, ()), *NUMBERS, *FILES]
    return [[*action.option_strings[:1], str(value)] for value in values]


# of `compare` one task stands for all in the fast tests: its flags are those of `train`
SAME = [f"{name} compare" for name in ("detect", "segment")]


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=pytest.mark.slow) if name in SAME else name for name in COMMANDS]
)
def test_every_flag_of_a_command_changes_what_the_library_is_asked_for(command, calls, capsys):
    parser, ignored = COMMANDS[command], []

    def outcome(*arguments: str) -> Any:
        calls.clear()
        status = main([*command.split(), *arguments])
        # what is printed may name a flag that nothing else hears of
        said = capsys.readouterr().err
        return status, list(calls), said if status else ""

    for action in parser._actions:
        base = needed(parser) | ({} if action.dest in NETWORK else WEIGHTS.get(command, {}))
        # a trace is shown of what fails, and nothing does here
        if action.dest in ("help", "debug"):
            continue
        others = [word for dest, words in base.items() if dest != action.dest for word in words]
        beside = {**TOGETHER[""], **TOGETHER.get(command, {})}.get(action.dest, [])
        if not set(beside[:1]) <= {flag for each in parser._actions for flag in each.option_strings}:
            beside = []
        before = outcome(*others, *base.get(action.dest, []), *beside)
        changed = (outcome(*others, *words, *beside) for words in attempts(action))
        if not any(status == 0 and (status, made, said) != before for status, made, said in changed):
            ignored.append(action.dest)
    assert not ignored


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("bench --model deit_tiny --dim 64", "--dim is of layers: leave it out beside --model"),
        ("bench --model deit_tiny --attention agent", "--attention is of layers: leave it out beside --model"),
        ("bench --model deit_tiny --ops", "--ops is of layers: leave it out beside --model"),
        ("bench --model deit_tiny --reuse 0", "--reuse is of U-Nets: leave it out beside --model"),
        ("bench --tokens 16 --img-size 64", "--img-size is of networks and U-Nets: name them with --model or --unet"),
        ("bench --unet sd15 --backward", "--backward is of layers and networks: leave it out beside --unet"),
        ("bench --unet sd15 --model deit_tiny", "--model names networks and --unet a U-Net: measure them apart"),
        ("tune --model deit_tiny --dim 64", "--dim is of layers: leave it out beside --model"),
        ("tune --tokens 16 --img-size 64", "--img-size is of networks: name them with --model"),
    ],
)
def test_a_flag_of_another_kind_of_question_is_refused(arguments, reason, calls, capsys):
    assert main(arguments.split()) == 2 and not calls
    assert capsys.readouterr().err == f"subquad: {reason}\n"


def test_a_pipeline_is_compared_with_itself_untouched_and_measured_where_that_is_asked_for(calls):
    for flags, methods, memory in (
        ([], ["softmax"], False),
        (["--tome"], ["tome"], False),
        (["--compare"], ["softmax", "agent"], True),
        (["--tome", "--compare"], ["softmax", "tome"], True),
    ):
        calls.clear()
        assert main(["diffuse", "--model", "here", "--prompt", "a", *flags]) == 0
        (asked,) = [settings for name, _, settings in calls if name == "make_images"]
        assert list(asked["methods"]) == methods and asked["memory"] == str(memory)


def test_shares_of_what_is_right_are_of_what_is_known(monkeypatch):
    def predictions(*_, **__):
        known = [(True, "a"), (False, "a"), (False, None), (False, None)]
        return [SimpleNamespace(path="p", probabilities=[], true=true, is_wrong=wrong) for wrong, true in known]

    monkeypatch.setattr(class_predictions, "predict", predictions)
    said = []
    assert len(list(class_predictions.predicted_classes(Anything(), [Path("here")], said.append))) == 4
    assert said == ["1 of 2 with a known class are right (50.0 %)"]


def test_latency_is_measured_for_a_report_unless_that_is_left_out(calls):
    for flags, measured in (([], True), (["--no-scaling"], False)):
        calls.clear()
        assert main(["report", "here", *flags]) == 0
        assert ("measure_scaling" in {name for name, *_ in calls}) == measured


def test_no_in_front_of_a_switch_is_its_opposite_and_belongs_to_no_aug_itself():
    parser = make_parser()
    for flags, expected in (
        (["--no-aug", "--strict"], {"no_aug": True, "strict": True}),
        (["--aug", "--no-strict"], {"no_aug": False, "strict": False}),
    ):
        assert vars(parser.parse(["train", *flags])).items() >= expected.items()


def test_the_best_epoch_is_counted_from_one(calls, monkeypatch, capsys):
    summary = {"best_top1": 50.0, "best_epoch": 2, "epochs": 5}
    monkeypatch.setattr(importlib.import_module("subquad.api"), "train_run", lambda *_, **__: summary)
    assert main(["train"]) == 0
    assert "best top-1 50.00 % in epoch 3 of 5" in capsys.readouterr().out
