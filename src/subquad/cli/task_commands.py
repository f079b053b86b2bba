"""The commands of the tasks: train, compare, benchmark, evaluate and predict, under the words that a task has."""

import argparse
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from subquad.cli.boundary import say
from subquad.cli.parser import Commands, Parser, add_checkpoint
from subquad.cli.recipes import add_compare, add_train, compare_recipe, given_fields, run_folder, train_recipe
from subquad.cli.released_weights import add_network, add_whole_network, source_of_one
from subquad.errors import SubquadError
from subquad.flags import to_read, values_of
from subquad.text import escaped


def add_commands(commands: Commands) -> None:
    """The commands of all tasks that there are."""
    from subquad.tasks import TASKS

    groups: dict[str, Commands] = {}
    for name in TASKS:
        try:
            task = TASKS[name]
        except SubquadError as error:
            if name in TASKS.loaded:
                raise
            # nothing but its name is known of a plug-in that can't be had
            text = "A plug-in that can't be used; say this to see why."
            commands.add(name, partial(_complain, str(error)), text).refusal = str(error)
            continue
        for action, words in task.commands.items():
            group, _, name = words.rpartition(" ")
            if group and group not in groups:
                groups[group] = commands.group(group, task.title)
            _ADDERS[action](groups.get(group, commands), name, task)


def _complain(reason: str, arguments: argparse.Namespace) -> None:
    raise SubquadError(reason)


def _add_train(commands: Commands, name: str, task: Any) -> None:
    def run(arguments: argparse.Namespace) -> None:
        train_recipe(arguments, task)

    add_train(commands.add(name, run, f"Train a {task.noun} with a recipe; flags override the recipe."), task)


def _add_compare(commands: Commands, name: str, task: Any) -> None:
    def run(arguments: argparse.Namespace) -> None:
        compare_recipe(arguments, task)

    text = "Train one host with several mechanisms and seeds, and print one table."
    add_compare(commands.add(name, run, text), task)


def _add_benchmark(commands: Commands, name: str, task: Any) -> None:
    def run(arguments: argparse.Namespace) -> None:
        _benchmark(arguments, task)

    add_compare(commands.add(name, run, task.title), task)


def _benchmark(arguments: argparse.Namespace, task: Any) -> None:
    """Train, judge on the test set, and print the table."""
    from subquad.training import benchmark_text, compare_tested, fitting_mechanisms

    given = given_fields(arguments, task)
    recipe = task.recipe_of(given, arguments.config)
    named = arguments.config or task.default_recipe(given) or Path(recipe.data).name
    folder = run_folder(arguments, task.name, Path(named).name.removesuffix(".yaml"))
    mechanisms = arguments.mechanisms or fitting_mechanisms(recipe, print)
    table = compare_tested(recipe, mechanisms, arguments.seeds, folder, log=print)
    print(f"\n{benchmark_text(table)}\n\nwhat is published stands beside it in {folder / f'{task.name}.md'}")
    print(f"everything is in {folder}; `subquad report {shlex.quote(str(folder))}` makes a page of it")


def _add_evaluate(commands: Commands, name: str, task: Any) -> None:
    def run(arguments: argparse.Namespace) -> None:
        _evaluate(arguments, task)

    parser = commands.add(name, run, task.evaluation_help)
    if task.has_released:
        text = "folder of a run or conversion, or a file of it"
        parser.add_argument("checkpoint", nargs="?", type=to_read, help=text)
        _add_released(parser, task)
    else:
        add_checkpoint(parser)
    text = "a file that `subquad export` wrote of it: its engine answers, not PyTorch"
    parser.add_argument("--engine", type=to_read, metavar="FILE", help=text)
    for flag in task.evaluation_flags:
        flag.add_to(parser)


def _evaluate(arguments: argparse.Namespace, task: Any) -> None:
    """Judge and print."""
    from subquad import api
    from subquad.tasks.figures import check_picture
    from subquad.tasks.task_contract import text_of

    settings = values_of(task.evaluation_flags, vars(arguments))
    output = settings.pop("output", None)
    if output is not None:
        check_picture(output.with_suffix(".png"))
    judgement = api.evaluate(_source(arguments, task), task=task.name, engine=arguments.engine, **settings)
    print(escaped(text_of(task, "evaluate", judgement), without="\n"))
    if output is not None:
        files = judgement.save(output)
        print(f"\nthe confusion matrix is in {' and '.join(map(str, files))}")


def _add_predict(commands: Commands, name: str, task: Any) -> None:
    def run(arguments: argparse.Namespace) -> None:
        _predict(arguments, task)

    parser = commands.add(name, run, task.prediction_help)
    parser.add_argument("images", nargs="+", type=to_read, metavar="IMAGE", help="image files, or folders of them")
    text = "folder of a run or conversion, or a file of it"
    parser.add_argument("--checkpoint", type=to_read, required=not task.has_released, help=text)
    if task.has_released:
        _add_released(parser, task)
    for flag in task.prediction_flags:
        flag.add_to(parser)


def _predict(arguments: argparse.Namespace, task: Any) -> None:
    """Predict, and print what is found."""
    from subquad.models.pretrained import check_name
    from subquad.runs import open_trained
    from subquad.tasks.image_files import check_there
    from subquad.tasks.task_contract import text_of

    source = _source(arguments, task)
    check_name(source, task.name)
    check_there(arguments.images)
    trained = open_trained(source, task=task.name)
    settings = values_of(task.prediction_flags, vars(arguments))
    for predicted in task.predict(trained, arguments.images, say, **settings):
        say(text_of(task, "predict", predicted))


def _add_released(parser: Parser, task: Any) -> None:
    """How the authors' weights are named, for a network or for a whole one with its head."""
    if task.released_whole:
        add_whole_network(parser)
    else:
        add_network(parser)


def _source(arguments: argparse.Namespace, task: Any) -> str:
    """The weights that a command names, or the authors' of a network."""
    return source_of_one(arguments) if task.has_released else str(arguments.checkpoint)


_ADDERS: dict[str, Callable[[Commands, str, Any], None]] = {
    "train": _add_train,
    "compare": _add_compare,
    "benchmark": _add_benchmark,
    "evaluate": _add_evaluate,
    "predict": _add_predict,
}
"""How each of the actions that a task can have becomes a command."""
