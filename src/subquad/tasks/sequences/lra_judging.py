"""The Long Range Arena: what guessing reaches, and what a trained network does on a part of the data."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from subquad.data import create_loader
from subquad.data.synthetic import listops
from subquad.errors import SubquadError
from subquad.ranges import Pixels
from subquad.tasks.accuracy import EvalResult, evaluate
from subquad.tasks.sequences.lra_data import SEQUENCES, load_sequences
from subquad.tasks.trained import ImageNetwork, Trained
from subquad.weights.notes import required


@dataclass(frozen=True)
class TrainedSequences(Trained):
    """A classifier of sequences with what it was trained on.

    Attributes:
        data_settings: of generated data.
    """

    data_settings: Mapping[str, Any]

    def image_network(self, img_size: Pixels | None = None) -> ImageNetwork:
        """Refuse: there is nothing to look at."""
        raise SubquadError("this network is of `subquad lra`: it reads sequences, there are no images to show it")


@dataclass(frozen=True)
class SequenceJudgement:
    """What `judge_sequences` found out."""

    result: EvalResult
    device: torch.device

    @property
    def text(self) -> str:
        """Accuracy and loss, for a terminal."""
        found = self.result
        return f"{found.count} sequences: accuracy {found.top1:.2f} %, loss {found.loss:.4f}"

    def save(self, path: Path) -> list[Path]:
        """Write nothing: all of it fits on a terminal."""
        return []


def opened_sequences(model: nn.Module, note: Mapping[str, Any], recipe: Mapping[str, Any]) -> TrainedSequences:
    """A classifier of sequences with what its note, and the recipe beside it, say of its training."""
    task, settings = required(note, "data", "data_settings")
    device = next(model.parameters()).device
    return TrainedSequences(
        "lra", model, tuple(note.get("classes") or ()), task, recipe.get("data_dir"), device, settings
    )


def judge_sequences(
    trained: TrainedSequences, *, data_dir: str | None = None, split: str = "validation", batch_size: int = 64
) -> SequenceJudgement:
    """Accuracy on a part of the data that a network was trained on."""
    sequences = load_sequences(
        trained.data_to_judge(),
        split=split,
        max_length=trained.model.max_length,
        data_dir=data_dir or trained.data_dir,
        settings=trained.data_settings,
    )
    loader = create_loader(sequences, batch_size=batch_size)
    found = evaluate(trained.model, loader, device=trained.device, num_classes=trained.model.num_classes)
    return SequenceJudgement(found, trained.device)


def guesses(task: str, settings: Mapping[str, Any]) -> dict[str, float]:
    """What is reached on the test set without looking at a whole sequence, in percent.

    By chance, and of ListOps by the most frequent value, and by the root operator, its first token, alone.
    """
    found = {"chance": 100 / SEQUENCES[task].num_classes}
    if task == "listops":
        test, known = (listops.load_listops(split, **settings) for split in ("test", "train"))
        most = np.bincount(known.labels).argmax()
        found["most frequent value"] = 100 * float((test.labels == most).mean())
        found["root operator alone"] = listops.guess_from_root(test, known)
    return found
