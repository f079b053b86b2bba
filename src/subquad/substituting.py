"""Something else in an attribute's place for a while, where a library offers no hook of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NOTHING = object()


@contextmanager
def substituted(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let `owner.name` be `value` inside this context, for all who read it; behind it, it is as before or not there."""
    before = getattr(owner, name, _NOTHING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _NOTHING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
