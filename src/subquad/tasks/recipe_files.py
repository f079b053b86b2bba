"""Recipes as YAML files: those that come with a task, and a user's own."""

from pathlib import Path
from typing import TypeVar

from subquad.errors import SubquadError, unknown_name
from subquad.reading import read_yaml
from subquad.tasks.common_recipe import CommonRecipe
from subquad.tasks.recipe_fields import checked

Kind = TypeVar("Kind", bound=CommonRecipe)


def recipe_names(kind: type[CommonRecipe]) -> list[str]:
    """Names of the recipes that come with the task of a class of recipes."""
    return [] if kind.folder is None else sorted(path.stem for path in kind.folder.glob("*.yaml"))


def load_recipe(source: str | Path, kind: type[Kind]) -> Kind:
    """The recipe of a packaged name ("deit") or of a YAML file; fields that it leaves out have their defaults.

    Raises:
        SubquadError: there is no such recipe, or a field is unknown or has a value that it can't have.
    """
    names = recipe_names(kind)
    path = kind.folder / f"{source}.yaml" if kind.folder and str(source) in names else Path(source)
    if not path.is_file():
        if path.suffix in (".yaml", ".yml"):
            raise SubquadError(f"no recipe file {path}")
        raise unknown_name("recipe", str(source), names)
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise SubquadError(f"{path} must hold lines of `field: value`")
    for name in values.keys() & kind.retired.keys():
        if values[name] != kind.retired[name]:
            raise SubquadError(f"{path}: {name} means nothing to {kind.task}: leave it out")
    return kind(**checked({name: v for name, v in values.items() if name not in kind.retired}, kind, str(path)))
