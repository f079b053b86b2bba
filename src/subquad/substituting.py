"""Something else in an attribute's place for a while, where a library offers no hook of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def substituted(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let `owner.name` be `value` inside this context, for all who read it."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
