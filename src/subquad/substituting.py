"""Something else in an attribute's place for a while, where a library offers no hook of its own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

_NOTHING = object()


class Standing:
    """What stands in a place: what stood there first, and what was put there since by those who have not left.

    They may leave in another order than they came in, as threads do.
    """

    def __init__(self, first: Any) -> None:
        self.first = first
        self._entered: list[tuple[object, Any]] = []

    @property
    def last(self) -> Any:
        """What was put there last by somebody who is still there."""
        return self._entered[-1][1] if self._entered else self.first

    @property
    def is_left(self) -> bool:
        """Whether all who put something there have left."""
        return not self._entered

    def enter(self, value: Any) -> object:
        """Put it there; `leave` takes what this gives."""
        token = object()
        self._entered.append((token, value))
        return token

    def leave(self, token: object) -> None:
        """Take away what was put there by this `enter`."""
        self._entered = [one for one in self._entered if one[0] is not token]


_PLACES: dict[tuple[int, str], Standing] = {}
_LOCK = Lock()


@contextmanager
def substituted(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let `owner.name` be `value` inside this context, for all who read it; behind it, it is as before or not there."""
    key = id(owner), name
    with _LOCK:
        standing = _PLACES.setdefault(key, Standing(getattr(owner, name, _NOTHING)))
        token = standing.enter(value)
        setattr(owner, name, value)
    try:
        yield
    finally:
        with _LOCK:
            standing.leave(token)
            if standing.is_left:
                del _PLACES[key]
            if standing.last is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, standing.last)


@contextmanager
def substituted_here(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """As `substituted`, a function that this thread alone calls: others call what is there without it."""
    here, before = get_ident(), getattr(owner, name)

    def called(*arguments: Any, **settings: Any) -> Any:
        return (function if get_ident() == here else before)(*arguments, **settings)

    with substituted(owner, name, called):
        yield
