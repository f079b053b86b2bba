"""What tests of run folders share: data without a library to load, and a recipe of two short epochs."""

import gc
import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from subquad.cli import main
from subquad.errors import SubquadError
from subquad.tasks import load_recipe
from subquad.tasks.classification import Recipe


@pytest.fixture(scope="module", autouse=True)
def little_garbage():
    """Every run collects garbage twice; what was imported before it is not looked through each time."""
    gc.freeze()
    yield
    gc.unfreeze()


def draw(folder):
    """Pictures of two classes in the layout of ImageNet."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 3)):
        for light, name in enumerate(("dark", "light")):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(80 * light, 100 + 80 * light, (8, 8, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png")
    return folder


def short(pictures, **changes):
    sizes = {"img_size": (8, 8), "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 1}
    schedule = {"epochs": 2, "batch_size": 8, "lr": 1e-3, "warmup_epochs": 0}
    return Recipe(data=str(pictures), attention="linear", **(sizes | schedule | changes))


def listing(folder):
    """Everything below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def same(first, second):
    """Whether two runs have learned the same, bit for bit."""
    for name in ("last.safetensors", "best.safetensors"):
        one, other = load_file(first / name), load_file(second / name)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one), name
    learned = ("epoch", "train_loss", "eval_loss", "eval_top1", "lr")
    rows = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (first, second)]
    assert [[row[key] for key in learned] for row in rows[0]] == [[row[key] for key in learned] for row in rows[1]]
    return True


def complaint(capsys, *argv):
    assert main([str(word) for word in argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith("subquad: ") and said.count("\n") == 1, said
    return said


def failing_now():
    raise SubquadError("made to fail")


def short_of(run):
    return load_recipe(run / "recipe.yaml", Recipe)
