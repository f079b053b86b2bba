"""The Long Range Arena: what guessing reaches, and what a trained run does on the test set."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from subquad.data import create_loader
from subquad.tasks.sequences.lra_data import SEQUENCES, load_sequences
from subquad.data.synthetic import listops
from subquad.tasks.accuracy import EvalResult, evaluate
from subquad.tasks.classification.trained_classifier import recipe_beside
from subquad.models import restore, weight_file
from subquad.models.restoring import naming
from subquad.tasks.sequences.sequence_network import SequenceClassifier, create_sequence_model
from subquad.weights.notes import required

TESTED = "test.json"
"""What a run folder of `subquad lra` keeps of the judgement on the test set."""


def load_sequence_model(path: Path | str) -> tuple[SequenceClassifier, dict[str, Any]]:
    """The network in a run folder or a weight file of `subquad lra`, and the file's metadata."""
    model, note = restore(path, "lra", create_sequence_model)
    return model.eval(), note


def judge_arena(path: Path | str, *, data_dir: str | None = None, batch_size: int = 64) -> EvalResult:
    """The best weights of a run folder, on the test set of their task."""
    model, note = load_sequence_model(path)
    with naming(weight_file(path)):
        task, settings = required(note, "data", "data_settings")
    folder = recipe_beside(weight_file(path).parent).get("data_dir")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sequences = load_sequences(
        task,
        split="test",
        max_length=model.max_length,
        data_dir=data_dir or folder,
        settings=settings,
    )
    loader = create_loader(sequences, batch_size=batch_size)
    return evaluate(model.to(device), loader, device=device, num_classes=model.num_classes)


def kept_accuracy(run: Path) -> float | None:
    """The test accuracy that a run folder keeps, None where it was not judged yet or what it keeps is damaged."""
    try:
        return float(json.loads((run / TESTED).read_text(encoding="utf-8"))["top1"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


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
