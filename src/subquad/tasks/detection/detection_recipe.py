"""How a detector is trained."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from subquad.errors import SubquadError
from subquad.tasks.conventions import CONVENTIONS, OWN
from subquad.tasks.detection.detectors import DETECTORS
from subquad.tasks.image_recipe import ImageRecipe
from subquad.tasks.recipe_fields import option


@dataclass(frozen=True)
class DetectRecipe(ImageRecipe):
    """How a detector is trained."""

    task: ClassVar[str] = "detect"
    folder: ClassVar[Path | None] = Path(__file__).parent / "recipes"

    model: str = option("pvt_tiny", "backbone, see `subquad list`", free="`create_model` knows the networks")
    data: str = option("coco", "folder or archive in COCO's layout", free="a path")
    img_size: tuple[int, int] | None = option(
        None, "height,width that the backbone's position tables are made for", at_least=1, at_most=2**16
    )
    initial_checkpoint: str | None = option(
        None, "weights that the backbone starts from, of a classifier or a dense network: file or run", free="a path"
    )
    batch_size: int = option(2, "images a step and process", at_least=1)

    head: str = option("mask_rcnn", f"detector: {', '.join(DETECTORS)}", choices=DETECTORS)
    conventions: str = option(
        OWN,
        f"whose conventions, where libraries differ: {', '.join(CONVENTIONS)}, which the released networks follow",
        choices=CONVENTIONS,
    )
    head_channels: int = option(256, "width of the feature pyramid", at_least=1, at_most=2**16)
    initial_head: bool = option(False, "take the head of initial_checkpoint too, which is trained further")
    frozen_stages: int = option(
        0, "stages of the backbone, from the first, that are not trained", at_least=0, at_most=4
    )
    dense_agents: bool = option(False, "as many agents in a stage as the paper's dense networks have")
    short_side: tuple[int, ...] = option(
        (800,), "pixels of shorter sides: one of these in training, the last one else", at_least=1, at_most=2**16
    )
    long_side: int = option(1333, "pixels that longer sides have at most", at_least=1, at_most=2**16)
    hflip: float = option(0.5, "probability of a horizontal flip", at_least=0, at_most=1)
    crop: float = option(0.0, "probability of a random crop of at least half of each side", at_least=0, at_most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.short_side) > self.long_side:
            sides = ", ".join(map(str, self.short_side))
            raise SubquadError(f"short_side goes from 1 to long_side {self.long_side}, got {sides}")
