"""What all recipes have: network, data, optimizer, schedule, engine.

Fields carry the names of timm's train-script flags and one line of help each; the command line makes its flags from
them. A recipe is written as YAML with the fields as keys.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml

from subquad.errors import SubquadError, unknown_name
from subquad.training.fields import checked, option

_SCHEDULES = ("constant", "cosine", "poly", "multistep")
_PRECISIONS = ("", "bf16", "fp16")
Self = TypeVar("Self", bound="CommonRecipe")


@dataclass(frozen=True)
class CommonRecipe:
    """Settings of one training run. None stands for "as the model or the data have it".

    Each task's class says how the task is called, by what command it is trained, and by which entry of a judgement the
    best weights are chosen, the higher the better, and what that is called in a table. Fields that are `hidden` mean
    nothing to it and have no flag.
    """

    task: ClassVar[str]
    command: ClassVar[str]
    metric: ClassVar[str]
    metric_title: ClassVar[str]
    hidden: ClassVar[frozenset[str]] = frozenset()

    model: str = option("deit_tiny", "model, see `subquad list`")
    attention: str | None = option(None, "mechanism; name:setting=value,… for settings, a+b+… for one a stage or block")
    settings: Mapping[str, Any] = option({}, "settings of the mechanism: num_agents=16,…")
    img_size: tuple[int, int] | None = option(None, "height,width of the input, one number for a square")
    patch_size: int | None = option(None, "side of a patch")
    num_classes: int | None = option(None, "number of classes; that of the data if left out")
    embed_dim: int | None = option(None, "width")
    depth: int | None = option(None, "number of blocks")
    num_heads: int | None = option(None, "number of heads")
    initial_checkpoint: str | None = option(None, "weights to start from")

    data: str = option("digits", "digits, cifar10, imagenet, folder, an archive or hfds/<name>")
    data_dir: str | None = option(None, "folder or archive with the data")
    strict: bool = option(False, "stop at a broken image instead of skipping it")
    max_train_images: int | None = option(None, "train on so many images only")
    workers: int = option(0, "processes that load images")

    epochs: int = option(300, "epochs, the cool-down not counted")
    updates_per_epoch: int | None = option(None, "updates of an epoch, of images drawn anew; all images if left out")
    batch_size: int = option(128, "images a step and process")
    grad_accum_steps: int = option(1, "steps whose gradients make one update")
    seed: int = option(42, "seed of weights, order and augmentation")

    opt: str = option("adamw", "optimizer of timm")
    opt_eps: float | None = option(None, "epsilon of the optimizer")
    opt_betas: tuple[float, float] | None = option(None, "betas of the optimizer")
    momentum: float = option(0.9, "momentum of the optimizer")
    weight_decay: float = option(0.05, "weight decay, off for biases and 1-d weights")
    layer_decay: float | None = option(None, "factor of the learning rate from a layer to the one below")
    clip_grad: float | None = option(None, "largest norm of the gradient")

    lr: float | None = option(None, "learning rate; scaled from lr_base if left out")
    lr_base: float = option(5e-4, "learning rate at a total batch of lr_base_size")
    lr_base_size: int = option(512, "total batch that lr_base is meant for")
    sched: str = option("cosine", "schedule, an update at a time: cosine, constant, poly or multistep")
    sched_power: float = option(1.0, "power of the poly schedule")
    decay_epochs: tuple[int, ...] | None = option(None, "epochs after which the multistep schedule divides by 10")
    warmup_epochs: int = option(5, "epochs of linear warm-up, within the epochs")
    warmup_updates: int | None = option(None, "updates of linear warm-up, in place of warmup_epochs")
    warmup_prefix: bool = option(False, "the schedule begins when the warm-up is over, and is as much shorter")
    warmup_lr: float = option(1e-6, "learning rate at the start of the warm-up")
    min_lr: float = option(0.0, "learning rate at the end")
    lr_scale_ends: bool = option(False, "scale warmup_lr and min_lr with the batch as lr_base is")
    cooldown_epochs: int = option(0, "epochs at min_lr after the schedule")

    drop_path: float | None = option(None, "stochastic depth; the model's own rate if left out")
    mean: tuple[float, float, float] = option((0.485, 0.456, 0.406), "mean of the input channels")
    std: tuple[float, float, float] = option((0.229, 0.224, 0.225), "standard deviation of the input channels")

    model_ema: bool = option(False, "keep a moving average of the weights and evaluate it, too")
    model_ema_decay: float = option(0.9998, "decay of that average, per update")
    model_ema_warmup: bool = option(False, "let that decay rise from 0")
    amp: str = option("", "mixed precision: bf16 or fp16")
    grad_checkpointing: bool = option(False, "recompute activations in the backward pass")
    compile: bool = option(False, "compile the model")
    log_interval: int = option(50, "updates between two looks at the loss within an epoch")

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "grad_accum_steps", "log_interval", "lr_base_size"):
            if getattr(self, name) < 1:
                raise SubquadError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("workers", "warmup_epochs", "cooldown_epochs", "weight_decay", "min_lr"):
            if getattr(self, name) < 0:
                raise SubquadError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.sched not in _SCHEDULES:
            raise unknown_name("schedule", self.sched, _SCHEDULES)
        if (self.sched == "multistep") != bool(self.decay_epochs):
            raise SubquadError("the multistep schedule, and no other, has decay_epochs: give both or neither")
        if self.amp not in _PRECISIONS:
            raise unknown_name("precision for amp", self.amp, _PRECISIONS[1:])

    def continued(self, run: Path) -> str:
        """The command that goes on with a run."""
        return f"subquad {self.command} --resume {run}"

    def replace(self: Self, **changes: Any) -> Self:
        """This recipe with some fields changed; values may be given as text, as on the command line."""
        return dataclasses.replace(self, **checked(changes, type(self), "recipe"))

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
