"""A recipe: everything that decides how a network is trained, as one frozen dataclass.

Fields carry the names of timm's train-script flags and one line of help each; the command line makes its flags from
them. A recipe is written as YAML with the fields as keys; `recipes/` holds those of the papers.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from subquad.errors import SubquadError, unknown_name

RECIPES = Path(__file__).parent / "recipes"
_SCHEDULES = ("constant", "cosine")
_PRECISIONS = ("", "bf16", "fp16")


def _option(default: Any, text: str) -> Any:
    """A field with its line of help."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Recipe:
    """Settings of one training run. None stands for "as the model or the data have it"."""

    model: str = _option("deit_tiny", "model, see `subquad list`")
    attention: str | None = _option(
        None, "mechanism; name:setting=value,… for settings, a+b+… for one a stage or block"
    )
    settings: Mapping[str, Any] = field(
        default_factory=dict, metadata={"help": "settings of the mechanism: num_agents=16,…"}
    )
    img_size: tuple[int, int] | None = _option(None, "height,width of the input, one number for a square")
    patch_size: int | None = _option(None, "side of a patch")
    num_classes: int | None = _option(None, "number of classes; that of the data if left out")
    embed_dim: int | None = _option(None, "width")
    depth: int | None = _option(None, "number of blocks")
    num_heads: int | None = _option(None, "number of heads")
    initial_checkpoint: str | None = _option(None, "weights to start from")

    data: str = _option("digits", "digits, cifar10, imagenet, folder, an archive or hfds/<name>")
    data_dir: str | None = _option(None, "folder or archive with the data")
    strict: bool = _option(False, "stop at a broken image instead of skipping it")
    max_train_images: int | None = _option(None, "train on so many images only")
    workers: int = _option(0, "processes that load images")

    epochs: int = _option(300, "epochs, the cool-down not counted")
    batch_size: int = _option(128, "images a step and process")
    grad_accum_steps: int = _option(1, "steps whose gradients make one update")
    seed: int = _option(42, "seed of weights, order and augmentation")

    opt: str = _option("adamw", "optimizer of timm")
    opt_eps: float | None = _option(None, "epsilon of the optimizer")
    opt_betas: tuple[float, float] | None = _option(None, "betas of the optimizer")
    momentum: float = _option(0.9, "momentum of the optimizer")
    weight_decay: float = _option(0.05, "weight decay, off for biases and 1-d weights")
    layer_decay: float | None = _option(None, "factor of the learning rate from a layer to the one below")
    clip_grad: float | None = _option(None, "largest norm of the gradient")

    lr: float | None = _option(None, "learning rate; scaled from lr_base if left out")
    lr_base: float = _option(5e-4, "learning rate at a total batch of lr_base_size")
    lr_base_size: int = _option(512, "total batch that lr_base is meant for")
    sched: str = _option("cosine", "schedule, an update at a time: cosine or constant")
    warmup_epochs: int = _option(5, "epochs of linear warm-up, within the epochs")
    warmup_lr: float = _option(1e-6, "learning rate at the start of the warm-up")
    min_lr: float = _option(0.0, "learning rate at the end")
    lr_scale_ends: bool = _option(False, "scale warmup_lr and min_lr with the batch as lr_base is")
    cooldown_epochs: int = _option(0, "epochs at min_lr after the schedule")

    smoothing: float = _option(0.1, "label smoothing")
    drop: float = _option(0.0, "dropout")
    drop_path: float | None = _option(None, "stochastic depth; the model's own rate if left out")
    mixup: float = _option(0.0, "alpha of mixup, 0 for none")
    cutmix: float = _option(0.0, "alpha of cutmix, 0 for none")
    mixup_prob: float = _option(1.0, "probability of mixup or cutmix")
    mixup_switch_prob: float = _option(0.5, "probability of cutmix where both are on")

    no_aug: bool = _option(False, "no augmentation: training images as in evaluation")
    scale: tuple[float, float] | None = _option(None, "area of the random crop; no crop if left out")
    ratio: tuple[float, float] = _option((3 / 4, 4 / 3), "aspect of the random crop")
    crop_padding: int = _option(0, "pixels of padding around an image before a random crop")
    hflip: float = _option(0.0, "probability of a horizontal flip")
    rotation: float = _option(0.0, "largest angle of a random rotation, in degrees")
    color_jitter: float = _option(0.0, "jitter of brightness, contrast and saturation")
    aa: str | None = _option(None, "auto-augment policy of timm, e.g. rand-m9-mstd0.5-inc1")
    reprob: float = _option(0.0, "probability of random erasing")
    remode: str = _option("pixel", "random erasing with: const, rand or pixel")
    train_interpolation: str = _option("bicubic", "resampling in training, random for bilinear or bicubic")
    interpolation: str = _option("bicubic", "resampling in evaluation")
    crop_pct: float = _option(1.0, "share of the resized image that the evaluation crop takes")
    crop_mode: str = _option("squash", "resizing before that crop: squash (aspect not kept), center or border")
    mean: tuple[float, float, float] = _option((0.485, 0.456, 0.406), "mean of the input channels")
    std: tuple[float, float, float] = _option((0.229, 0.224, 0.225), "standard deviation of the input channels")

    model_ema: bool = _option(False, "keep a moving average of the weights and evaluate it, too")
    model_ema_decay: float = _option(0.9998, "decay of that average, per update")
    model_ema_warmup: bool = _option(False, "let that decay rise from 0")
    amp: str = _option("", "mixed precision: bf16 or fp16")
    grad_checkpointing: bool = _option(False, "recompute activations in the backward pass")
    compile: bool = _option(False, "compile the model")
    log_interval: int = _option(50, "updates between two looks at the loss within an epoch")

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "grad_accum_steps", "log_interval", "lr_base_size"):
            if getattr(self, name) < 1:
                raise SubquadError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("workers", "warmup_epochs", "cooldown_epochs", "crop_padding", "weight_decay", "min_lr", "drop"):
            if getattr(self, name) < 0:
                raise SubquadError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.sched not in _SCHEDULES:
            raise unknown_name("schedule", self.sched, _SCHEDULES)
        if self.amp not in _PRECISIONS:
            raise unknown_name("precision for amp", self.amp, _PRECISIONS[1:])
        if (self.mixup or self.cutmix) and self.batch_size % 2:
            raise SubquadError(f"mixup and cutmix pair the images of a batch: batch_size {self.batch_size} is odd")

    def replace(self, **changes: Any) -> "Recipe":
        """This recipe with some fields changed; values may be given as text, as on the command line."""
        return dataclasses.replace(self, **_checked(changes, "recipe"))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as YAML and JSON take them."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            name: list(v) if isinstance(v, tuple) else dict(v) if isinstance(v, Mapping) else v
            for name, v in values.items()
        }

    def to_yaml(self) -> str:
        """The whole recipe as YAML, which `load_recipe` takes again."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load_recipe(source: str | Path) -> Recipe:
    """The recipe of a packaged name ("deit") or of a YAML file; fields that it leaves out have their defaults."""
    path = RECIPES / f"{source}.yaml" if str(source) in recipe_names() else Path(source)
    if not path.is_file():
        if path.suffix in (".yaml", ".yml"):
            raise SubquadError(f"no recipe file {path}")
        raise unknown_name("recipe", str(source), recipe_names())
    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SubquadError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise SubquadError(f"{path} must hold lines of `field: value`")
    return Recipe(**_checked(values, str(path)))


def recipe_fields() -> dict[str, tuple[Any, str]]:
    """Name of each field → (its type, its line of help)."""
    hints = typing.get_type_hints(Recipe)
    return {f.name: (hints[f.name], f.metadata["help"]) for f in dataclasses.fields(Recipe)}


def parse_settings(text: str) -> dict[str, Any]:
    """`num_agents=16,local=false` as a dict."""
    settings = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise SubquadError(f"settings are written name=value,name=value, got '{text}'")
        settings[name.strip()] = yaml.safe_load(value)
    return settings


def _checked(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """`values` with the types of the fields they are named for."""
    fields = recipe_fields()
    for name in values:
        if name not in fields:
            raise unknown_name(f"field in {origin}:", str(name), fields)
    return {name: _coerce(name, value, fields[name][0], origin) for name, value in values.items()}


def _coerce(name: str, value: Any, kind: Any, origin: str) -> Any:
    """`value` as a `kind`, from what YAML or the command line make of it ("5e-4" is text in YAML)."""
    optional = isinstance(kind, types.UnionType)
    if optional:
        if value is None or value in ("none", "None", "null"):
            return None
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    try:
        if typing.get_origin(kind) is tuple:
            return _tuple(value, typing.get_args(kind))
        if kind is str:
            return _text(value)
        if kind in (int, float, bool):
            return _number(value, kind)
        return parse_settings(value) if isinstance(value, str) else dict(value)
    except SubquadError:
        raise
    except (TypeError, ValueError):
        raise SubquadError(f"{origin}: {name} must be {_describe(kind)}, got {value!r}") from None


def _tuple(value: Any, kinds: tuple[type, ...]) -> tuple[Any, ...]:
    parts = value.split(",") if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else [value]
    if len(parts) == 1:
        parts = parts * len(kinds)
    if len(parts) != len(kinds):
        raise ValueError
    return tuple(_number(part, kind) for part, kind in zip(parts, kinds, strict=True))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _number(value: Any, kind: type) -> Any:
    if kind is bool:
        value = {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value
        if not isinstance(value, bool):
            raise TypeError
        return value
    if isinstance(value, bool) or (kind is int and isinstance(value, float) and not value.is_integer()):
        raise TypeError
    return kind(value)


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        kinds = typing.get_args(kind)
        return f"{len(kinds)} {'whole ' if kinds[0] is int else ''}numbers"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(kind, "a table of name: value")
