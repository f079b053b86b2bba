"""A recipe: everything that decides how a network is trained, as one frozen dataclass.

`recipes/` holds those of the papers, each task's in a folder of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from subquad.data.transforms import CROP_MODES, ERASING, INTERPOLATIONS
from subquad.errors import SubquadError, unknown_name
from subquad.reading import read_yaml
from subquad.tasks.common_recipe import CommonRecipe
from subquad.tasks.recipe_fields import Field, checked, fields_of, option

RECIPES = Path(__file__).parent / "recipes"
Kind = TypeVar("Kind", bound=CommonRecipe)


@dataclass(frozen=True)
class Recipe(CommonRecipe):
    """How a classifier is trained."""

    task: ClassVar[str] = "classify"
    command: ClassVar[str] = "train"
    metric: ClassVar[str] = "top1"
    metric_title: ClassVar[str] = "top-1 %"

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
    color_jitter: float = option(0.0, "jitter of brightness, contrast and saturation", at_least=0)
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
            raise SubquadError(f"mixup and cutmix pair the images of a batch: batch_size {self.batch_size} is odd")


def recipe_names(task: str = Recipe.task) -> list[str]:
    """Names of the recipes of a task that come with the package."""
    return sorted(path.stem for path in (RECIPES / task).glob("*.yaml"))


def load_recipe(source: str | Path, kind: type[Kind] = Recipe) -> Kind:  # type: ignore[assignment]
    """The recipe of a packaged name ("deit") or of a YAML file; fields that it leaves out have their defaults."""
    names = recipe_names(kind.task)
    path = RECIPES / kind.task / f"{source}.yaml" if str(source) in names else Path(source)
    if not path.is_file():
        if path.suffix in (".yaml", ".yml"):
            raise SubquadError(f"no recipe file {path}")
        raise unknown_name("recipe", str(source), names)
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise SubquadError(f"{path} must hold lines of `field: value`")
    return kind(**checked(values, kind, str(path)))


def recipe_fields(kind: type[CommonRecipe] = Recipe) -> Mapping[str, Field]:
    """The fields of a kind of recipe by name."""
    return fields_of(kind)
