"""What commands that train share: a flag for every field of a recipe, run folders, and the comparison of mechanisms."""

import argparse
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from subquad.cli.parser import Commands, Parser, folder_to_write, run_name, to_read, whole
from subquad.errors import SubquadError

RUNS = Path("runs")


def add_training(parts: Commands, kind: Any, what: str) -> None:
    """The commands `train` and `compare` of a task."""

    def recipe_of(arguments: argparse.Namespace) -> Any:
        from subquad.training import load_recipe

        base = load_recipe(arguments.config, kind) if arguments.config else kind()
        return base.replace(**given_fields(arguments, kind))

    def train(arguments: argparse.Namespace) -> None:
        train_recipe(arguments, kind, recipe_of)

    def compare(arguments: argparse.Namespace) -> None:
        compare_recipe(arguments, recipe_of(arguments))

    add_train(parts.add("train", train, f"Train a {what} with a recipe; flags override it."), kind)
    text = "Train one host with several mechanisms and seeds, and print one table."
    add_compare(parts.add("compare", compare, text), kind)


def add_train(parser: Parser, kind: Any) -> None:
    """The arguments of a command that trains recipes of a kind."""
    parser.add_argument("--resume", type=to_read, metavar="RUN", help="go on with the run in this folder")
    if "initial_checkpoint" not in kind.unused:
        parser.add_argument("--pretrained", action="store_true", help="start from the authors' weights of --model")
    add_recipe_flags(parser, kind)


def add_compare(parser: Parser, kind: Any) -> None:
    """The arguments of a command that trains a recipe with several mechanisms."""
    parser.add_argument(
        "--attention", dest="mechanisms", nargs="+", metavar="NAME", help="mechanisms; all of them if left out"
    )
    parser.add_argument("--seeds", nargs="+", type=whole, default=[0], metavar="SEED", help="a run for each")
    add_recipe_flags(parser, kind, without=("attention", "seed"))


def add_recipe_flags(parser: Parser, kind: Any, without: Sequence[str] = ()) -> None:
    """--config, where runs go, and a flag for every field of a recipe."""
    from subquad.training import recipe_fields, recipe_names

    where = parser.add_argument_group("run")
    named = ", ".join(recipe_names(kind.task))
    silent = "by the data" if kind.task == "classify" else "the defaults"
    where.add_argument("--config", metavar="RECIPE", help=f"a YAML file, or one of {named}; {silent} if left out")
    where.add_argument("--output", type=folder_to_write, default=RUNS, help="folder of runs")
    where.add_argument(
        "--experiment", type=run_name, help="name of the run's folder; made of model, attention and data if left out"
    )
    group = parser.add_argument_group("recipe", "each overrides the recipe's value")
    defaults = kind()
    for name, field in recipe_fields(kind).items():
        if name in without or name in kind.hidden | kind.unused:
            continue
        flag = f"--{name.replace('_', '-')}"
        if field.inner is bool:
            group.add_argument(flag, action=Switch, default=argparse.SUPPRESS, help=field.text)
            continue
        shown = getattr(defaults, name)
        text = field.text if shown in (None, "", {}) else f"{field.text} (default of a recipe that is silent: {shown})"
        metavar = name.rsplit("_", 1)[-1].upper()
        # several numbers may be written with commas or, as timm has it, with spaces
        count = "+" if typing.get_origin(field.inner) is tuple else None
        group.add_argument(flag, default=argparse.SUPPRESS, metavar=metavar, nargs=count, help=text.replace("%", "%%"))


class Switch(argparse.Action):
    """The flags --name and --no-name; --no-aug, whose field says no itself, has --aug for its opposite."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        flag = option_strings[0]
        opposite = f"--{flag[5:]}" if flag.startswith("--no-") else f"--no-{flag[2:]}"
        super().__init__([flag, opposite], dest, nargs=0, **settings)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, option_string == self.option_strings[0])


def given_fields(arguments: argparse.Namespace, kind: Any) -> dict[str, Any]:
    """The fields of a recipe that flags name."""
    from subquad.training import recipe_fields

    given = {name: value for name, value in vars(arguments).items() if name in recipe_fields(kind)}
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


def train_recipe(arguments: argparse.Namespace, kind: Any, new: Callable[[argparse.Namespace], Any]) -> None:
    """Train the recipe that `new` makes of the flags, or go on with a run."""
    from subquad.training import load_recipe, train

    if arguments.resume is not None:
        if getattr(arguments, "pretrained", False):
            raise SubquadError(f"the run in {arguments.resume} goes on with its own weights: leave out --pretrained")
        file = arguments.resume / "recipe.yaml"
        if not file.is_file():
            raise SubquadError(f"no run in {arguments.resume} to resume: it has no recipe.yaml")
        recipe = load_recipe(file, kind).replace(**given_fields(arguments, kind))
        folder = arguments.resume
    else:
        recipe = new(arguments)
        if getattr(arguments, "pretrained", False):
            recipe = _from_pretrained(recipe)
        folder = run_folder(arguments, recipe.model, recipe.attention, Path(recipe.data).name)
    summary = train(recipe, folder, resume=arguments.resume is not None, log=print)
    best, epoch = summary[f"best_{recipe.metric}"], summary["best_epoch"] + 1
    what = recipe.metric_title.removesuffix(" %")
    print(f"best {what} {best:.2f} % in epoch {epoch} of {summary['epochs']}; everything is in {folder}")


def _from_pretrained(recipe: Any) -> Any:
    """The recipe with the authors' weights of its network as its initial ones, which are there then."""
    from subquad.models.pretrained import PREFIX, pretrained_file

    if recipe.initial_checkpoint is not None:
        raise SubquadError(f"it starts from {recipe.initial_checkpoint} already: leave out --pretrained")
    pretrained_file(recipe.model)
    return recipe.replace(initial_checkpoint=f"{PREFIX}{recipe.model}")


def compare_recipe(arguments: argparse.Namespace, recipe: Any) -> None:
    """Train a recipe with several mechanisms and print the table."""
    from subquad.attention import ATTENTION
    from subquad.training import compare, comparison_table

    mechanisms = arguments.mechanisms or list(ATTENTION)
    folder = run_folder(arguments, "compare", recipe.model, Path(recipe.data).name)
    rows = compare(recipe, mechanisms, arguments.seeds, folder, log=print)
    table = comparison_table(rows, recipe.metric_title)
    print(f"\n{table}\n\neverything is in {folder}; `subquad report {folder}` makes a page of it")
