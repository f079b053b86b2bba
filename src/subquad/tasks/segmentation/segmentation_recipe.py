"""How a segmenter is trained."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from subquad.tasks.conventions import CONVENTIONS, OWN
from subquad.tasks.image_recipe import ImageRecipe
from subquad.tasks.recipe_fields import option
from subquad.tasks.segmentation.segmenters import SEGMENTERS


@dataclass(frozen=True)
class SegmentRecipe(ImageRecipe):
    """How a segmenter is trained."""

    task: ClassVar[str] = "segment"
    folder: ClassVar[Path | None] = Path(__file__).parent / "recipes"

    model: str = option("pvt_tiny", "backbone, see `subquad list`", free="`create_model` knows the networks")
    data: str = option("ade20k", "folder or archive in ADE20K's layout", free="a path")
    img_size: tuple[int, int] | None = option(
        (512, 512), "height,width of training crops, one number for a square", at_least=1, at_most=2**16
    )
    initial_checkpoint: str | None = option(
        None, "weights that the backbone starts from, of a classifier or a dense network: file or run", free="a path"
    )
    batch_size: int = option(16, "scenes a step and process", at_least=1)

    head: str = option("fpn", f"decoder: {', '.join(SEGMENTERS)}", choices=SEGMENTERS)
    conventions: str = option(
        OWN,
        f"whose conventions, where libraries differ: {', '.join(CONVENTIONS)}, which the released networks follow",
        choices=CONVENTIONS,
    )
    head_channels: int | None = option(
        None, "width of the decoder; the published one if left out", at_least=1, at_most=2**16
    )
    initial_head: bool = option(False, "take the head of initial_checkpoint too, which is trained further")
    frozen_stages: int = option(
        0, "stages of the backbone, from the first, that are not trained", at_least=0, at_most=4
    )
    dense_agents: bool = option(False, "as many agents in a stage as the paper's dense networks have")
    scale: tuple[float, float] = option(
        (0.5, 2.0), "factors between which training scenes are resized", above=0, rising=True
    )
    hflip: float = option(0.5, "probability of a horizontal flip", at_least=0, at_most=1)
    distort: bool = option(True, "change brightness, contrast, saturation and hue in training")
    short_side: int | None = option(
        None, "pixels that shorter sides are resized to, in training before the scale", at_least=1, at_most=2**16
    )
    slide: bool = option(False, "evaluate through windows of img_size that overlap by a third")
