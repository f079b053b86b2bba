"""A folder with the tokens of a walk over a large image, and how far it has come: what is broken off goes on there.

The tokens are on the disk before the record says so, and the record is replaced whole: a process that is killed at any
time leaves a folder from which the next one goes on, behind the last step that was finished.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from subquad.errors import SubquadError
from subquad.holding import holding
from subquad.large.token_store import TokensInFiles
from subquad.writing import write_json

RECORD = "stream.json"


class Progress:
    """How many steps are done, of the walk whose tokens lie in a folder."""

    def __init__(self, folder: Path, about: dict[str, Any], store: TokensInFiles, done: int) -> None:
        self.folder, self.about, self.store, self.done = folder, about, store, done

    def reached(self, done: int) -> None:
        """Say that so many steps are done, for good."""
        self.done = done
        write_json(self.folder / RECORD, self.about | {"done": done, "current": self.store.current})

    def finished(self) -> None:
        """Remove record and tokens."""
        for path in (self.folder / RECORD, *self.store.paths):
            path.unlink(missing_ok=True)


@contextmanager
def tokens_in_folder(
    folder: Path, identity: str, count: int, dim: int, dtype: torch.dtype
) -> Iterator[tuple[TokensInFiles, Progress]]:
    """Hold a folder of tokens, new, or of the same walk that was broken off.

    Args:
        folder: made if it is not there.
        identity: of what the walk is, network and image.
        count: tokens.
        dim: their channels.
        dtype: what they are kept in.

    Raises:
        SubquadError: the folder has the tokens of another walk, or can't be written to.
    """
    about = {"identity": identity, "tokens": count, "dim": dim, "dtype": str(dtype).removeprefix("torch.")}
    with holding(folder):
        record = _read(folder / RECORD)
        if record is not None and {key: record.get(key) for key in about} != about:
            raise SubquadError(
                f"{folder} has the tokens of another network or image: name another folder, or remove {RECORD} in it"
            )
        store = TokensInFiles(folder, count, dim, dtype, current=0 if record is None else int(record["current"]))
        yield store, Progress(folder, about, store, 0 if record is None else int(record["done"]))


def _read(path: Path) -> dict[str, Any] | None:
    """What a record says; None where there is none."""
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text())
        if isinstance(record, dict) and record.get("current") in (0, 1) and isinstance(record.get("done"), int):
            return record
    except (OSError, ValueError):
        pass
    raise SubquadError(f"{path} is damaged: remove it to start anew")
