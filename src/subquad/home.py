"""Where subquad keeps what its runs share: downloads, unpacked data, compiled kernels."""

import os
from pathlib import Path

from subquad.errors import SubquadError


def home() -> Path:
    """$SUBQUAD_HOME, in which ~ is the user's home, or ~/.cache/subquad.

    Raises:
        SubquadError: the user has no home, as some containers' have none.
    """
    named = os.environ.get("SUBQUAD_HOME") or "~/.cache/subquad"
    try:
        return Path(named).expanduser()
    except RuntimeError:
        raise SubquadError(f"{named} is in nobody's home: set SUBQUAD_HOME to a folder to write to") from None
