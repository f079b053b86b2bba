"""Training: recipes, the loop, the run folder, and the comparison of mechanisms."""

from subquad.training.arena import ArenaRow, ArenaTable, arena_text, run_arena
from subquad.training.compare import compare, comparison_table, slug
from subquad.training.detection import DetectRecipe
from subquad.training.lra import LraRecipe
from subquad.training.recipe import Recipe, load_recipe, recipe_fields, recipe_names
from subquad.training.running import train
from subquad.training.segmentation import SegmentRecipe

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
    "recipe_fields",
    "recipe_names",
    "run_arena",
    "slug",
    "train",
]
