"""How a classifier of images is trained; `recipes/` holds the recipes of the papers."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from subquad.data.opening import NAMES
from subquad.data.transforms import CROP_MODES, ERASING, INTERPOLATIONS
from subquad.errors import SubquadError
from subquad.tasks.image_recipe import ImageRecipe
from subquad.tasks.recipe_fields import option


@dataclass(frozen=True)
class Recipe(ImageRecipe):
    """How a classifier is trained."""

    task: ClassVar[str] = "classify"
    folder: ClassVar[Path | None] = Path(__file__).parent / "recipes"

    data: str = option(
        "digits",
        "a folder or archive, or one of " + ", ".join(NAMES),
        free="a name, a path, or a name of the hub",
    )

    smoothing: float = option(0.1, "label smoothing", at_least=0, below=1)
    drop: float = option(0.0, "dropout", at_least=0, below=1)
    mixup: float = option(0.0, "alpha of mixup, 0 for none", at_least=0)
    cutmix: float = option(0.0, "alpha of cutmix, 0 for none", at_least=0)
    mixup_prob: float = option(1.0, "probability of mixup or cutmix", at_least=0, at_most=1)
    mixup_switch_prob: float = option(0.5, "probability of cutmix where both are on", at_least=0, at_most=1)

    no_aug: bool = option(False, "no augmentation: training images as in evaluation")
    scale: tuple[float, float] | None = option(
        None, "area of the random crop; no crop if left out", above=0, rising=True
    )
    ratio: tuple[float, float] = option((3 / 4, 4 / 3), "aspect of the random crop", above=0, rising=True)
    crop_padding: int = option(0, "pixels of padding around an image before a random crop", at_least=0, at_most=2**16)
    hflip: float = option(0.0, "probability of a horizontal flip", at_least=0, at_most=1)
    rotation: float = option(0.0, "largest angle of a random rotation, in degrees", at_least=0, at_most=360)
    color_jitter: float = option(
        0.0, "jitter of brightness, contrast and saturation; none beside a policy, 3a excepted", at_least=0
    )
    aa: str | None = option(
        None, "auto-augment policy of timm, e.g. rand-m9-mstd0.5-inc1", free="`train_transform` knows timm's policies"
    )
    reprob: float = option(0.0, "probability of random erasing", at_least=0, at_most=1)
    remode: str = option("pixel", "random erasing with: const, rand or pixel", choices=ERASING)
    train_interpolation: str = option(
        "bicubic", "resampling in training, random for bilinear or bicubic", choices=(*INTERPOLATIONS, "random")
    )
    interpolation: str = option("bicubic", "resampling in evaluation", choices=INTERPOLATIONS)
    crop_pct: float = option(1.0, "share of the resized image that the evaluation crop takes", above=0, at_most=1)
    crop_mode: str = option(
        "squash", "resizing before that crop: squash (aspect not kept), center or border", choices=CROP_MODES
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.mixup or self.cutmix) and self.batch_size % 2:
            raise SubquadError(
                f"mixup and cutmix pair the images of a batch: batch_size {self.batch_size} is odd; take an even one, "
                "or mixup and cutmix of 0 (--mixup 0 --cutmix 0)"
            )
