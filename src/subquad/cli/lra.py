"""`subquad lra`."""

import argparse
from pathlib import Path

from subquad.cli.parser import Commands
from subquad.cli.recipes import add_compare, given_fields, run_folder


def add_commands(commands: Commands) -> None:
    """The command `lra`."""
    from subquad.tasks.sequences.lra_data import SEQUENCES
    from subquad.training import LraRecipe

    text = "A task of the Long Range Arena with several mechanisms and seeds, beside what is published."
    sub = commands.add("lra", run_lra, text)
    tasks = "; ".join(f"{name}, {task.what}" for name, task in SEQUENCES.items())
    sub.add_argument("--task", required=True, choices=SEQUENCES, help=tasks)
    add_compare(sub, LraRecipe)


def run_lra(arguments: argparse.Namespace) -> None:
    """Train, judge on the test set, and print the table."""
    from subquad.attention import ATTENTION
    from subquad.errors import SubquadError
    from subquad.training import LraRecipe, arena_text, load_recipe, run_arena

    config = arguments.config or arguments.task
    recipe = load_recipe(config, LraRecipe)
    if recipe.data != arguments.task:
        raise SubquadError(
            f"the recipe {config} is for {recipe.data}: leave out --config, or ask for --task {recipe.data}"
        )
    recipe = recipe.replace(**given_fields(arguments, LraRecipe))
    folder = run_folder(arguments, "lra", Path(config).name.removesuffix(".yaml"))
    table = run_arena(recipe, arguments.mechanisms or list(ATTENTION), arguments.seeds, folder, log=print)
    print(f"\n{arena_text(table)}\n\nwhat is published stands beside it in {folder / 'lra.md'}")
    print(f"everything is in {folder}; `subquad report {folder}` makes a page of it")
