"""Which attention layers can be converted: those that classes in the files of this folder stand for.

Layers are known by the full names of their classes (`replaces`), or by what they compute (`readings.py`), so that no
library of theirs is imported to find that something is of no known kind; none of the files needs one to be read.

Added from outside by `register_family`, or by an installed package with an entry point in the group
`subquad.families`: its name is the module in which the foreign layers are defined, its object the class that stands for
them. It is imported when a layer of that module is seen.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from inspect import getattr_static
from pathlib import Path
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any

from torch import nn

from subquad.conversion.converted_attention import ConvertedAttention
from subquad.conversion.families.proven_attention import ProvenAttention
from subquad.conversion.families.proven_maps import stands_for_maps
from subquad.conversion.families.proven_places import stands_for_places
from subquad.conversion.families.proven_reducing import stands_for_reducing
from subquad.conversion.families.proven_turning import stands_for_turning
from subquad.conversion.families.proven_windows import stands_for_windows
from subquad.conversion.families.readings import reading_of
from subquad.errors import SubquadError, shown
from subquad.inference.foreign_halves import InFewSteps
from subquad.plugins import Table, is_again, where_defined

BY_NUMBERS = stands_for_reducing, stands_for_windows, stands_for_maps, stands_for_places
"""What finds out by numbers what layers of anybody's classes compute, behind those of plain tokens."""

REGISTERED: dict[str, type[ConvertedAttention]] = {}
"""What `register_family` added, by the full names of the foreign layers' classes."""


@cache
def own_families() -> Mapping[str, type[ConvertedAttention]]:
    """The classes of this library, by the full names of the foreign layers' classes."""
    files = [import_module(f"{__package__}.{one.name}") for one in iter_modules([str(Path(__file__).parent)])]
    members = (one for file in files for one in vars(file).values())
    kinds = dict.fromkeys(one for one in members if isinstance(one, type) and issubclass(one, ConvertedAttention))
    # what a class is derived from stands for its layers itself
    return MappingProxyType({name: kind for kind in kinds for name in vars(kind).get("replaces", ())})


def check_family(name: str, cls: Any) -> None:
    """Raise a SubquadError where a class stands for no foreign layers, or not for those of the module `name`."""
    if not (isinstance(cls, type) and issubclass(cls, ConvertedAttention) and _are_names(cls.replaces)):
        raise SubquadError(
            "a family is a class of ConvertedAttention whose `replaces` is a tuple of full names of classes, got "
            f"{shown(cls)}{f' with {shown(cls.replaces)}' if hasattr(cls, 'replaces') else ''}"
        )
    needed = ("sizes", "forward", *(("map_under",) if cls.is_handed_maps else ()))
    if missing := [one for one in needed if getattr_static(cls, one) is getattr_static(ConvertedAttention, one)]:
        raise SubquadError(f"{cls.__name__} can't be a family: it has no method {', '.join(missing)} (docs/convert.md)")
    if name and (elsewhere := [one for one in cls.replaces if not one.startswith(f"{name}.")]):
        raise SubquadError(
            f"{cls.__name__} replaces {', '.join(elsewhere)}, and its entry point is called {name}: that is the module "
            "in which foreign layers are defined"
        )


def _are_names(replaces: Any) -> bool:
    names = isinstance(replaces, tuple) and replaces
    return bool(names) and all(isinstance(one, str) and "." in one.strip(".") for one in replaces)


PLUGGED_IN: Table[type[ConvertedAttention]] = Table("a family", "subquad.families", check_family)
"""Families of installed plug-ins, by the modules in which foreign layers are defined."""


def register_family(cls: type[ConvertedAttention]) -> None:
    """Convert attention layers of further classes, for this process: those that `cls.replaces` names in full.

    A class of a notebook, whose cell is run again, takes its own place.

    Raises:
        SubquadError: `cls` is no class of `ConvertedAttention`, stands for nothing, or for what another one stands for.
    """
    check_family("", cls)
    for name in cls.replaces:
        known = standing_for(name)
        if known is not None and known is not cls and not is_again(known, cls):
            raise SubquadError(f"there is a family of '{name}' already{where_defined(known)}: two can't stand for it")
    REGISTERED.update(dict.fromkeys(cls.replaces, cls))


def converted_class(layer: nn.Module) -> type[ConvertedAttention] | None:
    """The class of ours that stands for a layer, by its class or one that it is derived from; None where none does.

    A class that overrides `forward` is not what it is derived from. Of it, and of all that have no known name, numbers
    may tell what they compute.
    """
    for cls in type(layer).__mro__:
        name = f"{cls.__module__}.{cls.__qualname__}"
        found = standing_for(name)
        if found is not None:
            return found.standing_for(layer)
        if "forward" in vars(cls) and InFewSteps not in cls.__bases__:
            break
    if (turning := stands_for_turning(layer)) is not None:
        return turning
    if reading_of(layer) is not None:
        return ProvenAttention
    for stands_for in BY_NUMBERS:
        if (found := stands_for(layer)) is not None:
            return found
    return None


def standing_for(name: str) -> type[ConvertedAttention] | None:
    """The class that stands for layers of a class with this full name; None where none does."""
    if name in REGISTERED:
        return REGISTERED[name]
    for module in PLUGGED_IN:
        # a plug-in adds to what is known of a module
        if name.startswith(f"{module}.") and name in PLUGGED_IN[module].replaces:
            return PLUGGED_IN[module]
    return own_families().get(name)
