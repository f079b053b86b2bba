"""Differences between things that were measured on the same cases, with the interval that they lie in."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.errors import SubquadError

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """A mean of paired differences and its 95 % interval, infinite where there is one pair alone.

    Attributes:
        count: of pairs.
    """

    mean: float
    low: float
    high: float
    count: int

    @property
    def text(self) -> str:
        """Write the mean and, where there is one, its interval."""
        known = math.isfinite(self.low)
        return f"{self.mean:+.3g}" + (f" ({self.low:+.3g} to {self.high:+.3g})" if known else "")

    def over(self, unit: float) -> "Difference":
        """Give the same in another unit, which is taken to be known exactly.

        Raises:
            SubquadError: the unit is not above zero, which would turn the interval round or leave none.
        """
        if not unit > 0:
            raise SubquadError(f"a difference can't be counted in units of {unit:g}: take a positive one")
        return Difference(self.mean / unit, self.low / unit, self.high / unit, self.count)


def mean_interval(values: Sequence[float] | Tensor) -> Difference:
    """The mean of values and where it lies by Student's t.

    Raises:
        SubquadError: there are none, some are no finite numbers, or SciPy is not there.
    """
    numbers = values.double().flatten().tolist() if isinstance(values, Tensor) else [float(value) for value in values]
    if not numbers:
        raise SubquadError("there are no pairs to compare")
    if endless := [value for value in numbers if not math.isfinite(value)]:
        raise SubquadError(f"{len(endless)} of {len(numbers)} values to compare are no finite numbers, as {endless[0]}")
    mean, count = statistics.fmean(numbers), len(numbers)
    if count == 1:
        return Difference(mean, -math.inf, math.inf, 1)
    try:
        from scipy.stats import t
    except ImportError:
        raise SubquadError("intervals need SciPy: pip install 'subquad[train]'") from None
    half = float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * statistics.stdev(numbers, mean) / math.sqrt(count)
    return Difference(mean, mean - half, mean + half, count)


def paired_difference(values: Tensor, reference: Tensor) -> Difference:
    """How much higher `values` (n,) are than the reference's (n,), of the same cases in the same order.

    Raises:
        SubquadError: they are not as many.
    """
    if values.shape != reference.shape or values.dim() != 1:
        raise SubquadError(f"pairs are of as many values: got {tuple(values.shape)} and {tuple(reference.shape)}")
    return mean_interval(values.double() - reference.double())


def relative_rise(values: Tensor, reference: Tensor) -> Difference:
    """How much higher values (n,) are than the reference's of the same cases, over the mean of these.

    Raises:
        SubquadError: they are not as many, or the reference's mean is not above zero.
    """
    return paired_difference(values, reference).over(float(reference.double().mean()))


def bootstrap_interval(samples: Tensor) -> Difference:
    """What resampled estimates (n,) come to: their mean, and the middle 95 % of them."""
    tail = (1 - CONFIDENCE) / 2
    low, high = torch.quantile(samples.double(), samples.new_tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Difference(float(samples.double().mean()), low, high, len(samples))
