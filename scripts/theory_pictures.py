"""Draws the pictures of docs/theory.md: `python scripts/theory_pictures.py docs/pictures`."""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from subquad.analysis import (
    best_error,
    confused_queries,
    entropy,
    newton_convergence,
    nystrom_error,
)
from subquad.ops.soft_formula import gaussian_kernel
from subquad.pages.charts import Axis, Series
from subquad.pages.colours import classes_of
from subquad.pages.standalone_charts import save_lines

Points = dict[str, list[tuple[float, float]]]


def rows_of(features: Callable[[torch.Tensor], torch.Tensor], q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The weights of linear attention with these features."""
    scores = features(q) @ features(k).mT
    return scores / scores.sum(-1, keepdim=True).clamp(min=1e-9)


def of_powers(count: int = 196, width: int = 64) -> Points:
    """Mean normalised entropy of rows of linear attention with powered features, and of softmax."""
    q, k = torch.randn(2, 16, count, width, dtype=torch.float64)
    softmax = float(entropy((q @ k.mT / width**0.5).softmax(-1), normalised=True).mean())
    powers = [1 + 0.5 * step for step in range(15)]
    found = []
    for power in powers:
        weights = rows_of(lambda x, power=power: x.relu() ** power, q, k)
        found.append((power, float(entropy(weights, normalised=True).mean())))
    return {"ReLU^p": found, "softmax": [(power, softmax) for power in powers]}


def of_newton(count: int = 49) -> Points:
    """The largest singular value of I − BY by step, for maps of landmarks that are more and more alike."""
    lines = {}
    for spread in (0.5, 0.2, 0.1):
        x = spread * torch.randn(count, 32, dtype=torch.float64)
        far = newton_convergence(gaussian_kernel(x, x), 20).identity.tolist()
        lines[f"spread {spread}"] = [(step, max(value, 1e-8)) for step, value in enumerate(far)]
    return lines


def of_landmarks(side: int = 28, width: int = 32) -> Points:
    """Errors in place of the Gaussian kernel of a smooth map, by the number of landmarks."""
    coarse = torch.randn(1, width, 6, 6, dtype=torch.float64)
    field = 0.5 * torch.nn.functional.interpolate(coarse, size=(side, side), mode="bicubic")
    tokens = field[0].flatten(1).T
    lines: Points = {"pooled": [], "random": [], "best": []}
    for across in (2, 3, 4, 5, 6, 7, 9, 11, 14):
        count = across**2
        pooled = torch.nn.functional.adaptive_avg_pool2d(field, across)[0].flatten(1).T
        chance = tokens[torch.randperm(len(tokens))[:count]]
        lines["pooled"].append((count, float(nystrom_error(tokens, pooled))))
        lines["random"].append((count, float(nystrom_error(tokens, chance))))
        lines["best"].append((count, float(best_error(tokens, count))))
    return lines


def of_collinear_queries(width: int = 8, keys: int = 49) -> Points:
    """Pairs of 20 queries on some rays that are confused, by the number of rays."""
    lines: Points = {"linear": [], "inline": [], "softmax": []}
    k = torch.randn(keys, width, dtype=torch.float64)
    for rays in (1, 2, 4, 5, 10, 20):
        directions = torch.randn(rays, width, dtype=torch.float64)
        q = directions.repeat_interleave(20 // rays, 0) * torch.linspace(0.5, 3, 20, dtype=torch.float64)[:, None]
        scores = q.relu() @ k.relu().T
        every = {
            "linear": scores / scores.sum(-1, keepdim=True),
            "inline": (1 + scores - scores.mean(-1, keepdim=True)) / keys,
            "softmax": (q @ k.T).softmax(-1),
        }
        for name, weights in every.items():
            lines[name].append((rays, float(confused_queries(weights, q))))
    return lines


def save(lines: Points, x: Axis, y: Axis, path: Path) -> None:
    """Draw the lines, and print their numbers."""
    colours = classes_of({name: name for name in lines})
    save_lines([Series(name, colours[name], points, []) for name, points in lines.items()], x, y, path)
    print(path)
    for name, points in lines.items():
        print(f"  {name}: {', '.join(f'{at:g} {value:.3g}' for at, value in points)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the pictures; is made")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    save(of_powers(), Axis("power"), Axis("entropy of a row, of ln N"), folder / "entropy.svg")
    save(of_collinear_queries(), Axis("rays", log=True), Axis("confused pairs of 190"), folder / "confusion.svg")
    save(of_newton(), Axis("Newton steps", whole=True), Axis("I − BY", log=True), folder / "newton.svg")
    save(of_landmarks(), Axis("landmarks", log=True), Axis("error of the kernel"), folder / "landmarks.svg")
