"""`subquad train` and `subquad compare`."""

import argparse
from typing import Any

from subquad.cli.parser import Commands
from subquad.cli.recipes import add_compare, add_train, compare_recipe, given_fields, train_recipe


def add_commands(commands: Commands) -> None:
    """The commands `train` and `compare`."""
    from subquad.training import Recipe

    train = commands.add("train", run_train, "Train a model with a recipe; flags override the recipe.")
    add_train(train, Recipe)
    text = "Train one host with several mechanisms and seeds, and print one table."
    add_compare(commands.add("compare", run_compare, text), Recipe)


def default_recipe(given: dict[str, Any]) -> str:
    """The recipe for flags without --config: by the data where they have one of their own, else by the model."""
    from subquad.models import VARIANTS

    by_data = {"digits": "digits", "cifar10": "cifar10_small", "pathfinder": "reach", "same_different": "reach"}
    data, model = given.get("data", "digits").partition(":")[0], given.get("model")
    if data in by_data:
        return by_data[data]
    return VARIANTS[model].recipe if model in VARIANTS else "deit"


def recipe_of(arguments: argparse.Namespace) -> Any:
    """The recipe that the flags describe, on top of --config or of what fits the data."""
    from subquad.training import Recipe, load_recipe

    given = given_fields(arguments, Recipe)
    return load_recipe(arguments.config or default_recipe(given)).replace(**given)


def run_train(arguments: argparse.Namespace) -> None:
    """Train, or go on with a run."""
    from subquad.training import Recipe

    train_recipe(arguments, Recipe, recipe_of)


def run_compare(arguments: argparse.Namespace) -> None:
    """Train with several mechanisms and print the table."""
    compare_recipe(arguments, recipe_of(arguments))
