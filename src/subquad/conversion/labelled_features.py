"""What simple classifiers make of the features of a student and of its teacher, where a data set has labels."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from subquad.conversion.distilling import answers_of
from subquad.conversion.judging import linear_probe, nearest_neighbours
from subquad.data import ImageDataset, InputConfig, create_loader, eval_transform, load_dataset


@dataclass(frozen=True)
class Readable:
    """Shares of held-out images that are told right by the features of one network.

    Attributes:
        neighbours: by the nearest training images.
        probe: by a linear classifier.
    """

    neighbours: float
    probe: float


@dataclass(frozen=True)
class LabelledComparison:
    """Classifiers of the features of both networks.

    Attributes:
        data: what they are of.
        train, test: how many images.
        teacher, student: what they come to.
    """

    data: str
    train: int
    test: int
    teacher: Readable
    student: Readable

    @property
    def text(self) -> str:
        """One line."""
        shares = [
            f"{what} {asdict(self.student)[field]:.2%} of the teacher's {asdict(self.teacher)[field]:.2%}"
            for field, what in (("neighbours", "nearest neighbours"), ("probe", "linear probe"))
        ]
        return f"{self.data}, {self.train} images for training, {self.test} held out: {', '.join(shares)}"


def labelled_sets(
    data: str, config: InputConfig, *, data_dir: str | None = None, max_images: int = 2000
) -> dict[str, ImageDataset]:
    """The training and the held-out images of a data set as a network takes them, at most so many of each.

    Raises:
        SubquadError: there is no such data set.
    """
    sets = {}
    for split in ("train", "validation"):
        sets[split] = load_dataset(data, split=split, data_dir=data_dir, max_images=max_images)
        sets[split].transform = eval_transform(config)
    return sets


def compare_on_labels(
    student: nn.Module, teacher: nn.Module, sets: dict[str, ImageDataset], *, batch_size: int = 64
) -> LabelledComparison:
    """Judge the features of both networks, the mean over tokens unless the network pools them in its own way."""
    made: dict[str, Readable] = {}
    counts = (0, 0)
    for name, model in (("teacher", teacher), ("student", student)):
        (train, labels), (test, truth) = (
            _stacked(_pooled_batches(model, sets[split], batch_size)) for split in ("train", "validation")
        )
        counts = len(train), len(test)
        guesses = nearest_neighbours(train, labels, test), linear_probe(train, labels, test)
        made[name] = Readable(*(float((guess == truth).float().mean()) for guess in guesses))
    return LabelledComparison(sets["train"].name, *counts, made["teacher"], made["student"])


@torch.no_grad()
def pooled_features(model: nn.Module, images: Tensor) -> Tensor:
    """Features (b, c) of images: what the network's head is given, else the mean over tokens or places."""
    head = getattr(model, "forward_head", None)
    answers = answers_of(model, images)
    if head is not None and "features" in answers:
        try:
            return head(answers["features"], pre_logits=True).float()
        except TypeError:
            # a head that does not say what it pools
            pass
    name = next(name for name in answers if name != "logits" or len(answers) == 1)
    features = answers[name].float()
    if features.dim() == 4:
        return features.mean((2, 3))
    return features.mean(1) if features.dim() == 3 else features


def _pooled_batches(model: nn.Module, images: ImageDataset, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    device = next(model.parameters()).device
    for batch, labels in create_loader(images, batch_size=batch_size):
        if len(batch):
            yield pooled_features(model, batch.to(device)).cpu(), labels


def _stacked(pairs: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    features, labels = zip(*pairs, strict=True)
    return torch.cat(features), torch.cat(labels)
