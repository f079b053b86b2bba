"""Dense prediction: what stands on a backbone's maps, and data with a label at every place."""

from subquad.tasks.segmentation.segmenters import SEGMENTERS, Segmenter, build_segmenter, restore_dense
from subquad.models.pyramid import Pyramid
from subquad.tasks.segmentation.scene_data import SceneDataset, load_scenes

__all__ = ["SEGMENTERS", "Pyramid", "SceneDataset", "Segmenter", "build_segmenter", "load_scenes", "restore_dense"]
