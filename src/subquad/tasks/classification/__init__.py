"""Classification of images: a class for each."""

from subquad.tasks.classification.class_predictions import Prediction, predict
from subquad.tasks.classification.classification_recipe import Recipe
from subquad.tasks.classification.classification_task import Classification
from subquad.tasks.classification.picture_grid import save_picture_grid
from subquad.tasks.classification.throughput import measure_throughput
from subquad.tasks.classification.trained_classifier import ClassJudgement, images_of, judge

__all__ = [
    "ClassJudgement",
    "Classification",
    "Prediction",
    "Recipe",
    "images_of",
    "judge",
    "measure_throughput",
    "predict",
    "save_picture_grid",
]
