"""A folder with the tokens of a walk over a large image, and how far it has come: what is broken off goes on there.

The tokens are on the disk before the record says so, and the record is replaced whole: a process that is killed at any
time leaves a folder from which the next one goes on, behind the last step that was finished.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from subquad.errors import SubquadError
from subquad.holding import holding
from subquad.large.token_store import TokensInFiles, token_paths
from subquad.writing import write_json

RECORD = "stream.json"


class Progress:
    """How many steps are done, of the walk whose tokens lie in a folder: `Stores` of files.

    Args:
        folder: has the record and the files.
        about: what the walk is known by.
        sizes: (tokens, channels) of each stage.
        dtype: what tokens are kept in.
        record: of the walk that is gone on with; None for a new one.
    """

    def __init__(
        self,
        folder: Path,
        about: dict[str, Any],
        sizes: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        record: dict[str, Any] | None,
    ) -> None:
        self.folder, self.about, self.sizes, self.dtype = folder, about, sizes, dtype
        begun = {"done": 0, "current": 0, "stage": 0} if record is None else record
        self.done, self.current, self.stage = (int(begun[name]) for name in ("done", "current", "stage"))
        self.stores: dict[int, TokensInFiles] = {}

    def store(self, stage: int) -> TokensInFiles:
        """Two files, those that are there where the walk was in this stage."""
        current = self.current if stage == self.stage else 0
        if self.done and stage == self.stage:
            self._check_there(stage)
        own = TokensInFiles(self.folder, *self.sizes[stage], self.dtype, current=current, stage=stage)
        self.stores[stage] = own
        return own

    def _check_there(self, stage: int) -> None:
        """Raise where the tokens that the record speaks of are gone."""
        count, dim = self.sizes[stage]
        path = token_paths(self.folder, stage)[self.current]
        if not path.is_file() or path.stat().st_size < count * dim * self.dtype.itemsize:
            raise SubquadError(f"{path} is damaged or gone, and {RECORD} needs it: remove that to start anew")

    def reached(self, done: int, stage: int) -> None:
        """Say that so many steps are done, for good, and remove what stages before this one had."""
        self.done, self.stage, self.current = done, stage, self.stores[stage].current
        written = {"done": done, "current": self.current, "stage": stage}
        write_json(self.folder / RECORD, self.about | written)
        self.remove_before(stage)

    def remove_before(self, stage: int) -> None:
        """Remove the tokens of earlier stages, also those that a process left which was killed before it did so."""
        for number in range(stage):
            self.stores.pop(number, None)
            for path in token_paths(self.folder, number):
                path.unlink(missing_ok=True)

    def finished(self) -> None:
        """Remove record and tokens."""
        (self.folder / RECORD).unlink(missing_ok=True)
        self.remove_before(len(self.sizes))


@contextmanager
def tokens_in_folder(
    folder: Path, identity: str, sizes: Sequence[tuple[int, int]], dtype: torch.dtype
) -> Iterator[Progress]:
    """Hold a folder of tokens, new, or of the same walk that was broken off.

    Args:
        folder: made if it is not there.
        identity: of what the walk is, network and image.
        sizes: (tokens, channels) of each stage.
        dtype: what they are kept in.

    Raises:
        SubquadError: the folder has the tokens of another walk, or can't be written to.
    """
    kept = str(dtype).removeprefix("torch.")
    about = {"identity": identity, "sizes": [list(size) for size in sizes], "dtype": kept}
    with holding(folder):
        record = _read(folder / RECORD)
        if record is not None and {key: record.get(key) for key in about} != about:
            raise SubquadError(
                f"{folder} has the tokens of another network or image, or in another dtype: name another folder, or "
                f"remove {RECORD} in it"
            )
        progress = Progress(folder, about, sizes, dtype, record)
        progress.remove_before(progress.stage)
        try:
            yield progress
        except BaseException:
            if not progress.done:
                # nothing to go on with
                progress.finished()
            raise


def _read(path: Path) -> dict[str, Any] | None:
    """What a record says; None where there is none."""
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        whole = isinstance(record, dict) and all(isinstance(record.get(name), int) for name in ("done", "stage"))
        if whole and record["current"] in (0, 1):
            return dict(record)
    except (OSError, ValueError, KeyError):
        pass
    raise SubquadError(f"{path} is damaged: remove it to start anew")
