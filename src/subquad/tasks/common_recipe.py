"""What all recipes have: a mechanism, data, optimizer, schedule, engine.

Fields carry the names of timm's train-script flags and one line of help each; the command line makes its flags from
them. A recipe is written as YAML with the fields as keys.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import yaml

from subquad.errors import SubquadError
from subquad.optimizers import OPTIMIZERS
from subquad.tasks.recipe_fields import checked, option

_SCHEDULES = ("constant", "cosine", "poly", "multistep")
_PRECISIONS = ("", "bf16", "fp16")
Self = TypeVar("Self", bound="CommonRecipe")


@dataclass(frozen=True)
class CommonRecipe:
    """Settings of one training run, whatever the task. None stands for "as the network or the data have it".

    Attributes:
        task: the name of the task that recipes of this class ask for.
        folder: where the recipes lie that come with the task, as YAML; None for none.
        retired: fields that recipes of earlier versions have, with the one value that they could have there.
        of_network: fields that say how the network is made, which may mean nothing to another one.
    """

    task: ClassVar[str]
    folder: ClassVar[Path | None] = None
    retired: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    of_network: ClassVar[tuple[str, ...]] = ("attention", "settings")

    attention: str | None = option(
        None,
        "mechanism; name:setting=value,… for settings, a+b+… for one a stage or block",
        free="`create_model` knows the mechanisms",
    )
    settings: Mapping[str, Any] = option({}, "settings of the mechanism: num_agents=16,…")
    initial_checkpoint: str | None = option(None, "weights to start from: file or run", free="a path")

    data: str = option("digits", "name, folder or archive of the data", free="a name or a path")
    data_dir: str | None = option(None, "folder or archive with the data", free="a path")
    max_train_images: int | None = option(None, "train on so many images only", at_least=1)
    workers: int = option(0, "processes that load images", at_least=0, at_most=1_000)

    epochs: int = option(300, "epochs, the cool-down not counted", at_least=1)
    updates_per_epoch: int | None = option(
        None, "updates of an epoch, of images drawn anew; all images if left out", at_least=1
    )
    batch_size: int = option(128, "images a step and process", at_least=1)
    grad_accum_steps: int = option(1, "steps whose gradients make one update", at_least=1)
    seed: int = option(42, "seed of weights, order and augmentation", at_least=0)

    opt: str = option("adamw", "optimizer of timm", choices=OPTIMIZERS)
    opt_eps: float | None = option(None, "epsilon of the optimizer", at_least=0)
    opt_betas: tuple[float, float] | None = option(None, "betas of the optimizer", at_least=0, below=1)
    momentum: float = option(0.9, "momentum of the optimizer", at_least=0, below=1)
    weight_decay: float = option(0.05, "weight decay, off for biases and 1-d weights", at_least=0)
    clip_grad: float | None = option(None, "largest norm of the gradient; none or 0 for any", at_least=0)

    lr: float | None = option(None, "learning rate; scaled from lr_base if left out", at_least=0)
    lr_base: float = option(5e-4, "learning rate at a total batch of lr_base_size", at_least=0)
    lr_base_size: int = option(512, "total batch that lr_base is meant for", at_least=1)
    sched: str = option(
        "cosine", "schedule, an update at a time: cosine, constant, poly or multistep", choices=_SCHEDULES
    )
    sched_power: float = option(1.0, "power of the poly schedule", above=0)
    decay_epochs: tuple[int, ...] | None = option(
        None, "epochs after which the multistep schedule divides by 10", at_least=1, rising=True
    )
    warmup_epochs: int = option(5, "epochs of linear warm-up, within the epochs", at_least=0)
    warmup_updates: int | None = option(None, "updates of linear warm-up, in place of warmup_epochs", at_least=0)
    warmup_prefix: bool = option(False, "the schedule begins when the warm-up is over, and is as much shorter")
    warmup_lr: float = option(1e-6, "learning rate at the start of the warm-up", at_least=0)
    min_lr: float = option(0.0, "learning rate at the end, of cosine and poly", at_least=0)
    lr_scale_ends: bool = option(False, "scale warmup_lr and min_lr with the batch as lr_base is")
    cooldown_epochs: int = option(0, "epochs after the schedule, at its last learning rate", at_least=0)

    model_ema: bool = option(False, "keep a moving average of the weights and evaluate it, too")
    model_ema_decay: float = option(0.9998, "decay of that average, per update", at_least=0, below=1)
    model_ema_warmup: bool = option(False, "let that decay rise from 0")
    amp: str = option("", "mixed precision: bf16 or fp16", choices=_PRECISIONS)
    compile: bool = option(False, "compile the model")
    log_interval: int = option(50, "updates between two looks at the loss within an epoch", at_least=1)

    def __post_init__(self) -> None:
        # what Python gives is what YAML and the command line would have given, and is refused where they are
        for name, value in checked(vars(self), type(self)).items():
            object.__setattr__(self, name, value)
        if (self.sched == "multistep") != (self.decay_epochs is not None):
            raise SubquadError("the multistep schedule, and no other, has decay_epochs: give both or neither")
        if self.warmup_prefix and self.warmup_updates is None and self.warmup_epochs >= self.epochs:
            raise SubquadError(
                f"with warmup_prefix the schedule begins after {self.warmup_epochs} warmup_epochs, "
                f"and there are {self.epochs} epochs: take fewer of the one or more of the other"
            )

    def optimizer_settings(self) -> dict[str, Any]:
        """Settings of the optimizer by the names that timm has for them, those left out that it shall choose."""
        own = {"eps": self.opt_eps, "betas": self.opt_betas}
        chosen = {name: value for name, value in own.items() if value is not None}
        return {"weight_decay": self.weight_decay, "momentum": self.momentum, **chosen}

    def replace(self: Self, **changes: Any) -> Self:
        """This recipe with some fields changed; values may be given as text, as on the command line."""
        return dataclasses.replace(self, **checked(changes, type(self)))

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
