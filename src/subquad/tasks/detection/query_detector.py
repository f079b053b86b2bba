"""Detectors of other libraries whose queries are each an object or none: judged and asked as our own detectors are."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.ops import box_convert

from subquad.data import InputConfig, create_loader
from subquad.errors import SubquadError, reason_of
from subquad.ranges import Pixels, height_and_width
from subquad.tasks.accuracy import check_finite
from subquad.tasks.detection.average_precision import as_coco, judge_objects, only_images
from subquad.tasks.detection.coco_names import same_name
from subquad.tasks.detection.object_data import ObjectDataset, Target, are_objects, load_objects
from subquad.tasks.detection.object_input import ObjectInput
from subquad.tasks.detection.object_transforms import ObjectTransform
from subquad.tasks.detection.trained_detector import TrainedDetector
from subquad.tasks.held_out import HeldOut, evenly_some
from subquad.tasks.trained import ImageNetwork
from subquad.text import one_line
from subquad.weights.notes import required, settings_of

Found = dict[str, Tensor]


@dataclass(frozen=True)
class QueryDetector(TrainedDetector):
    """A detector called with batches of images, that gives boxes and scores of its queries (b, queries, 4 + classes).

    Attributes:
        input: how an image is brought to it.
    """

    model: Any
    input: ObjectInput = field(kw_only=True)

    def image_network(self, img_size: Pixels | None = None) -> ImageNetwork:
        """Give what lies below its head, which looks at images of one size, a square where theirs differ."""
        size = self.input.square if img_size is None else height_and_width(img_size)
        about = InputConfig(size, self.input.mean, self.input.std, self.input.interpolation)
        return self.beside(self.model.pyramid, about)

    def finder(self, images: ObjectDataset | None = None) -> nn.Module:
        """What finds objects in lists of images; what these have no class for is not looked for.

        Raises:
            SubquadError: the network does not know one of their classes.
        """
        numbers = None if images is None else numbers_in(images.name, images.classes, self.classes)
        return Finder(self.model, self.input, numbers)

    def held_out(self, *, data_dir: str | None = None, most: int | None = None) -> HeldOut | None:
        """Give its validation images, each a batch at a size of its own; None where nothing says its data."""
        if self.data is None:
            return None
        images = load_objects(self.data_to_judge(data_dir), split="validation")
        numbers = numbers_in(images.name, images.classes, self.classes)
        places = {image["id"]: place for place, image in enumerate(images.truth["images"])}
        images.transform = _Placed(self.input, places)
        some = evenly_some(images, most)

        def batches(size: int) -> Iterator[tuple[Tensor, Tensor]]:
            for pairs in create_loader(some, batch_size=1, collate=_whole):
                for image, label in pairs:
                    yield image[None], label[None]

        given = ("boxes", "logits" if self.model.one_class_each else "scores")
        return HeldOut("AP", batches, lambda: AveragePrecision(self.model, images.truth, numbers), given)

    def knows_as_data(self, source: str) -> bool:
        """Whether these are images with objects."""
        return are_objects(source)

    def training_images(self, *, data_dir: str | None = None) -> ObjectDataset | None:
        """Give its training images; `data_dir` is the folder or archive of all."""
        return load_objects(self.data_to_judge(data_dir), split="train")


def opened_query_detector(model: Any, note: Mapping[str, Any]) -> QueryDetector:
    """A detector of another library with what its note says of it, which need not be its data.

    Raises:
        SubquadError: the note is of another network, or says no sizes that can be.
    """
    classes, settings = required(note, "classes", "input")
    if not hasattr(model, "one_class_each"):
        raise SubquadError(f"its note is of a detector, and its network is a {type(model).__name__}")
    device, about = next(model.parameters()).device, settings_of(ObjectInput, settings)
    return QueryDetector("detect", model, tuple(classes), note.get("data"), None, device, input=about)


class Finder(nn.Module):
    """Asks a network of batches as our detectors are: for what is in each image of a list, of any sizes.

    Args:
        network: that gives boxes and scores, see `QueryDetector`.
        seen_as: how an image is brought to it.
        numbers: the labels of its classes, 0 for none; 1, 2, … if left out.
    """

    has_masks = False

    def __init__(self, network: Any, seen_as: ObjectInput, numbers: Sequence[int] | None = None) -> None:
        super().__init__()
        self.network, self.seen_as, self.numbers = network, seen_as, numbers

    def forward(self, images: Sequence[Tensor]) -> list[Found]:
        """A dict of boxes in pixels, labels and scores, the highest first, for each image of numbers from 0 to 1."""
        return [self._found(image) for image in images]

    def _found(self, image: Tensor) -> Found:
        x = self.seen_as.seen(image)[None]
        try:
            answer = self.network(x)[0]
        except (RuntimeError, ValueError) as error:
            if isinstance(error, SubquadError):
                raise
            # networks with maps at several strides refuse sizes each in its own way
            raise SubquadError(
                f"the network does not run at {x.shape[-1]}×{x.shape[-2]} px, to which an image of "
                f"{image.shape[-1]}×{image.shape[-2]} is resized: {one_line(reason_of(error), 120)}"
            ) from None
        check_finite(answer, "an image")
        boxes, scores = answer[:, :4], answer[:, 4:]
        return objects_of(self.network, boxes, scores, (image.shape[-2], image.shape[-1]), self.numbers)


def objects_of(
    network: Any, boxes: Tensor, scores: Tensor, size: tuple[int, int], numbers: Sequence[int] | None
) -> Found:
    """The objects in an image of (height, width), the surest first.

    Args:
        network: says how scores are read, by `one_class_each` and `most_found`.
        boxes: of queries (q, 4), left, top, right, bottom as shares of the image.
        scores: of their classes, (q, classes).
        size: of the image in pixels.
        numbers: the labels of classes, 0 for none; 1, 2, … if left out.
    """
    if network.one_class_each:
        best, classes = scores.max(-1)
        best, queries = best.sort(descending=True, stable=True)
        classes = classes[queries]
    else:
        most = min(network.most_found or len(scores), scores.numel())
        best, pairs = scores.flatten().topk(most)
        queries, classes = pairs // scores.shape[1], pairs % scores.shape[1]
    height, width = size
    found = boxes[queries] * boxes.new_tensor([width, height, width, height])
    labels = classes + 1 if numbers is None else torch.tensor(numbers, device=classes.device)[classes]
    return {name: value[labels > 0] for name, value in (("boxes", found), ("labels", labels), ("scores", best))}


def numbers_in(data: str, found: Sequence[str], known: Sequence[str]) -> list[int]:
    """The label that each class of a network has in data, by their names; 0 where the data have none of this name.

    Raises:
        SubquadError: the network does not know a class of the data.
    """
    labels = {same_name(name): place for place, name in enumerate(found, start=1)}
    names = [same_name(name) for name in known]
    if unknown := [name for name in found if same_name(name) not in names]:
        few, more = ", ".join(unknown[:5]), f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise SubquadError(
            f"{data} has {len(found)} classes, the model {len(known)}, and it does not know {few}{more}: classes are "
            "matched by their names, those of annotations (categories) and of the network (id2label)"
        )
    return [labels.get(name, 0) for name in names]


class AveragePrecision:
    """Collects what queries find in images, for the average precision of boxes.

    Args:
        network: says what scores logits are, and how they are read.
        truth: the annotations of all images.
        numbers: see `objects_of`.
    """

    def __init__(self, network: Any, truth: Mapping[str, Any], numbers: Sequence[int]):
        # of a student, which is read as its teacher is
        self.network, self.truth, self.numbers = network, dict(truth), numbers
        self.entries: list[dict[str, Any]] = []
        self.seen: list[int] = []

    def add(self, boxes: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: boxes (b, q, 4), logits (b, classes, q), and which images they are, of which size, (b, 3)."""
        scores = self.network.scores_of(logits.float().transpose(1, 2))
        corners = box_convert(boxes.float(), "cxcywh", "xyxy")
        # what is NaN finds nothing, and sorts in front of all numbers
        are_numbers = corners.isfinite().all(-1) & scores.isfinite().all(-1)
        for place, (image, height, width) in enumerate(labels.tolist()):
            number, whole = self.truth["images"][image]["id"], are_numbers[place]
            found = objects_of(self.network, corners[place][whole], scores[place][whole], (height, width), self.numbers)
            self.entries += as_coco(number, found)
            self.seen.append(number)

    @property
    def share(self) -> float:
        """Average precision of boxes, from 0 to 1; 0 where the images have no objects."""
        ap = judge_objects(only_images(self.truth, self.seen), self.entries, masks=False).box["ap"]
        return 0.0 if ap != ap else ap / 100


class _Placed:
    """(picture, target) to the image as the network takes it, and its place among images with its height and width."""

    def __init__(self, seen_as: ObjectInput, places: Mapping[int, int]):
        self.seen_as, self.places = seen_as, places

    def __call__(self, picture: Image.Image, target: Target) -> tuple[Tensor, Tensor]:
        image, target = ObjectTransform()(picture, target)
        label = [self.places[target["image_id"]], image.shape[-2], image.shape[-1]]
        return self.seen_as.seen(image), torch.tensor(label)


def _whole(pairs: list[Any]) -> list[Any]:
    """Those that are there: of a broken picture there is none."""
    return [pair for pair in pairs if pair is not None]
