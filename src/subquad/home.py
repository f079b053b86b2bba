"""Where subquad keeps what its runs share: downloads, unpacked data, compiled kernels."""

import os
from pathlib import Path


def home() -> Path:
    """$SUBQUAD_HOME, or ~/.cache/subquad."""
    return Path(os.environ.get("SUBQUAD_HOME") or Path.home() / ".cache" / "subquad")
