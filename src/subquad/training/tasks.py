"""The tasks there are, by the recipe that asks for them."""

from subquad.training.classification import Classification
from subquad.training.common import CommonRecipe
from subquad.training.detection import Detection, DetectRecipe
from subquad.training.lra import LongRange, LraRecipe
from subquad.training.recipe import Recipe
from subquad.training.segmentation import Segmentation, SegmentRecipe
from subquad.training.task import Task

TASKS: dict[type[CommonRecipe], type[Task]] = {
    Recipe: Classification,
    SegmentRecipe: Segmentation,
    DetectRecipe: Detection,
    LraRecipe: LongRange,
}


def make_task(recipe: CommonRecipe) -> Task:
    """Data and network of a recipe, checked."""
    return TASKS[type(recipe)](recipe)  # type: ignore[call-arg]
