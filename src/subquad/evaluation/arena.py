"""The Long Range Arena: what is published, what guessing reaches, and what a trained run does on the test set."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from subquad.data import create_loader, listops
from subquad.data.sequences import SEQUENCES, load_sequences
from subquad.errors import SubquadError
from subquad.evaluation.accuracy import EvalResult, evaluate
from subquad.models import read_weights
from subquad.models.sequence import SequenceClassifier, create_sequence_model

COLUMNS = ("text", "listops", "retrieval", "pathfinder", "image")

PUBLISHED: dict[str, tuple[str, tuple[float, ...]]] = {
    "Transformer": ("PolaFormer", (61.55, 38.71, 80.93, 70.39, 39.14)),
    "Local attention": ("Tay et al.", (52.98, 15.82, 53.39, 66.63, 41.46)),
    "Linear Transformer": ("Tay et al.", (65.90, 16.13, 53.09, 75.30, 42.34)),
    "Reformer": ("Tay et al.", (56.10, 37.27, 53.40, 68.50, 38.07)),
    "Performer": ("Tay et al.", (65.40, 18.01, 53.82, 77.05, 42.77)),
    "Longformer": ("Tay et al.", (62.85, 35.63, 56.89, 69.71, 42.22)),
    "Informer": ("PolaFormer", (62.13, 37.05, 79.35, 56.44, 37.86)),
    "Linformer": ("PolaFormer", (57.29, 36.44, 77.85, 65.39, 38.43)),
    "Kernelized": ("PolaFormer", (60.02, 38.46, 82.11, 69.86, 32.63)),
    "cosFormer": ("PolaFormer", (63.54, 37.20, 80.28, 70.00, 35.84)),
    "Nyströmformer": ("PolaFormer", (62.36, 37.95, 80.89, 69.34, 38.94)),
    "Skyformer": ("Chen et al.", (64.70, 38.69, 82.06, 70.73, 40.77)),
    "Hedgehog": ("PolaFormer", (64.60, 37.15, 82.24, 74.16, 40.15)),
    "PolaFormer, α = 3": ("PolaFormer", (73.06, 37.35, 80.50, 70.53, 42.15)),
    "PolaFormer, α = 5": ("PolaFormer", (72.33, 38.76, 80.37, 68.98, 41.91)),
    "PolaFormer, α = 7": ("PolaFormer", (71.93, 37.60, 81.47, 69.09, 42.77)),
}
"""Test accuracy in percent, by `COLUMNS`, and whose figures they are.

PolaFormer's table (arXiv 2501.15061) puts figures of several code bases side by side: other networks, other lengths.
"""


def load_sequence_model(path: Path | str) -> tuple[SequenceClassifier, dict[str, Any]]:
    """The network in a run folder or a weight file of `subquad lra`, and the file's metadata."""
    path = Path(path)
    file = path / "best.safetensors" if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise SubquadError(f"{path} holds no best.safetensors: name a run folder that has finished an epoch")
    state, note = read_weights(file)
    creation = dict(note.get("creation") or {})
    if creation.pop("task", None) != "lra":
        raise SubquadError(f"{file} holds no classifier of sequences: only `subquad lra` writes them")
    model = create_sequence_model(**creation)
    model.load_state_dict(state)
    return model.eval(), note


def judge_arena(path: Path | str, *, data_dir: str | None = None, batch_size: int = 64) -> EvalResult:
    """The best weights of a run folder, on the test set of their task."""
    model, note = load_sequence_model(path)
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    file = folder / "recipe.yaml"
    recipe = yaml.safe_load(file.read_text()) if file.is_file() else {}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sequences = load_sequences(
        note["data"],
        split="test",
        max_length=model.max_length,
        data_dir=data_dir or recipe.get("data_dir"),
        settings=note["data_settings"],
    )
    loader = create_loader(sequences, batch_size=batch_size)
    return evaluate(model.to(device), loader, device=device, num_classes=model.num_classes)


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
