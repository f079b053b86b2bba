"""What classifiers make of the features of a student and of its teacher, where a data set has labels."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from subquad.conversion.distilling import answers_of, channels_at, judged_by, likeliest
from subquad.conversion.judging import linear_probe, nearest_neighbours
from subquad.data import ImageDataset, InputConfig, create_loader, eval_transform, load_dataset
from subquad.tasks.class_names import check_same_classes, check_there_are_two


@dataclass(frozen=True)
class Readable:
    """Shares of held-out images that are told right by the features of one network.

    Attributes:
        neighbours: by the nearest training images.
        probe: by a linear classifier.
        agreement: not told right, but as the teacher's head tells them; None without logits.
        head: by the network's own head; None where the labels are not its classes.
    """

    neighbours: float
    probe: float
    agreement: float | None = None
    head: float | None = None

    @property
    def text(self) -> str:
        """One line."""
        shares = {
            "agreement": self.agreement,
            "nearest neighbours": self.neighbours,
            "linear probe": self.probe,
            "head": self.head,
        }
        return ", ".join(f"{name} {share:.2%}" for name, share in shares.items() if share is not None)


@dataclass(frozen=True)
class LabelledComparison:
    """Classifiers of the features of both networks.

    Attributes:
        data: what they are of.
        train, test: how many images.
        teacher: what its features come to.
        steps: the same of the student behind each step, by its name.
    """

    data: str
    train: int
    test: int
    teacher: Readable
    steps: dict[str, Readable]


class LabelledJudge:
    """Judges the features of networks beside those of their teacher, which it looks at once.

    Features are the mean over tokens, unless a network pools them in its own way.

    Args:
        sets: of `labelled_sets`.
        teacher: the network before it was converted.
        classes: names of its classes; where they are those of the data its head is judged, too.
        batch_size: images at a time.
    """

    def __init__(
        self, sets: dict[str, ImageDataset], teacher: nn.Module, classes: Sequence[str] = (), *, batch_size: int = 64
    ):
        self.sets, self.batch_size = sets, batch_size
        self._of_head = tuple(classes) == tuple(sets["train"].classes)
        self._said: Tensor | None = None
        counts, self._teacher = self._read(teacher)
        self.comparison = LabelledComparison(sets["train"].name, *counts, self._teacher, {})

    def note(self, step: str, student: nn.Module) -> Readable:
        """Judge a student, and keep it as that of a step."""
        self.comparison.steps[step] = self.judge(student)
        return self.comparison.steps[step]

    def judge(self, student: nn.Module) -> Readable:
        """Judge a student that is not kept."""
        return self._read(student)[1]

    def _read(self, model: nn.Module) -> tuple[tuple[int, int], Readable]:
        train, labels, _ = self._features(model, "train")
        test, truth, said = self._features(model, "validation")
        agreement = head = None
        if said is not None:
            self._said = said if self._said is None else self._said
            # what is no class agrees with nothing
            agreement = _share(said.where(said >= 0, -2), self._said)
            head = _share(said, truth) if self._of_head else None
        neighbours = _share(nearest_neighbours(train, labels, test), truth)
        probe = _share(linear_probe(train, labels, test), truth)
        return (len(train), len(test)), Readable(neighbours, probe, agreement, head)

    def _features(self, model: nn.Module, split: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Features (n, c), labels (n,), and what the network's head says (n,), if it has one."""
        device = next(model.parameters()).device
        features, labels, said = [], [], []
        for images, truth in create_loader(self.sets[split], batch_size=self.batch_size):
            if len(images):
                pooled, logits = pooled_features(model, images.to(device))
                features.append(pooled.cpu())
                labels.append(truth)
                said += [] if logits is None else [likeliest(logits).cpu()]
        return torch.cat(features), torch.cat(labels), torch.cat(said) if said else None


def labelled_sets(
    data: str, config: InputConfig, *, data_dir: str | None = None, max_images: int = 2000
) -> dict[str, ImageDataset]:
    """The training and the held-out images of a data set as a network takes them, at most so many of each.

    Raises:
        SubquadError: there is no such data set, or it has one class alone, or others in its held-out part.
    """
    sets = {}
    for split in ("train", "validation"):
        sets[split] = load_dataset(data, split=split, data_dir=data_dir, max_images=max_images)
        sets[split].transform = eval_transform(config)
    check_same_classes(sets["train"].classes, sets["validation"].classes)
    check_there_are_two(str(data_dir or data), sets["train"].classes)
    return sets


@torch.no_grad()
def pooled_features(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """Features (b, c) of images: what the network's head is given, else the mean over tokens or places; and logits."""
    head = getattr(model, "forward_head", None)
    answers = answers_of(model, images)
    logits = answers.get("logits")
    logits = logits if logits is not None and logits.dim() == 2 else None
    if head is not None and "features" in answers:
        try:
            return head(answers["features"], pre_logits=True).float(), logits
        except TypeError:
            # a head that does not say what it pools
            pass
    features = answers[judged_by(answers)].float()
    if features.dim() > 2:
        features = features.movedim(channels_at(model, features), -1).flatten(1, -2).mean(1)
    # an image may have one number, (b,)
    return (features if features.dim() == 2 else features[:, None]), logits


def _share(guessed: Tensor, truth: Tensor) -> float:
    return float((guessed == truth).float().mean())
