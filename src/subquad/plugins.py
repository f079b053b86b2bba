"""Tables that others can add to: what is registered, and what installed packages name in their entry points.

A plug-in is a package with an entry point in the group of a table, for mechanisms

    [project.entry-points."subquad.attention"]
    mean = "my_package.mean:MeanAttention"

Its name is known at once, its code is imported when the entry is asked for. What goes wrong there is one line that
names the plug-in, said to whoever asks for it, and nothing else is the worse for it.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from typing import Any, TypeVar

from subquad.errors import SubquadError, named_reason, reason_of

Entry = TypeVar("Entry")

TABLES: dict[str, "Table[Any]"] = {}
"""The tables by their groups of entry points."""

PACKAGES: dict[str, str] = {}
"""The packages of plug-ins that are in use, and such a package in words."""


class Table(MutableMapping[str, Entry]):
    """A dict that also holds installed plug-ins, each of which is imported when it is asked for.

    Args:
        what: an entry in words, with its article: "a task".
        group: of the entry points.
        check: raises a SubquadError that says what an object lacks to be the entry of a name.
        entries: those of the library.
    """

    def __init__(
        self, what: str, group: str, check: Callable[[str, Any], None], entries: Mapping[str, Entry] | None = None
    ) -> None:
        self.what, self.group, self.check = what, group, check
        self._entries: dict[str, Entry] = dict(entries or {})
        self._found: dict[str, list[EntryPoint]] | None = None
        self._loading = ""
        TABLES[group] = self

    def __getitem__(self, name: str) -> Entry:
        if name != self._loading and (points := self._plugins.get(name)):
            self._load(name, points)
        return self._entries[name]

    def __setitem__(self, name: str, entry: Entry) -> None:
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._entries, *self._plugins]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._plugins

    @property
    def loaded(self) -> Mapping[str, Entry]:
        """What needs no import any more: ours, what is registered, and plug-ins that were asked for."""
        return self._entries

    def usable(self) -> Iterator[Entry]:
        """All entries, without plug-ins that can't be had: whoever asks for one of those by name is told why."""
        return (self[name] for name in self.usable_names())

    def usable_names(self, log: Callable[[str], object] = lambda line: None) -> Iterator[str]:
        """The names of these; `log` hears of each that is left out, and why."""
        for name in self:
            try:
                self[name]
            except SubquadError as reason:
                log(f"{name} is left out: {reason}")
                continue
            yield name

    def register(self, name: str, entry: Entry) -> None:
        """Add an entry for this process; once more is no more than once.

        A class of a notebook, whose cell is run again, takes its own place.

        Raises:
            SubquadError: it lacks something, or another one has the name.
        """
        self.check(name, entry)
        if self._entries.get(name) is entry:
            return
        known = self._entries.get(name)
        taken = [where_defined(known)] if known is not None and not is_again(known, entry) else []
        # a plug-in may well register what its entry point names
        own = getattr(entry, "__module__", "") if isinstance(entry, type) else ""
        if name != self._loading:
            taken += [
                f", {_origin(point)}"
                for point in self._plugins.get(name, [])
                if _package(point.module) != _package(own)
            ]
        if taken:
            raise SubquadError(f"there is {self.what} '{name}' already{taken[0]}: take another name")
        self._plugins.pop(name, None)
        self._entries[name] = entry

    def name_of(self, entry: Any) -> str | None:
        """The name of an entry, if it has one."""
        return next((name for name, known in self._entries.items() if known is entry), None)

    @property
    def _plugins(self) -> dict[str, list[EntryPoint]]:
        """Entry points by name, looked for once: that takes some 40 ms."""
        if self._found is None:
            self._found = {}
            for point in installed(self.group):
                self._found.setdefault(point.name, []).append(point)
        return self._found

    def _load(self, name: str, points: list[EntryPoint]) -> None:
        """Import a plug-in and check it.

        Raises:
            SubquadError: it can't be imported, lacks something, or has a name that another one has.
        """
        others = (
            [where_defined(self._entries[name])] if name in self._entries else [f", {_origin(p)}" for p in points[1:]]
        )
        if others:
            other = others[0].removeprefix(", ") or "one of this library's"
            raise SubquadError(f"'{name}' is both {_origin(points[0])} and {other}: uninstall one of them")
        before, self._loading = self._loading, name
        try:
            entry = points[0].load()
            self.check(name, entry)
            if self._entries.get(name, entry) is not entry:
                raise SubquadError(f"it registers another one as '{name}'")
        except (Exception, SystemExit) as error:
            # whatever a stranger's module does while it is imported
            reason = reason_of(error) if isinstance(error, SubquadError) else named_reason(error)
            raise SubquadError(f"{_origin(points[0])} can't be used: {reason}") from error
        finally:
            self._loading = before
        self._plugins.pop(name, None)
        self._entries[name] = entry
        package = _package(points[0].module)
        PACKAGES[package] = f"{_distribution(points[0]) or package}, a plug-in"


def at_fault(error: BaseException) -> str | None:
    """The package of plug-ins that raised an error, or called what did, in words; None where it was the library."""
    packages = [_package(str(frame.f_globals.get("__name__"))) for frame, _ in traceback.walk_tb(error.__traceback__)]
    nearest = next((package for package in reversed(packages) if package in {"subquad", *PACKAGES}), "")
    return PACKAGES.get(nearest)


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


def where_defined(entry: object) -> str:
    """Where a class is defined, behind a comma; nothing of other objects, which do not know it."""
    return f", {entry.__module__}.{entry.__qualname__}" if isinstance(entry, type) else ""


def is_again(known: object, entry: object) -> bool:
    """Whether a class of a notebook was made anew, as when its cell is run again; those of a function may be others."""
    where = where_defined(entry)
    return where == where_defined(known) and where.startswith(", __main__.") and "<locals>" not in where


def _package(module: str) -> str:
    return module.partition(".")[0]


def _origin(point: EntryPoint) -> str:
    package = _distribution(point)
    return f"the plug-in {point.value} of {package}" if package else f"the plug-in {point.value}"


def _distribution(point: EntryPoint) -> str:
    """The installed package of an entry point, with its version, where that is known."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else ""
