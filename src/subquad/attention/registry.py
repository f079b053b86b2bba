"""Mechanisms by name: ours, those that are registered, and those of installed plug-ins.

A plug-in is a package with an entry point in the group `subquad.attention`:

    [project.entry-points."subquad.attention"]
    mean = "my_package.mean:MeanAttention"

Its name is known at once, its code is imported when the mechanism is asked for. What goes wrong there is one line that
names the plug-in, and nothing else is the worse for it.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from importlib.metadata import EntryPoint

from torch import nn

from subquad.attention.contract import check_mechanism
from subquad.errors import SubquadError, reason_of
from subquad.plugins import installed

GROUP = "subquad.attention"


class Mechanisms(MutableMapping[str, type[nn.Module]]):
    """A dict of classes that also holds the installed plug-ins, each of which is imported when it is asked for."""

    def __init__(self, classes: Mapping[str, type[nn.Module]]) -> None:
        self._classes = dict(classes)
        self._found: dict[str, list[EntryPoint]] | None = None

    def __getitem__(self, name: str) -> type[nn.Module]:
        if points := self._plugins.get(name):
            self._load(name, points)
        return self._classes[name]

    def __setitem__(self, name: str, cls: type[nn.Module]) -> None:
        self._classes[name] = cls

    def __delitem__(self, name: str) -> None:
        del self._classes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._classes, *self._plugins]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self._classes or name in self._plugins

    def register(self, name: str, cls: type[nn.Module]) -> None:
        """Add a class that keeps the contract; see `register_attention`."""
        check_mechanism(name, cls)
        if self._classes.get(name) is cls:
            return
        taken = [_where(self._classes[name])] if name in self._classes else []
        # a plug-in may well register what its entry point names
        taken += [
            _origin(point)
            for point in self._plugins.get(name, [])
            if _package(point.module) != _package(cls.__module__)
        ]
        if taken:
            raise SubquadError(f"there is an attention '{name}' already, {taken[0]}: take another name")
        self._plugins.pop(name, None)
        self._classes[name] = cls

    def name_of(self, cls: type) -> str | None:
        """The name of a class, if it has one."""
        return next((name for name, known in self._classes.items() if known is cls), None)

    @property
    def _plugins(self) -> dict[str, list[EntryPoint]]:
        """Entry points by name, looked for once: that takes some 40 ms."""
        if self._found is None:
            self._found = {}
            for point in installed(GROUP):
                self._found.setdefault(point.name, []).append(point)
        return self._found

    def _load(self, name: str, points: list[EntryPoint]) -> None:
        """Import a plug-in and check it.

        Raises:
            SubquadError: it can't be imported, breaks the contract, or has a name that another mechanism has.
        """
        others = [_where(self._classes[name])] if name in self._classes else list(map(_origin, points[1:]))
        if others:
            raise SubquadError(f"'{name}' is both {_origin(points[0])} and {others[0]}: uninstall one of them")
        try:
            cls = points[0].load()
            check_mechanism(name, cls)
            if self._classes.get(name, cls) is not cls:
                raise SubquadError(f"it registers another class as '{name}'")
        except (Exception, SystemExit) as error:
            # whatever a stranger's module does while it is imported
            kind = "" if isinstance(error, SubquadError) else f"{type(error).__name__}: "
            raise SubquadError(f"{_origin(points[0])} can't be used: {kind}{reason_of(error)}") from error
        self._plugins.pop(name, None)
        self._classes[name] = cls


def _where(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _package(module: str) -> str:
    return module.partition(".")[0]


def _origin(point: EntryPoint) -> str:
    package = f" of {point.dist.name} {point.dist.version}" if point.dist is not None else ""
    return f"the plug-in {point.value}{package}"
