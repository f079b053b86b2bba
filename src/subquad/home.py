"""Where subquad keeps what its runs share: downloads, unpacked data, compiled kernels."""

import os
from pathlib import Path

from subquad.errors import SubquadError, shown


def home() -> Path:
    """$SUBQUAD_HOME, in which ~ is the user's home, or ~/.cache/subquad.

    Raises:
        SubquadError: the user has no home, as some containers' have none.
    """
    return folder_of(os.environ.get("SUBQUAD_HOME") or "~/.cache/subquad", "SUBQUAD_HOME to a folder to write to")


def folder_of(named: str, hint: str) -> Path:
    """The folder that a variable names, in which ~ is the user's home.

    Raises:
        SubquadError: there is no such home, or it can't be looked into; `hint` is what to set.
    """
    try:
        folder = Path(named).expanduser()
        # asked once, as all who look for a file in it would have the same error
        folder.exists()
    except RuntimeError:
        raise SubquadError(f"{named} is in nobody's home: set {hint}") from None
    except OSError as error:
        raise SubquadError(f"{shown(named)} can't be looked into ({error.strerror}): set {hint}") from None
    return folder
