"""How good a trained network is: accuracy, what it confuses, its speed, and what it sees in given images."""

from subquad.evaluation.accuracy import EvalResult, EvalSums, evaluate
from subquad.evaluation.confusion import confused_pairs, confusion_text, save_confusion
from subquad.evaluation.detection import evaluate_detection, judge_objects
from subquad.evaluation.networks_to_analyze import load_looked_at
from subquad.evaluation.objects import judge_detector, load_detector, precision_text, predict_objects
from subquad.evaluation.pictures import save_picture_grid
from subquad.evaluation.predict import Prediction, predict
from subquad.evaluation.scenes import iou_text, judge_segmenter, load_segmenter, predict_scenes
from subquad.evaluation.segmentation import evaluate_segmentation, judge_confusion
from subquad.evaluation.throughput import measure_throughput
from subquad.evaluation.trained import Judgement, Trained, images_of, judge, load_trained

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
