"""Optimizer and schedule of a recipe, from timm's parts."""

from dataclasses import dataclass

import torch
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn

from subquad.errors import SubquadError
from subquad.optimizers import optimizer_of
from subquad.tasks.common_recipe import CommonRecipe


@dataclass(frozen=True)
class LearningRates:
    """Where the schedule starts, peaks and ends."""

    warmup: float
    peak: float
    end: float


def learning_rates(recipe: CommonRecipe, total_batch: int) -> LearningRates:
    """The rates at `total_batch` images an update: the papers scale them in proportion to it."""
    factor = total_batch / recipe.lr_base_size
    peak = recipe.lr_base * factor if recipe.lr is None else recipe.lr
    ends = factor if recipe.lr_scale_ends and recipe.lr is None else 1.0
    return LearningRates(recipe.warmup_lr * ends, peak, recipe.min_lr * ends)


def make_optimizer(recipe: CommonRecipe, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The optimizer, without decay on 1-d weights, biases and what `model.no_weight_decay()` names.

    Raises:
        SubquadError: it does not take the recipe's settings, or the rate shall fall from layer to layer of a network
            that does not say what its layers are.
    """
    settings = recipe.optimizer_settings()
    if settings.get("layer_decay") is not None and not hasattr(model, "group_matcher"):
        raise SubquadError(
            f"layer_decay {settings['layer_decay']:g} needs to know the network's layers, and {type(model).__name__} "
            f"has no group_matcher, as timm's networks have: leave it out"
        )
    return optimizer_of(model, recipe.opt, lr=lr, **settings)


def make_scheduler(
    recipe: CommonRecipe, optimizer: torch.optim.Optimizer, rates: LearningRates, updates_per_epoch: int
) -> tuple[Scheduler, int]:
    """The schedule, stepped after every update, and the number of epochs with the cool-down."""
    warmup: float = recipe.warmup_epochs
    if recipe.warmup_updates is not None:
        warmup = recipe.warmup_updates / updates_per_epoch
    if recipe.warmup_prefix and warmup >= recipe.epochs:
        raise SubquadError(
            f"with warmup_prefix the schedule begins after {recipe.warmup_updates} warmup_updates, and there are "
            f"{recipe.epochs * updates_per_epoch} in {recipe.epochs} epochs: take fewer of the one or more of the other"
        )
    # timm counts milestones from where a warm-up that stands before the schedule ends
    before = warmup if recipe.warmup_prefix else 0
    shape = {"poly": {"decay_rate": recipe.sched_power}}.get(recipe.sched, {})
    scheduler, _ = create_scheduler_v2(
        optimizer,
        # a constant rate is one of no steps: timm 1.0.26 knows no other
        sched="multistep" if recipe.sched == "constant" else recipe.sched,
        num_epochs=recipe.epochs - before,
        # timm's steps come an update early: it counts the one that is done, as schedules of epochs need it
        decay_milestones=[epoch - before + 0.5 / updates_per_epoch for epoch in recipe.decay_epochs or ()],
        cooldown_epochs=recipe.cooldown_epochs,
        min_lr=rates.end,
        warmup_lr=rates.warmup,
        warmup_epochs=warmup,
        warmup_prefix=recipe.warmup_prefix,
        **shape,
        step_on_epochs=False,
        updates_per_epoch=updates_per_epoch,
    )
    return scheduler, recipe.epochs + recipe.cooldown_epochs
