"""A converted network against its teacher: agreement, features, and what simple classifiers make of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.conversion.aligning import relative_error, tokens_there
from subquad.conversion.distilling import agreeing, answers_of, channels_at, judged_by
from subquad.conversion.unlabelled_images import num_images, on_device
from subquad.errors import SubquadError
from subquad.inference import in_evaluation
from subquad.tasks import Tally
from subquad.tasks.accuracy import TopOne
from subquad.text import counted
from subquad.weights.files import within_wrappers

NEIGHBOURS = 20
"""Of the nearest-neighbour classifier."""


@dataclass(frozen=True)
class Comparison:
    """A student beside its teacher on the same images.

    Attributes:
        images: how many.
        cosine: of the last features of a token, the mean; of what has one number for each place, as maps of depth, that
            of an image's map.
        error: ‖y − t‖² / ‖t‖² of the last features, the mean over images.
        agreement: share of images with the same most likely class; None without logits.
        student_score, teacher_score: what they come to on their own task, from 0 to 1; None without classes or labels.
        measure: the name of these, as "top-1", "mIoU" or "AP".
    """

    images: int
    cosine: float
    error: float
    agreement: float | None
    student_score: float | None
    teacher_score: float | None
    measure: str = "top-1"

    @property
    def kept(self) -> float | None:
        """The student's score as a share of the teacher's."""
        if self.student_score is None or not self.teacher_score:
            return None
        return self.student_score / self.teacher_score

    @property
    def text(self) -> str:
        """One line."""
        parts = [f"{counted(self.images, 'image')}: features cosine {self.cosine:.4f}, relative error {self.error:.4f}"]
        if self.agreement is not None:
            parts.append(f"agreement {self.agreement:.2%}")
        if self.student_score is not None and self.teacher_score is not None:
            parts.append(f"{self.measure} {self.student_score:.2%} of {self.teacher_score:.2%}")
        if self.kept is not None:
            parts[-1] += f": {self.kept:.2%} kept"
        return ", ".join(parts)


@torch.no_grad()
def compare_networks(
    student: nn.Module,
    teacher: nn.Module,
    batches: Iterable[tuple[Any, Tensor | None]],
    *,
    measure: str = "top-1",
    tally: Callable[[], Tally] = TopOne,
    counted: Sequence[str] = ("logits",),
) -> Comparison:
    """Compare a converted network with its teacher on batches of images, and of labels where there are some.

    Args:
        student: converted.
        teacher: the network before it was converted.
        batches: images, or arguments by name, and labels, see `subquad.tasks.HeldOut`.
        measure: the name of the figure that `tally` makes.
        tally: what counts right answers.
        counted: the names of those answers that it is given in front of labels.

    Raises:
        SubquadError: there are no images, or batches are no pairs.
    """
    if isinstance(batches, Tensor | Mapping):
        raise SubquadError(
            "batches are pairs of images and labels, one after the other: [(images, None)] for images without labels"
        )
    student, teacher = within_wrappers(student), within_wrappers(teacher)
    device = next(student.parameters()).device
    count, cosine, error, same = 0, 0.0, 0.0, 0.0
    ours_right, theirs_right = tally(), tally()
    classes = labelled = True
    with in_evaluation(student), in_evaluation(teacher):
        for batch, labels in batches:
            images = on_device(batch, device)
            if not num_images(images):
                # of nothing but broken images
                continue
            ours, theirs = answers_of(student, images), answers_of(teacher, images)
            name, images_here = judged_by(theirs), num_images(images)
            one, other = ours[name].float(), theirs[name].float()
            there = tokens_there(student, other)
            error += images_here * float(relative_error(one, other, there))
            one, other = (each if there is None else each[there] for each in (one, other))
            cosine += images_here * float(_cosine(one, other, channels_at(teacher, other)))
            count += images_here
            classes &= "logits" in theirs
            if classes:
                same += agreeing(ours, theirs)
            labelled &= labels is not None and all(part in theirs for part in counted)
            if labelled and labels is not None:
                for right, answers in ((ours_right, ours), (theirs_right, theirs)):
                    right.add(*(answers[part] for part in counted), labels)
    if not count:
        raise SubquadError("there are no images to compare the networks on")
    return Comparison(
        count,
        cosine / count,
        error / count,
        same / count if classes else None,
        ours_right.share if labelled else None,
        theirs_right.share if labelled else None,
        measure,
    )


def _cosine(one: Tensor, other: Tensor, channels: int) -> Tensor:
    """The mean over images and their tokens; of one number for each image, (b,), whether it has the same sign."""
    if one.dim() == 1 or one.shape[channels] == 1:
        # of a single number it would be the sign: all places of an image are one vector
        one, other, channels = one.reshape(len(one), -1), other.reshape(len(other), -1), 1
    # tokens of zeros in both, as behind a ReLU, are the same
    alike = F.cosine_similarity(one, other, dim=channels)
    return torch.where((one == other).all(dim=channels), 1.0, alike).mean()


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
