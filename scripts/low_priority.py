"""Long work in the background that gives way to everything else on the machine, and keeps the memory that it has."""

import os
from contextlib import suppress
from pathlib import Path

from subquad.keeping_memory import keep_memory


def give_way() -> None:
    """Take the lowest priority, as a session of its own where no terminal belongs to it.

    Linux shares processors among sessions first, and a nice value counts within one alone (`sched_autogroup`): work
    that was started by `setsid` would take as much as everything of another session together. What else is in the
    session that it was started from keeps its priority.
    """
    os.nice(19)
    keep_memory()
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY))
    except OSError:
        with suppress(OSError):
            os.setsid()
        with suppress(OSError):
            if os.getsid(0) == os.getpid():
                Path("/proc/self/autogroup").write_text("19")
