"""Fréchet distance of two sets of features: how far the normal distributions of their moments are apart.

    |m₁ − m₂|² + tr(S₁ + S₂ − 2 (S₁^½ S₂ S₁^½)^½)

Heusel et al. 2017, arXiv 1706.08500, eq. 6, there of Inception's features. It is of the features that it is given: one
of another network's compares with no published figure.
"""

import torch
from torch import Tensor

from subquad.analysis.paired_differences import Difference, bootstrap_interval
from subquad.errors import SubquadError

RESAMPLES = 200


def frechet_distance(features: Tensor, others: Tensor) -> float:
    """The distance of features (n, c) from others (m, c), in float64.

    Raises:
        SubquadError: there are less than two of a set, their widths differ, or some are no finite numbers.
    """
    if features.dim() != 2 or others.dim() != 2 or features.shape[1] != others.shape[1]:
        raise SubquadError(f"features are (n, c) and (m, c): got {tuple(features.shape)} and {tuple(others.shape)}")
    if min(len(features), len(others)) < 2:
        raise SubquadError(f"a distribution needs two samples, got {len(features)} and {len(others)}")
    for one in (features, others):
        if endless := int((~one.isfinite()).any(dim=1).sum()):
            raise SubquadError(f"{endless} of {len(one)} samples have features that are no finite numbers")
    (mean, covariance), (other_mean, other) = _moments(features), _moments(others)
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.mT
    crossed = torch.linalg.eigvalsh(root @ other @ root).clamp(min=0).sqrt().sum()
    return float((mean - other_mean).square().sum() + covariance.trace() + other.trace() - 2 * crossed)


def frechet_difference(features: Tensor, reference: Tensor, real: Tensor, *, seed: int = 0) -> Difference:
    """How much further from `real` (m, c) features (n, c) are than the reference's (n, c) of the same noises.

    The same noises are drawn again for both, with replacement, so that what a sample is of itself is in both distances.
    """
    if features.shape != reference.shape:
        shapes = f"{tuple(features.shape)} and {tuple(reference.shape)}"
        raise SubquadError(f"pairs are of as many images, and as wide: got features {shapes}")
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(len(features), (len(features),), generator=generator) for _ in range(RESAMPLES)]
    apart = [frechet_distance(features[rows], real) - frechet_distance(reference[rows], real) for rows in drawn]
    found = bootstrap_interval(torch.tensor(apart, dtype=torch.float64))
    return Difference(
        frechet_distance(features, real) - frechet_distance(reference, real), found.low, found.high, len(features)
    )


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    features = features.double()
    return features.mean(dim=0), torch.cov(features.mT).reshape(features.shape[1], features.shape[1])
