"""transformers' detectors, whose queries are each an object or none: what they answer with, and how they see images."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import box_convert

from subquad.ranges import Pixels, height_and_width
from subquad.tasks.transformers_network import DenseOfTransformers, heard_from

DETECTOR = "ForObjectDetection"
"""What the names of those end with that find objects."""

ONE_CLASS_EACH = frozenset({"Detr", "TableTransformer", "Yolos"})
"""Those whose queries are of one class each, the last of which is no object; classes of others are told apart alone."""

MOST = {"ConditionalDetr": 100, "DabDetr": 100, "DeformableDetr": 100, "LwDetr": 100}
"""How many pairs of a query and a class are taken of others, where these are not as many as queries."""

KNOWN = ONE_CLASS_EACH | MOST.keys() | {"Deimv2", "DFine", "RTDetr", "RTDetrV2", "RfDetr"}
"""What the names of their classes begin with: what is found by words, or has no queries, is none of them."""

CHOOSING = frozenset({"LwDetr", "RfDetr"})
"""Those with attention that can be converted whose queries are chosen among the places of an image: a student's first
query need not be of what a teacher's is, so that their backbones' last maps are fitted and compared."""

PROCESSORS: dict[str, dict[str, Any]] = {
    "Yolos": {"multiple_of": 16},
    "Detr": {},
    "ConditionalDetr": {},
    "DeformableDetr": {},
    "RTDetr": {},
    "RfDetr": {"antialias": False},
}
"""Processors of detectors by what their names begin with, and what they do otherwise than DETR's: sides are multiples
of a number, or images are resized without antialiasing."""

AROUND_OBJECTS = frozenset({"do_pad", "do_convert_annotations"})
"""What processors of detectors do to batches of several sizes, which are looked at one by one here, and to labels."""


class DetectorOfTransformers(DenseOfTransformers):
    """One whose answers are boxes and classes of its queries.

    Attributes:
        one_class_each: whether a query is of one class or of none, and no two classes are taken of it.
        most_found: how many pairs of a query and a class are taken of others; as many as queries where it is None.
        fitted_by: the names of those answers that a student is fitted to; None for all.
    """

    def __init__(self, network: Any) -> None:
        super().__init__(network)
        kind = type(network).__name__.removesuffix(DETECTOR)
        self.one_class_each, self.most_found = kind in ONE_CLASS_EACH, MOST.get(kind)
        self.fitted_by = ("features",) if kind in CHOOSING else None

    def forward(self, x: Tensor) -> Tensor:
        """Left, top, right, bottom as shares of the image, and scores of classes, (b, queries, 4 + classes)."""
        answered = self.network(pixel_values=x)
        scores = self.scores_of(answered.logits)
        return torch.cat([box_convert(answered.pred_boxes, "cxcywh", "xyxy"), scores], dim=-1)

    def scores_of(self, logits: Tensor) -> Tensor:
        """Scores from 0 to 1 of logits (…, classes), without those of no object."""
        return logits.softmax(-1)[..., :-1] if self.one_class_each else logits.sigmoid()

    def features_and_logits(self, x: Tensor) -> dict[str, Tensor]:
        """What is compared with another network's: features, boxes, and scores of classes (b, classes, queries).

        Features are its last tokens, or the last map of its backbone where its queries are chosen by them. Scores are
        "logits" where queries are of one class each, no object among them; else "scores", which do not sum to 1.
        """
        if self.fitted_by is None:
            answered = self.network(pixel_values=x)
            features = answered.last_hidden_state
        else:
            with heard_from(self.network.model.backbone) as maps:
                answered = self.network(pixel_values=x)
            features = last_map(maps)
        logits = answered.logits.transpose(1, 2)
        found = {"features": features, "boxes": answered.pred_boxes}
        return {**found, "logits" if self.one_class_each else "scores": logits}


def last_map(answers: Any) -> Tensor:
    """The last map (b, c, y, x) of numbers among answers, which may be lists of them and of their masks."""
    if isinstance(answers, Tensor):
        return answers
    maps = [last_map(one) for one in answers if isinstance(one, Tensor | list | tuple)]
    return next(one for one in reversed(maps) if one.dim() == 4 and one.is_floating_point())


def sizes_of_detector(said: Mapping[str, Any], img_size: Pixels | None) -> dict[str, Any]:
    """To which sizes a detector's processor brings images, and how: `img_size`, and both sides where sizes differ.

    Raises:
        KeyError, and others of its kind: the settings are of another form.
    """
    if said.get("do_center_crop") or (said.get("do_pad") and said.get("pad_size") is not None):
        raise ValueError("other steps")
    name = str(said["image_processor_type"]).partition("ImageProcessor")[0]
    own = PROCESSORS[name]
    size = {side: px for side, px in said["size"].items() if px is not None}
    asked = None if img_size is None else height_and_width(img_size)
    if size.keys() == {"height", "width"}:
        fixed = {key: value for key, value in own.items() if key != "multiple_of"}
        return {"img_size": list(asked or (size["height"], size["width"])), "crop_mode": "squash", **fixed}
    if size.keys() != {"shortest_edge", "longest_edge"}:
        raise ValueError("another size")
    short, long = size["shortest_edge"], size["longest_edge"]
    if asked is not None:
        # of one number, the longer side may be as much longer as before
        short, long = min(asked), max(asked) if len(set(asked)) > 1 else round(long * asked[0] / short)
    seen = list(asked or (short, short))
    return {"img_size": seen, "crop_mode": "center", "short_side": short, "long_side": long, **own}
