"""What installed packages add to the tables of this library, by their entry points."""

import warnings
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from subquad.text import one_line


def add_installed(group: str, register: Callable[[Any], Any]) -> None:
    """Register the objects that installed packages name in a group of entry points; warn of one that can't be had."""
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        try:
            register(entry.load())
        except Exception as error:
            # a broken plug-in, whatever it raises, is no reason for the others and for us to stop
            warnings.warn(f"the plug-in {entry.value} can't be added: {one_line(error)}", stacklevel=2)
