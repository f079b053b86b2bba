"""The authors' detectors and segmenters: what makes the network of a link, and what its file says of it."""

from typing import Any

from subquad.models.networks import NETWORKS
from subquad.models.pretrained import MAKERS
from subquad.models.variants import VARIANTS
from subquad.tasks.backbone_arguments import DENSE_AGENTS
from subquad.tasks.conventions import IN_HOSTS, OPENMMLAB
from subquad.tasks.detection.coco_names import COCO_CLASSES
from subquad.tasks.detection.detectors import build_detector
from subquad.tasks.segmentation.ade20k_names import ADE20K_CLASSES
from subquad.tasks.segmentation.segmenters import build_segmenter
from subquad.weights.dense_links import DenseLink

SCENE_INPUT: dict[str, Any] = {
    "crop": (512, 512),
    "short_side": 512,
    "long_side": 2048,
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "in_bytes": True,
}


def arguments_of_link(link: DenseLink) -> dict[str, Any]:
    """What `build_detector` or `build_segmenter` makes the network of a link of."""
    host = VARIANTS[NETWORKS[link.network].variant].host
    backbone = {"name": link.network, "pooled_agents": list(DENSE_AGENTS[host]), **IN_HOSTS[OPENMMLAB][host]}
    classes = COCO_CLASSES if link.task == "detect" else ADE20K_CLASSES
    return {"backbone": backbone, "head": link.head, "num_classes": len(classes), "conventions": OPENMMLAB}


def _detector(link: DenseLink) -> tuple[Any, dict[str, Any]]:
    network = build_detector(**arguments_of_link(link))
    return network, {"task": link.task, "classes": list(COCO_CLASSES), "data": "coco"}


def _segmenter(link: DenseLink) -> tuple[Any, dict[str, Any]]:
    network = build_segmenter(**arguments_of_link(link))
    note = {"task": link.task, "classes": list(ADE20K_CLASSES), "data": "ade20k"}
    return network, {**note, "input": SCENE_INPUT, "slide": False}


MAKERS |= {"detect": _detector, "segment": _segmenter}
