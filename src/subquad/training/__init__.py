"""Training: recipes, the loop, the run folder, and the comparison of mechanisms."""

from subquad.training.tested_comparison import ArenaRow, ArenaTable, arena_text, run_arena
from subquad.training.compare import compare, comparison_table, slug
from subquad.tasks.detection.detection_task import DetectRecipe
from subquad.tasks.recipe_fields import parse_settings
from subquad.tasks.sequences.lra_task import LraRecipe
from subquad.tasks.classification.classification_recipe import Recipe, load_recipe, recipe_fields, recipe_names
from subquad.training.running import train
from subquad.tasks.segmentation.segmentation_task import SegmentRecipe

__all__ = [
    "ArenaRow",
    "ArenaTable",
    "DetectRecipe",
    "LraRecipe",
    "Recipe",
    "SegmentRecipe",
    "arena_text",
    "compare",
    "comparison_table",
    "load_recipe",
    "parse_settings",
    "recipe_fields",
    "recipe_names",
    "run_arena",
    "slug",
    "train",
]
