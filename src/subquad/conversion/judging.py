"""A converted network against its teacher: agreement, features, and what simple classifiers make of them."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.conversion.distilling import agreeing, answers_of
from subquad.errors import SubquadError

NEIGHBOURS = 20
"""Of the nearest-neighbour classifier."""


@dataclass(frozen=True)
class Comparison:
    """A student beside its teacher on the same images.

    Attributes:
        images: how many.
        cosine: of the last features of a token, the mean.
        error: ‖y − t‖² / ‖t‖² of the last features, the mean over images.
        agreement: share of images with the same most likely class; None without logits.
        student_top1, teacher_top1: shares of right answers; None without logits or labels.
    """

    images: int
    cosine: float
    error: float
    agreement: float | None
    student_top1: float | None
    teacher_top1: float | None

    @property
    def kept(self) -> float | None:
        """The student's accuracy as a share of the teacher's."""
        if self.student_top1 is None or not self.teacher_top1:
            return None
        return self.student_top1 / self.teacher_top1

    @property
    def text(self) -> str:
        """One line."""
        parts = [f"{self.images} images: features cosine {self.cosine:.4f}, relative error {self.error:.4f}"]
        if self.agreement is not None:
            parts.append(f"agreement {self.agreement:.2%}")
        if self.student_top1 is not None and self.teacher_top1 is not None and self.kept is not None:
            parts.append(f"top-1 {self.student_top1:.2%} of {self.teacher_top1:.2%}: {self.kept:.2%} kept")
        return ", ".join(parts)


@torch.no_grad()
def compare_networks(
    student: nn.Module, teacher: nn.Module, batches: Iterable[tuple[Tensor, Tensor | None]]
) -> Comparison:
    """Compare a converted network with its teacher on batches of images, and of labels where there are some.

    Raises:
        SubquadError: there are no images.
    """
    student.eval()
    teacher.eval()
    count, cosine, error, same = 0, 0.0, 0.0, 0.0
    right = {"student": 0, "teacher": 0}
    classes = labelled = True
    for images, labels in batches:
        ours, theirs = answers_of(student, images), answers_of(teacher, images)
        name = next(name for name in theirs if name != "logits" or len(theirs) == 1)
        one, other = ours[name].float(), theirs[name].float()
        alike = F.cosine_similarity(one, other, dim=1 if one.dim() == 4 else -1)
        cosine += float(alike.flatten(1).mean(1).sum() if alike.dim() > 1 else alike.sum())
        difference = (one - other).flatten(1).square().sum(1)
        error += float((difference / other.flatten(1).square().sum(1).clamp(min=1e-12)).sum())
        count += len(images)
        classes &= "logits" in theirs
        labelled &= labels is not None
        if classes:
            same += agreeing(ours, theirs)
            if labels is not None:
                for who, answer in (("student", ours), ("teacher", theirs)):
                    right[who] += int((answer["logits"].argmax(1) == labels.to(images.device)).sum())
    if not count:
        raise SubquadError("there are no images to compare the networks on")
    judged = classes and labelled
    return Comparison(
        count,
        cosine / count,
        error / count,
        same / count if classes else None,
        right["student"] / count if judged else None,
        right["teacher"] / count if judged else None,
    )


def nearest_neighbours(train: Tensor, labels: Tensor, test: Tensor, *, neighbours: int = NEIGHBOURS) -> Tensor:
    """Classes of features (m, c) by votes of their nearest `train` features (n, c), weighed by cosine / 0.07.

    The classifier that DINO is judged by, Caron et al. 2021, arXiv 2104.14294, section 4.
    """
    likeness = F.normalize(test, dim=-1) @ F.normalize(train, dim=-1).T
    nearest = likeness.topk(min(neighbours, len(train)), dim=-1)
    votes = torch.zeros(len(test), int(labels.max()) + 1)
    return votes.scatter_add_(1, labels[nearest.indices], (nearest.values / 0.07).exp()).argmax(1)


def linear_probe(train: Tensor, labels: Tensor, test: Tensor, *, ridge: float = 1e-3) -> Tensor:
    """Classes of features (m, c) by a linear classifier, least squares with a ridge, of `train` features (n, c)."""
    mean, spread = train.mean(0), train.std(0).clamp(min=1e-6)
    ones = torch.ones(len(train), 1, dtype=torch.float64)
    known = torch.cat([((train - mean) / spread).double(), ones], dim=1)
    asked = torch.cat([((test - mean) / spread).double(), ones.new_ones(len(test), 1)], dim=1)
    target = F.one_hot(labels).double()
    gram = known.T @ known + ridge * len(known) * torch.eye(known.shape[1], dtype=torch.float64)
    return (asked @ torch.linalg.solve(gram, known.T @ target)).argmax(1)
