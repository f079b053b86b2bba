"""How good a trained network is: accuracy, what it confuses, its speed, and what it sees in given images."""

from subquad.evaluation.accuracy import EvalResult, EvalSums, evaluate
from subquad.evaluation.confusion import confused_pairs, confusion_text, save_confusion
from subquad.evaluation.pictures import save_picture_grid
from subquad.evaluation.predict import Prediction, predict
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
    "images_of",
    "judge",
    "load_trained",
    "measure_throughput",
    "predict",
    "save_confusion",
    "save_picture_grid",
]
