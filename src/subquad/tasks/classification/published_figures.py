"""What was measured beside what the authors published of the same weights."""

import math
from collections.abc import Mapping
from typing import Any

from subquad.tasks.accuracy import EvalResult

Z = 1.959964
"""Standard deviations of a normal distribution that 95 % of it are within."""


def interval(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of `count` images, both in per cent: Wilson's, which holds near 0 and 100 too."""
    p, spread = share / 100, Z**2 / count
    middle = (p + spread / 2) / (1 + spread)
    half = math.sqrt(p * (1 - p) * spread + spread**2 / 4) / (1 + spread)
    return 100 * max(0.0, middle - half), 100 * min(1.0, middle + half)


def published_text(about: Mapping[str, Any], result: EvalResult) -> str:
    """A line with the published and the measured top-1; empty where nothing was published of the weights.

    Args:
        about: what the note of a file says of the authors' file that it was made of.
        result: what was measured.
    """
    if not isinstance(about.get("top1"), int | float):
        return ""
    low, high = interval(result.top1, result.count)
    measured = f"measured {result.top1:.2f} % of {result.count} images (95 % interval {low:.2f} to {high:.2f})"
    text = f"published top-1 {about['top1']} % at {about.get('px')} px, {measured}"
    present = int((result.confusion.sum(1) > 0).sum())
    if present < len(result.confusion):
        text += f"; the images are of {present} of {len(result.confusion)} classes, the published figure is of all"
    return text + (f"; {about['remark']}" if about.get("remark") else "")
