"""The state of a run after an epoch, whole, in one file that loads without running code from it."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from subquad.errors import SubquadError
from subquad.writing import replacing


@dataclass
class State:
    """Everything a run goes on from.

    Attributes:
        epochs: how many are done.
        updates: of the weights, so far.
        total_batch: images of one update.
        best: the best value of the task's metric so far, of the weights or of their average.
        best_epoch: the epoch it was reached in.
        model, optimizer, ema, scaler: state dicts; empty for what the recipe does without.
    """

    epochs: int
    updates: int
    total_batch: int
    best: float
    best_epoch: int
    model: dict[str, Any]
    optimizer: dict[str, Any]
    ema: dict[str, Any]
    scaler: dict[str, Any]


def save_state(state: State, path: Path) -> None:
    """Write `state` to `path`, whole or not at all."""
    with replacing(path) as aside:
        torch.save(vars(state), aside)


def load_state(path: Path) -> State:
    """Read what `save_state` wrote."""
    try:
        return State(**torch.load(path, map_location="cpu", weights_only=True))
    except (pickle.UnpicklingError, RuntimeError, EOFError, TypeError) as error:
        raise SubquadError(f"{path} is no state of a run: {str(error).splitlines()[0]}") from error
