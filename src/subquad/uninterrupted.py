"""Steps that belong together are not broken off between them."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let the block come to its end before a signal is answered that Python answers (Ctrl-C; SIGTERM in commands)."""
    if threading.current_thread() is not threading.main_thread():
        # signals are answered by the main thread alone
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before: dict[int, Any] = {}
    try:
        for number in (int(signal.SIGINT), int(signal.SIGTERM)):
            if callable(handler := signal.getsignal(number)):
                before[number] = handler
                signal.signal(number, lambda number, frame: came.append((number, frame)))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            number, frame = came[0]
            before[number](number, frame)
