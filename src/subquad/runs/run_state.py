"""The state of a run after an epoch, whole, in one file that loads without running code from it."""

import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.errors import SubquadError
from subquad.tasks.task import Row
from subquad.weights.fitting import under_current_names
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
        rows: the metrics, a row an epoch; None in files of earlier versions, which kept them in metrics.jsonl alone.
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
    rows: list[Row] | None = None


def save_state(state: State, path: Path) -> None:
    """Write `state` to `path`, whole or not at all."""
    # through a file of ours, which says why it can't be written
    with replacing(path) as aside, aside.open("wb") as file:
        torch.save(vars(state), file)


def load_state(path: Path) -> State:
    """Read what `save_state` wrote.

    Raises:
        SubquadError: the file is damaged, be it by a single bit, or something else.
    """
    try:
        # every record has a checksum, which torch does not look at
        with zipfile.ZipFile(path) as records:
            damaged = records.testzip()
        if damaged is None:
            return State(**torch.load(path, map_location="cpu", weights_only=True))
        reason = f"the checksum of {damaged} is wrong"
    except Exception as error:
        # a damaged file can fail in any way
        reason = str(error).partition("\n")[0] or type(error).__name__
    raise SubquadError(f"{path} is no state of a run, or is damaged: {reason}")


def put_back(state: State, path: Path, model: Any, optimizer: Any, ema: Any, scaler: Any) -> None:
    """Give each its part of a state, which `path` held; `ema` and `scaler` may be None.

    Raises:
        SubquadError: the parts are of another network or recipe.
    """
    try:
        model.load_state_dict(under_current_names(state.model, model.state_dict()))
        optimizer.load_state_dict(state.optimizer)
        if ema is not None:
            ema.load_state_dict(under_current_names(state.ema, ema.state_dict()))
        if scaler is not None:
            scaler.load_state_dict(state.scaler)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SubquadError(f"{path} does not fit the recipe beside it: {' '.join(str(error).split())}") from None


def not_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether a number among `tensors` is NaN or infinite."""
    bad = [~torch.isfinite(tensor).all() for tensor in tensors if tensor.is_floating_point()]
    return bool(bad) and bool(torch.stack(bad).any())
