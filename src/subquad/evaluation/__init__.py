"""How good a trained network is: accuracy, what it confuses, its speed, and what it sees in given images."""

from subquad.tasks.accuracy import EvalResult, EvalSums, evaluate
from subquad.tasks.confusion import confused_pairs, confusion_text, save_confusion
from subquad.tasks.detection.average_precision import evaluate_detection, judge_objects
from subquad.runs.opening import load_looked_at
from subquad.tasks.detection.trained_detector import judge_detector, load_detector, precision_text, predict_objects
from subquad.tasks.classification.picture_grid import save_picture_grid
from subquad.tasks.classification.class_predictions import Prediction, predict
from subquad.tasks.segmentation.trained_segmenter import iou_text, judge_segmenter, load_segmenter, predict_scenes
from subquad.tasks.segmentation.intersection_over_union import evaluate_segmentation, judge_confusion
from subquad.tasks.classification.throughput import measure_throughput
from subquad.tasks.classification.trained_classifier import Judgement, Trained, images_of, judge, load_trained

__all__ = [
    "EvalResult",
    "EvalSums",
    "Judgement",
    "Prediction",
    "Trained",
    "confused_pairs",
    "confusion_text",
    "evaluate",
    "evaluate_detection",
    "evaluate_segmentation",
    "images_of",
    "iou_text",
    "judge",
    "judge_confusion",
    "judge_detector",
    "judge_objects",
    "judge_segmenter",
    "load_detector",
    "load_looked_at",
    "load_segmenter",
    "load_trained",
    "measure_throughput",
    "precision_text",
    "predict",
    "predict_objects",
    "predict_scenes",
    "save_confusion",
    "save_picture_grid",
]
