"""Semantic segmentation: a class for every pixel of a scene."""

from subquad.tasks.segmentation.scene_data import SceneDataset, load_scenes
from subquad.tasks.segmentation.segmentation_recipe import SegmentRecipe
from subquad.tasks.segmentation.segmentation_task import Segmentation
from subquad.tasks.segmentation.segmenters import SEGMENTERS, Segmenter, build_segmenter
from subquad.tasks.segmentation.trained_segmenter import TrainedSegmenter, iou_text, judge_segmenter, predict_scenes

__all__ = [
    "SEGMENTERS",
    "SceneDataset",
    "SegmentRecipe",
    "Segmentation",
    "Segmenter",
    "TrainedSegmenter",
    "build_segmenter",
    "iou_text",
    "judge_segmenter",
    "load_scenes",
    "predict_scenes",
]
