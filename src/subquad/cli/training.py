"""`subquad train` and `subquad compare`."""

import argparse
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from subquad.cli.parser import Commands, Parser
from subquad.errors import SubquadError

RUNS = Path("runs")


def add_commands(commands: Commands) -> None:
    """The commands `train` and `compare`."""
    sub = commands.add("train", run_train, "Train a model with a recipe; flags override the recipe.")
    sub.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this folder")
    add_recipe_flags(sub)

    sub = commands.add("compare", run_compare, "Train one host with several mechanisms and seeds, and print one table.")
    sub.add_argument(
        "--attention", dest="mechanisms", nargs="+", metavar="NAME", help="mechanisms; all of them if left out"
    )
    sub.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED", help="a run for each")
    add_recipe_flags(sub, without=("attention", "seed"))


def add_recipe_flags(parser: Parser, without: Sequence[str] = ()) -> None:
    """--config, where runs go, and a flag for every field of a recipe."""
    from subquad.training import Recipe, recipe_fields, recipe_names

    where = parser.add_argument_group("run")
    named = ", ".join(recipe_names())
    where.add_argument("--config", metavar="RECIPE", help=f"a YAML file, or one of {named}; by the data if left out")
    where.add_argument("--output", type=Path, default=RUNS, help="folder of runs")
    where.add_argument("--experiment", help="name of the run's folder; made of model, attention and data if left out")
    group = parser.add_argument_group("recipe", "each overrides the recipe's value")
    defaults = Recipe()
    for name, (kind, text) in recipe_fields().items():
        if name in without:
            continue
        flag = f"--{name.replace('_', '-')}"
        if is_switch(kind):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
            continue
        shown = getattr(defaults, name)
        text = text if shown in (None, "", {}) else f"{text} (default of a recipe that is silent: {shown})"
        metavar = name.rsplit("_", 1)[-1].upper()
        # several numbers may be written with commas or, as timm has it, with spaces
        count = "+" if "tuple" in str(kind) else None
        group.add_argument(flag, default=argparse.SUPPRESS, metavar=metavar, nargs=count, help=text.replace("%", "%%"))


def is_switch(kind: Any) -> bool:
    """Whether a field's type makes it an on-off flag."""
    return kind is bool or (isinstance(kind, types.UnionType) and bool in typing.get_args(kind))


def recipe_of(arguments: argparse.Namespace, base: Any = None) -> Any:
    """The recipe that the flags describe, on top of `base`, of --config or of what fits the data."""
    from subquad.training import load_recipe, recipe_fields

    given = {name: value for name, value in vars(arguments).items() if name in recipe_fields()}
    given = {name: ",".join(value) if isinstance(value, list) else value for name, value in given.items()}
    if base is None:
        base = load_recipe(arguments.config or default_recipe(given))
    return base.replace(**given)


def default_recipe(given: dict[str, Any]) -> str:
    """The recipe for flags without --config: by the data where they have one of their own, else by the model."""
    from subquad.models import VARIANTS

    by_data = {"digits": "digits", "cifar10": "cifar10_small"}
    data, model = given.get("data", "digits"), given.get("model")
    if data in by_data:
        return by_data[data]
    return VARIANTS[model].recipe if model in VARIANTS else "deit"


def run_train(arguments: argparse.Namespace) -> None:
    """Train, or go on with a run."""
    from subquad.training import load_recipe, train

    if arguments.resume is not None:
        file = arguments.resume / "recipe.yaml"
        if not file.is_file():
            raise SubquadError(f"no run in {arguments.resume} to resume: it has no recipe.yaml")
        recipe, folder = recipe_of(arguments, load_recipe(file)), arguments.resume
    else:
        recipe = recipe_of(arguments)
        name = arguments.experiment or "-".join(filter(None, [recipe.model, recipe.attention, Path(recipe.data).name]))
        folder = arguments.output / name.replace(":", "_").replace("/", "_")
    summary = train(recipe, folder, resume=arguments.resume is not None, log=print)
    best, epoch = summary["best_top1"], summary["best_epoch"] + 1
    print(f"best top-1 {best:.2f} % in epoch {epoch} of {summary['epochs']}; everything is in {folder}")


def run_compare(arguments: argparse.Namespace) -> None:
    """Train with several mechanisms and print the table."""
    from subquad.attention import ATTENTION
    from subquad.training import compare, comparison_table

    mechanisms, recipe = arguments.mechanisms or list(ATTENTION), recipe_of(arguments)
    folder = arguments.output / (arguments.experiment or f"compare-{recipe.model}-{Path(recipe.data).name}")
    rows = compare(recipe, mechanisms, arguments.seeds, folder, log=print)
    print(f"\n{comparison_table(rows)}\n\neverything is in {folder}; `subquad report {folder}` makes a page of it")
