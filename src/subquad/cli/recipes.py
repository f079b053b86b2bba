"""What commands that train share: a flag for every field of a recipe, run folders, and the comparison of mechanisms."""

import argparse
import shlex
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from subquad.cli.boundary import say
from subquad.cli.parser import Parser, run_name
from subquad.errors import SubquadError
from subquad.flags import folder_to_write, to_read, whole

RUNS = Path("runs")


def add_train(parser: Parser, task: Any) -> None:
    """The arguments of a command that trains recipes of a task."""
    parser.add_argument("--resume", type=to_read, metavar="RUN", help="go on with the run in this folder")
    if _starts_by_name(task):
        parser.add_argument("--pretrained", action="store_true", help="start from the authors' weights of --model")
    add_recipe_flags(parser, task)


def add_compare(parser: Parser, task: Any) -> None:
    """The arguments of a command that trains a recipe of a task with several mechanisms."""
    parser.add_argument(
        "--attention", dest="mechanisms", nargs="+", metavar="NAME", help="mechanisms; all of them if left out"
    )
    parser.add_argument("--seeds", nargs="+", type=whole, default=[0], metavar="SEED", help="a run for each")
    if _starts_by_name(task) and "compare" in task.commands:
        text = "start each from the authors' weights of its mechanism in the host of --model"
        parser.add_argument("--pretrained", action="store_true", help=text)
    add_recipe_flags(parser, task, without=("attention", "seed"))


def _starts_by_name(task: Any) -> bool:
    """Whether a task's recipes name a network, whose authors' weights it can start from."""
    from subquad.tasks import fields_of

    return {"model", "initial_checkpoint"} <= fields_of(task.recipe_class).keys()


def add_recipe_flags(parser: Parser, task: Any, without: Sequence[str] = ()) -> None:
    """The task's own flags, --config, where runs go, and a flag for every further field of its recipes."""
    from subquad.tasks import fields_of, recipe_names

    kind = task.recipe_class
    for flag in task.leading_flags:
        flag.add_to(parser)
    where = parser.add_argument_group("run")
    named = ", ".join(recipe_names(kind)) or "none that come with it"
    text = f"a YAML file, or one of {named}; by the data or the defaults if left out"
    where.add_argument("--config", metavar="RECIPE", help=text)
    where.add_argument("--output", type=folder_to_write, default=RUNS, help="folder of runs")
    where.add_argument(
        "--experiment", type=run_name, help="name of the run's folder; made of model, attention and data if left out"
    )
    group = parser.add_argument_group("recipe", "each overrides the recipe's value")
    defaults, taken = kind(), {flag.key for flag in task.leading_flags}
    for name, field in fields_of(kind).items():
        if name in without or name in taken:
            continue
        written = f"--{name.replace('_', '-')}"
        if field.inner is bool:
            group.add_argument(written, action=Switch, default=argparse.SUPPRESS, help=field.text)
            continue
        shown = getattr(defaults, name)
        text = field.text if shown in (None, "", {}) else f"{field.text} (default of a recipe that is silent: {shown})"
        # several numbers may be written with commas or, as timm has it, with spaces
        count = "+" if typing.get_origin(field.inner) is tuple else None
        shape: dict[str, Any] = {"metavar": name.rsplit("_", 1)[-1].upper(), "nargs": count}
        group.add_argument(written, default=argparse.SUPPRESS, help=text.replace("%", "%%"), **shape)


class Switch(argparse.Action):
    """The flags --name and --no-name; --no-aug, whose field says no itself, has --aug for its opposite."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        flag = option_strings[0]
        opposite = f"--{flag[5:]}" if flag.startswith("--no-") else f"--no-{flag[2:]}"
        super().__init__([flag, opposite], dest, nargs=0, **settings)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, option_string == self.option_strings[0])


def given_fields(arguments: argparse.Namespace, task: Any) -> dict[str, Any]:
    """The fields of a task's recipe that flags name."""
    from subquad.tasks import fields_of

    given = {name: value for name, value in vars(arguments).items() if name in fields_of(task.recipe_class)}
    return {name: ",".join(value) if isinstance(value, list) else value for name, value in given.items()}


def run_folder(arguments: argparse.Namespace, *parts: str | None) -> Path:
    """Where a run is kept: in --output, under the name of --experiment or one made of these parts."""
    from subquad.training import slug

    if arguments.experiment is not None:
        return arguments.output / arguments.experiment
    name = slug("-".join(filter(None, parts)))
    try:
        return arguments.output / run_name(name)
    except argparse.ArgumentTypeError as error:
        raise SubquadError(f"the name of the run's folder {error}: give it one with --experiment") from None


def check_task(folder: Path, task: str) -> None:
    """Raise where a run is of another task, whose command goes on with it."""
    from subquad.runs.run_records import task_of
    from subquad.tasks import TASKS

    said = task_of(folder)
    if said is not None and said != task and said in TASKS:
        train = TASKS[said].commands.get("train")
        what = f"subquad {train} --resume {folder} goes on with it" if train else f"it is of `subquad {said}`"
        raise SubquadError(f"the run in {folder} is of another task: {what}")


def train_recipe(arguments: argparse.Namespace, task: Any) -> None:
    """Train the recipe that the flags describe, or go on with a run."""
    from subquad import api
    from subquad.tasks import load_recipe

    given = given_fields(arguments, task)
    if arguments.resume is not None:
        _check_resumes_alone(arguments)
        file = arguments.resume / "recipe.yaml"
        if not file.is_file():
            raise SubquadError(f"no run in {arguments.resume} to resume: it has no recipe.yaml")
        check_task(arguments.resume, task.name)
        recipe = load_recipe(file, task.recipe_class).replace(**given)
        folder = arguments.resume
    else:
        recipe = task.recipe_of(given, arguments.config)
        if getattr(arguments, "pretrained", False):
            recipe = _from_pretrained(recipe, task)
        network = task.network_name(recipe.to_dict())
        folder = run_folder(arguments, network, recipe.attention, Path(recipe.data).name)
    summary = api.train(recipe, folder, resume=arguments.resume is not None, log=say)
    column = task.columns[0]
    best, epoch = summary[f"best_{column.entry}"], summary["best_epoch"] + 1
    print(f"best {column.short} {best:.2f} % in epoch {epoch} of {summary['epochs']}; everything is in {folder}")


def _check_resumes_alone(arguments: argparse.Namespace) -> None:
    """Raise where flags ask a run that goes on for what it has already."""
    beside = {
        "--pretrained": getattr(arguments, "pretrained", False),
        "--config": arguments.config is not None,
        "--output": arguments.output != RUNS,
        "--experiment": arguments.experiment is not None,
    }
    if asked := [flag for flag, is_given in beside.items() if is_given]:
        raise SubquadError(
            f"the run in {arguments.resume} goes on with its own recipe and weights, in its own folder: "
            f"leave out {', '.join(asked)}"
        )


def _from_pretrained(recipe: Any, task: Any) -> Any:
    """The recipe with the authors' weights of its network as its initial ones, which are there then."""
    from subquad.models.pretrained import PREFIX, pretrained_file

    if recipe.initial_checkpoint is not None:
        raise SubquadError(f"it starts from {recipe.initial_checkpoint} already: leave out --pretrained")
    task.check_data(recipe.data, recipe.data_dir)
    pretrained_file(recipe.model)
    return recipe.replace(initial_checkpoint=f"{PREFIX}{recipe.model}")


def compare_recipe(arguments: argparse.Namespace, task: Any) -> None:
    """Train the recipe that the flags describe with several mechanisms and print the table."""
    from subquad import api
    from subquad.training import comparison_table

    recipe = task.recipe_of(given_fields(arguments, task), arguments.config)
    folder = run_folder(arguments, "compare", task.network_name(recipe.to_dict()), Path(recipe.data).name)
    settings = {"mechanisms": arguments.mechanisms, "seeds": arguments.seeds}
    if getattr(arguments, "pretrained", False):
        settings["pretrained"] = True
    rows = api.compare(recipe, folder, **settings, log=say)
    table = comparison_table(rows, task.columns)
    print(f"\n{table}\n\neverything is in {folder}; `subquad report {shlex.quote(str(folder))}` makes a page of it")
