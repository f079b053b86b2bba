"""Dense prediction: what stands on a backbone's maps, and data with a label at every place."""

from subquad.dense.networks import SEGMENTERS, Segmenter, build_segmenter, restore_dense
from subquad.dense.pyramid import Pyramid
from subquad.dense.scenes import SceneDataset, load_scenes

__all__ = ["SEGMENTERS", "Pyramid", "SceneDataset", "Segmenter", "build_segmenter", "load_scenes", "restore_dense"]
