"""What installed packages add to the tables of this library, by their entry points."""

import warnings
from collections.abc import Callable
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from typing import Any

from subquad.text import one_line


def installed(group: str) -> list[EntryPoint]:
    """The entry points of a group, by name; a package whose own are damaged hides no other's."""
    try:
        points = list(entry_points(group=group))
    except Exception:
        points = [point for package in distributions() for point in _points_of(package, group)]
    return sorted(points, key=lambda point: point.name)


def _points_of(package: Distribution, group: str) -> list[EntryPoint]:
    try:
        return list(package.entry_points.select(group=group))
    except Exception:
        return []


def add_installed(group: str, register: Callable[[Any], Any]) -> None:
    """Register the objects that installed packages name in a group of entry points; warn of one that can't be had."""
    for entry in installed(group):
        try:
            register(entry.load())
        except Exception as error:
            # a broken plug-in, whatever it raises, is no reason for the others and for us to stop
            warnings.warn(f"the plug-in {entry.value} can't be added: {one_line(error)}", stacklevel=2)
