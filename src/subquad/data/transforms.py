"""From pictures to the tensors a network takes: timm's pipeline, with what small images need added."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from PIL import Image, ImageOps
from timm.data import create_transform
from timm.data.transforms import MaybeToTensor
from torchvision import transforms

from subquad.errors import SubquadError, shown, unknown_name
from subquad.ranges import Positive, Range, fits

INTERPOLATIONS = ("bicubic", "bilinear", "lanczos", "nearest")
CROP_MODES = ("squash", "center", "border")
ERASING = ("const", "rand", "pixel")

CropShare = Annotated[float, Range(above=0, at_most=1)]
"""Of an image's sides what the crop in evaluation leaves."""


@dataclass(frozen=True)
class InputConfig:
    """What a network was trained to see.

    The crop in evaluation is of `img_size` (height, width) out of an image resized to img_size / crop_pct. "squash"
    resizes both sides, whatever the aspect (as the papers do), "center" the shorter and "border" the longer one.
    """

    img_size: tuple[int, int]
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    crop_mode: str = "squash"

    def __post_init__(self) -> None:
        for name in ("img_size", "mean", "std"):
            value = getattr(self, name)
            # lists where they come out of JSON
            object.__setattr__(self, name, tuple(value) if isinstance(value, Iterable) else value)
        if not fits(self.img_size, tuple[Positive, Positive]):
            raise SubquadError(f"img_size must be a height and a width, got {shown(self.img_size)}")
        if not all(fits(of_channels, tuple[float, float, float]) for of_channels in (self.mean, self.std)) or (
            min(self.std) <= 0
        ):
            raise SubquadError(
                f"images need mean and std of 3 channels, got {shown(self.mean)} and {shown(self.std)}: networks of "
                "other images are converted and exported by functions alone, as subquad.convert(network, …)"
            )
        if not fits(self.crop_pct, CropShare):
            raise SubquadError(f"crop_pct must be above 0 and at most 1, got {shown(self.crop_pct)}")
        if self.crop_mode not in CROP_MODES:
            raise unknown_name("crop_mode", self.crop_mode, CROP_MODES)
        if self.interpolation not in INTERPOLATIONS:
            raise unknown_name("interpolation", self.interpolation, INTERPOLATIONS)


class Augmentation(Protocol):
    """The fields of a recipe that say how training images are changed, with timm's names."""

    @property
    def no_aug(self) -> bool: ...
    @property
    def scale(self) -> tuple[float, float] | None: ...
    @property
    def ratio(self) -> tuple[float, float]: ...
    @property
    def train_interpolation(self) -> str: ...
    @property
    def crop_padding(self) -> int: ...
    @property
    def hflip(self) -> float: ...
    @property
    def rotation(self) -> float: ...
    @property
    def color_jitter(self) -> float: ...
    @property
    def aa(self) -> str | None: ...
    @property
    def reprob(self) -> float: ...
    @property
    def remode(self) -> str: ...


def eval_transform(config: InputConfig) -> transforms.Compose:
    """Resize, crop the centre, normalise."""
    return create_transform(
        input_size=config.img_size,
        interpolation=config.interpolation,
        mean=config.mean,
        std=config.std,
        crop_pct=config.crop_pct,
        crop_mode=config.crop_mode,
    )


def placing(config: InputConfig) -> transforms.Compose:
    """The part of the evaluation that comes before tensors: a picture as the network sees it."""
    return transforms.Compose(
        [
            step
            for step in eval_transform(config).transforms
            if not isinstance(step, MaybeToTensor | transforms.Normalize)
        ]
    )


def train_transform(config: InputConfig, recipe: Augmentation) -> transforms.Compose:
    """Place the image, then change it at random.

    With `scale` a random part is placed, without it the image as in evaluation; `crop_padding` then shifts it by up to
    so many pixels, and the rest (black, as the corners of a rotation) stays empty.
    """
    _check(recipe)
    if recipe.no_aug:
        return eval_transform(config)
    (crop, *flips), colours, last = _timm_stages(config, recipe)
    steps = [crop if recipe.scale else placing(config)]
    if recipe.crop_padding:
        steps.append(transforms.RandomCrop(config.img_size, padding=recipe.crop_padding))
    steps += flips + colours
    if recipe.rotation:
        steps.append(transforms.RandomRotation(recipe.rotation, interpolation=transforms.InterpolationMode.BILINEAR))
    return transforms.Compose(steps + last)


def _timm_stages(config: InputConfig, recipe: Augmentation) -> tuple[list[Any], list[Any], list[Any]]:
    """Stages of timm: a random crop and flips; changes of colour and shape; tensor, normalisation and erasing."""
    try:
        stages = create_transform(
            input_size=config.img_size,
            is_training=True,
            scale=recipe.scale,
            ratio=recipe.ratio,
            hflip=recipe.hflip,
            color_jitter=recipe.color_jitter or None,
            auto_augment=recipe.aa,
            interpolation=recipe.train_interpolation,
            mean=config.mean,
            std=config.std,
            re_prob=recipe.reprob,
            re_mode=recipe.remode,
            separate=True,
        )
    except (AssertionError, KeyError, ValueError):
        raise SubquadError(f"timm has no auto-augment policy '{recipe.aa}': try rand-m9-mstd0.5-inc1 or 3a") from None
    flips, colours, last = (list(stage.transforms) for stage in stages)
    for step in colours:
        _keep_one_bit(step)
    return flips, colours, last


def _keep_one_bit(policy: Any) -> None:
    """Let a policy of timm posterize to one bit at least: it asks for none at times, which Pillow 13 refuses."""
    chains = [getattr(policy, "ops", []), *getattr(policy, "policy", [])]
    for operation in (operation for chain in chains for operation in chain):
        if operation.name.startswith("Posterize"):
            operation.aug_fn = _posterize


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    return ImageOps.posterize(image, min(max(bits, 1), 8))


def _check(recipe: Augmentation) -> None:
    if recipe.remode not in ERASING:
        raise unknown_name("remode", recipe.remode, ERASING)
    if recipe.train_interpolation not in (*INTERPOLATIONS, "random"):
        raise unknown_name("train_interpolation", recipe.train_interpolation, (*INTERPOLATIONS, "random"))
    for name in ("hflip", "reprob"):
        if not 0 <= getattr(recipe, name) <= 1:
            raise SubquadError(f"{name} is a probability, between 0 and 1, got {getattr(recipe, name)}")
    if recipe.scale and not 0 < recipe.scale[0] <= recipe.scale[1]:
        raise SubquadError(f"scale must be a smallest and a largest share of the area, got {recipe.scale}")
    if not 0 < recipe.ratio[0] <= recipe.ratio[1]:
        raise SubquadError(f"ratio must be a smallest and a largest aspect, got {recipe.ratio}")
