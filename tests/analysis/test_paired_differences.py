"""Differences of pairs have their intervals; Fréchet distances and noise errors are what they are called."""

import math

import pytest
import torch

from subquad import SubquadError
from subquad.analysis.frechet import frechet_difference, frechet_distance
from subquad.analysis.noise_errors import noise_errors, noise_of, noisy
from subquad.analysis.paired_differences import bootstrap_interval, mean_interval, paired_difference, relative_rise


def test_the_interval_is_students():
    # 3 values: t(0.975, 2) = 4.3027, s = 1
    found = mean_interval([1.0, 2.0, 3.0])
    assert (found.mean, found.count) == (2, 3)
    assert found.high - found.mean == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert found.mean - found.low == pytest.approx(found.high - found.mean)
    assert found.text == "+2 (-0.484 to +4.48)"


def test_one_pair_has_no_interval():
    found = mean_interval([0.5])
    assert (found.low, found.high, found.text) == (-math.inf, math.inf, "+0.5")


def test_pairs_show_what_the_spread_of_cases_hides():
    cases = 10 * torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    more = 0.1 * torch.randn(1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.02
    found = paired_difference(cases + more, cases)
    assert 0 < found.low < 0.02 < found.high < 0.04
    assert relative_rise(torch.tensor([2.2, 4.4]), torch.tensor([2.0, 4.0])).mean == pytest.approx(0.1)


@pytest.mark.parametrize(("values", "reference"), [((3,), (2,)), ((2, 2), (2, 2))])
def test_what_is_no_pair_is_refused(values, reference):
    with pytest.raises(SubquadError, match="pairs are of as many values"):
        paired_difference(torch.zeros(values), torch.zeros(reference))
    with pytest.raises(SubquadError, match="no pairs"):
        mean_interval([])


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_values_that_are_no_numbers_have_no_interval(odd):
    with pytest.raises(SubquadError, match=f"1 of 3 values to compare are no finite numbers, as {odd}"):
        mean_interval([1.0, odd, 2.0])


@pytest.mark.parametrize("reference", [[-1.0, -2.0], [-1.0, 1.0]])
def test_a_rise_is_over_a_mean_above_zero(reference):
    with pytest.raises(SubquadError, match=r"units of (-1\.5|0): take a positive one"):
        relative_rise(torch.tensor([1.0, 2.5]), torch.tensor(reference))


def test_the_middle_of_resamples():
    found = bootstrap_interval(torch.arange(1001, dtype=torch.float64))
    assert (found.mean, found.low, found.high) == pytest.approx((500, 25, 975))


def features(count, mean=0.0, scale=1.0, seed=0):
    drawn = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    drawn = drawn - drawn.mean(dim=0)
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(torch.cov(drawn.mT)), drawn.mT, upper=False).mT
    return mean + scale * white


def test_frechet_distance_of_normal_distributions():
    one = features(200)
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-9)
    # of |m₁ − m₂|² and, for multiples of one covariance, tr S (a − b)²
    assert frechet_distance(one, features(300, mean=0.5, scale=3.0, seed=1)) == pytest.approx(4 * 0.25 + 4 * 2**2)
    with pytest.raises(SubquadError, match=r"got \(3, 4\) and \(3, 5\)"):
        frechet_distance(torch.zeros(3, 4), torch.zeros(3, 5))
    with pytest.raises(SubquadError, match=r"as wide: got features \(3, 4\) and \(3, 5\)"):
        frechet_difference(torch.zeros(3, 4), torch.zeros(3, 5), torch.zeros(3, 4))
    with pytest.raises(SubquadError, match="2 of 3 samples have features that are no finite numbers"):
        frechet_distance(torch.zeros(3, 4), torch.tensor([[0.0, torch.nan], [1, 2], [torch.inf, 0]]).repeat(1, 2))


def test_a_frechet_difference_is_paired():
    real, reference = features(200), features(200, seed=1)
    nothing = frechet_difference(reference, reference, real)
    assert nothing.mean == nothing.low == nothing.high == 0
    moved = frechet_difference(reference + 0.5, reference, real)
    assert 0 < moved.low < moved.mean < moved.high and moved.mean == pytest.approx(1)


def test_noise_belongs_to_the_image_and_not_to_the_batch():
    numbers = torch.arange(5)
    assert torch.equal(noise_of(numbers, (3, 2, 2))[3:], noise_of(numbers[3:], (3, 2, 2)))
    assert not torch.equal(noise_of(numbers, (3, 2, 2), seed=1), noise_of(numbers, (3, 2, 2)))
    images, labels = torch.rand(5, 3, 2, 2), torch.zeros(5, dtype=torch.long)
    by_batch = [noise_errors(lambda x, level, y: x, images, labels, 10, 0.5, batch_size=size) for size in (2, 5)]
    torch.testing.assert_close(*by_batch)


@pytest.mark.parametrize(
    ("predict", "settings", "message"),
    [
        (lambda x, level, y: x[:, :1], {}, r"the noise of each number, \(4, 3, 2, 2\), got \(4, 1, 2, 2\)"),
        (lambda x, level, y: torch.cat([x, x], dim=1), {}, r"got \(4, 6, 2, 2\): of networks that learn a variance"),
        (lambda x, level, y: x, {"kept": 1.5}, "kept must be a number of at least 0 and at most 1, got 1.5"),
        (lambda x, level, y: x, {"kept": math.nan}, "kept must be a number"),
        (lambda x, level, y: x, {"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        (lambda x, level, y: x, {"labels": torch.arange(5)}, "got 4 images and 5 classes"),
    ],
)
def test_what_has_no_noise_errors_is_one_line(predict, settings, message):
    given = {"labels": torch.arange(4), "level": 7, "kept": 0.25} | settings
    with pytest.raises(SubquadError, match=message):
        noise_errors(predict, torch.rand(4, 3, 2, 2), **given)


def test_noise_errors_are_of_the_noise():
    images, labels = torch.rand(4, 3, 2, 2), torch.arange(4)
    noise = noise_of(torch.arange(4), (3, 2, 2))
    seen = []

    def predict(x, level, classes):
        seen.append((x, level, classes))
        return noise + 0.5

    torch.testing.assert_close(noise_errors(predict, images, labels, 7, 0.25), torch.full((4,), 0.25))
    ((x, level, classes),) = seen
    assert level == 7 and torch.equal(classes, labels)
    torch.testing.assert_close(x, noisy(images, noise, 0.25))
    torch.testing.assert_close(x, 0.5 * images + 0.75**0.5 * noise)
