"""Detection and instance segmentation: boxes of objects, and perhaps their masks."""

from subquad.tasks.detection.average_precision import evaluate_detection, judge_objects
from subquad.tasks.detection.detection_recipe import DetectRecipe
from subquad.tasks.detection.detection_task import Detection
from subquad.tasks.detection.detectors import DETECTORS, Detector, build_detector
from subquad.tasks.detection.object_data import ObjectDataset, load_objects
from subquad.tasks.detection.trained_detector import (
    TrainedDetector,
    judge_detector,
    precision_text,
    predict_objects,
)

__all__ = [
    "DETECTORS",
    "DetectRecipe",
    "Detection",
    "Detector",
    "ObjectDataset",
    "TrainedDetector",
    "build_detector",
    "evaluate_detection",
    "judge_detector",
    "judge_objects",
    "load_objects",
    "precision_text",
    "predict_objects",
]
