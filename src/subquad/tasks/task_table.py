"""The tasks there are, by the recipe that asks for them."""

from subquad.tasks.classification.classification_task import Classification
from subquad.tasks.common_recipe import CommonRecipe
from subquad.tasks.detection.detection_task import Detection, DetectRecipe
from subquad.tasks.sequences.lra_task import LongRange, LraRecipe
from subquad.tasks.classification.classification_recipe import Recipe
from subquad.tasks.segmentation.segmentation_task import Segmentation, SegmentRecipe
from subquad.tasks.task import Task

TASKS: dict[type[CommonRecipe], type[Task]] = {
    Recipe: Classification,
    SegmentRecipe: Segmentation,
    DetectRecipe: Detection,
    LraRecipe: LongRange,
}


def make_task(recipe: CommonRecipe) -> Task:
    """Data and network of a recipe, checked."""
    return TASKS[type(recipe)](recipe)  # type: ignore[call-arg]
