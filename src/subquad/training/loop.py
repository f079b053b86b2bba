"""The training loop: epochs of updates, an evaluation after each, everything kept in the run folder.

A run that was killed goes on from its last whole epoch and ends with the same weights as an unbroken one: whatever is
random follows from the seed, the epoch and the image (order.py).
"""

import math
import statistics
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from tqdm import tqdm

from subquad.data import create_loader
from subquad.errors import SubquadError
from subquad.models import save_weights
from subquad.training.checkpoint import State, load_state, save_state
from subquad.training.common import CommonRecipe
from subquad.training.cost import count_parameters, peak_memory_mb, reset_peak_memory
from subquad.training.engine import interruptible, make_accelerator
from subquad.training.journal import Log, describe_run, describe_setup, epoch_line, make_writer, silent, summarise
from subquad.training.optim import learning_rates, make_optimizer, make_scheduler
from subquad.training.order import STEPS, WEIGHTS, EpochView, seed_all
from subquad.training.run_folder import RunFolder
from subquad.training.task import Row, Task
from subquad.training.tasks import make_task


def train(recipe: CommonRecipe, run: Path | str, *, resume: bool = False, log: Log = silent) -> dict[str, Any]:
    """Train a recipe in the folder `run` and return its summary.

    Args:
        recipe: what to train, one of any task.
        run: a folder that is not there yet; it gets recipe, metrics, weights and summary.
        resume: go on with the run in that folder instead; one that has finished is left as it is.
        log: gets a line an epoch.

    Raises:
        SubquadError: in one line, if the recipe can't be trained, before anything is written; if the loss is not
            finite, or if the run is interrupted: the folder then holds the last whole epoch.
    """
    folder = RunFolder(Path(run))
    if resume:
        folder.check_resumable(recipe)
        if (summary := folder.summary()) is not None:
            return summary
    else:
        folder.check_new()
    accelerator = make_accelerator(recipe)
    seed_all(recipe.seed, WEIGHTS)
    trainer = Trainer(make_task(recipe), folder, accelerator, log)
    # every process has looked at the folder before the first one writes to it
    accelerator.wait_for_everyone()
    try:
        with interruptible():
            return trainer.run(resume)
    except KeyboardInterrupt:
        kept = f"{trainer.epochs_done} of {trainer.num_epochs} epochs are kept"
        raise SubquadError(f"interrupted: {kept}, {recipe.continued(folder.path)} goes on") from None
    finally:
        accelerator.free_memory()


class Trainer:
    """One run, from set-up to summary."""

    def __init__(self, task: Task, folder: RunFolder, accelerator: Any, log: Log):
        recipe = task.recipe
        self.task, self.recipe, self.folder, self.accelerator = task, recipe, folder, accelerator
        self.is_main = accelerator.is_main_process
        self.log = log if self.is_main else silent
        self.total_batch = recipe.batch_size * recipe.grad_accum_steps * accelerator.num_processes
        self.updates_per_epoch = len(task.train_images) // self.total_batch
        if not self.updates_per_epoch:
            raise SubquadError(
                f"{len(task.train_images)} training images are less than one batch of {self.total_batch}: "
                f"take a smaller --batch-size"
            )
        if recipe.updates_per_epoch is not None:
            if not 1 <= recipe.updates_per_epoch <= self.updates_per_epoch:
                raise SubquadError(
                    f"updates_per_epoch goes from 1 to {self.updates_per_epoch}, as many as {len(task.train_images)} "
                    f"training images have, got {recipe.updates_per_epoch}"
                )
            self.updates_per_epoch = recipe.updates_per_epoch
        self.bare: nn.Module = task.model.to(accelerator.device)
        self.ema = None
        if recipe.model_ema:
            self.ema = ModelEmaV3(self.bare, decay=recipe.model_ema_decay, use_warmup=recipe.model_ema_warmup)
        self.params = count_parameters(self.bare)
        self.macs = task.macs()
        rates = learning_rates(recipe, self.total_batch)
        optimizer = make_optimizer(recipe, self.bare, rates.peak)
        self.scheduler, self.num_epochs = make_scheduler(recipe, optimizer, rates, self.updates_per_epoch)
        self.view = EpochView(task.train_images, self.updates_per_epoch * self.total_batch, recipe.seed)
        loader, self.eval_loader = self._loaders()
        self.model, self.optimizer, self.loader = accelerator.prepare(self.bare, optimizer, loader)
        self.epochs_done = self.updates = 0
        self.best, self.best_epoch = -1.0, -1
        self.rows: list[Row] = []

    def run(self, resume: bool) -> dict[str, Any]:
        """Train until the last epoch; the summary."""
        reset_peak_memory(self.accelerator.device)
        if resume:
            self._restore()
        elif self.is_main:
            self.folder.create(self.recipe, self._facts())
        self.log(describe_setup(self.task, self.params, self.macs))
        writer = make_writer(self.folder.tensorboard, self.epochs_done) if self.is_main else None
        for epoch in range(self.epochs_done, self.num_epochs):
            row = self._epoch(epoch)
            self.log(epoch_line(self.task, row, self.num_epochs))
            if writer is not None:
                for name, value in row.items():
                    writer.add_scalar(name, value, epoch)
                writer.flush()
        if writer is not None:
            writer.close()
        summary = summarise(self.rows, self.recipe.metric, self.best, self.best_epoch, self.params, self.macs)
        if self.is_main:
            self.folder.finish(summary)
        self.accelerator.wait_for_everyone()
        return summary

    def _epoch(self, epoch: int) -> Row:
        """Train, evaluate and save one epoch; its row of metrics."""
        start = time.perf_counter()
        train_loss, lr = self._train(epoch)
        train_seconds = time.perf_counter() - start
        row: Row = {"epoch": epoch, "train_loss": train_loss} | self._evaluate()
        # the last update of an epoch shows in no training loss
        self._check_finite(row.get("eval_loss", 0), f"the evaluation after epoch {epoch + 1}", lr)
        row |= {
            "lr": lr,
            "epoch_seconds": time.perf_counter() - start,
            "images_per_second": len(self.view) / train_seconds,
            "peak_memory_mb": peak_memory_mb(self.accelerator.device),
        }
        self.rows.append(row)
        self._save(row)
        self.epochs_done = epoch + 1
        if epoch == 0 and (broken := self.task.train_images.num_broken):
            first = self.task.train_images.broken_paths()[0]
            self.log(f"skipped {broken} broken training images, the first is {first}")
        return row

    def _train(self, epoch: int) -> tuple[float, float]:
        """The updates of one epoch: mean loss and last learning rate."""
        seed_all(self.recipe.seed, epoch, self.accelerator.process_index, STEPS)
        self.view.start_epoch(epoch)
        self.model.train()
        losses: list[float] = []
        pending: list[Tensor] = []
        lr = 0.0
        for batch in self._progress(epoch):
            lr = max(group["lr"] for group in self.optimizer.param_groups)
            pending.append(self._step(batch))
            if len(pending) == self.recipe.log_interval:
                losses += self._checked(pending, epoch, len(losses), lr)
                pending = []
        if pending:
            losses += self._checked(pending, epoch, len(losses), lr)
        return statistics.fmean(losses), lr

    def _step(self, batch: Any) -> Tensor:
        """One batch of this process, and an update with the last one of those that are accumulated; its loss."""
        with self.accelerator.accumulate(self.model):
            loss = self.task.loss(self.model, batch)
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients and self.recipe.clip_grad:
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.recipe.clip_grad)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.accelerator.sync_gradients:
            self.updates += 1
            self.scheduler.step_update(self.updates)
            if self.ema is not None:
                self.ema.update(self.bare, step=self.updates)
        return loss.detach()

    def _checked(self, losses: list[Tensor], epoch: int, first: int, lr: float) -> list[float]:
        """The losses, means over the processes; raises if one is not finite."""
        means = self.accelerator.reduce(torch.stack(losses), "mean").tolist()
        for step, loss in enumerate(means, start=first):
            self._check_finite(loss, f"epoch {epoch + 1}, step {step + 1}", lr)
        return means

    def _check_finite(self, loss: float, where: str, lr: float) -> None:
        """Stop before broken weights take the place of the last good ones."""
        if not math.isfinite(loss):
            kept = f"{self.epochs_done} whole epochs are kept in {self.folder.path}"
            raise SubquadError(
                f"the loss is {loss} in {where}, at lr {lr:.2g}: try another --experiment with a lower --lr, "
                f"--clip-grad 1 or without --amp; {kept}"
            )

    def _evaluate(self) -> Row:
        """What the weights and their average are worth."""
        models = {"eval": self.bare} | ({} if self.ema is None else {"ema": self.ema.module})
        amp_dtype = {"": None, "bf16": torch.bfloat16, "fp16": torch.float16}[self.recipe.amp]
        row: Row = {}
        for kind, model in models.items():
            found = self.task.judge(model, self.eval_loader, self.accelerator.device, amp_dtype)
            row |= {f"{kind}_{name}": value for name, value in found.items()}
        return row

    def _save(self, row: Row) -> None:
        """Write weights, metrics and, last of all, the state from which a run goes on."""
        metric = self.recipe.metric
        candidates: dict[str, nn.Module] = {f"eval_{metric}": self.bare}
        if self.ema is not None:
            candidates[f"ema_{metric}"] = self.ema.module
        best = max(candidates, key=lambda name: row[name])
        better = row[best] > self.best
        if better:
            self.best, self.best_epoch = row[best], int(row["epoch"])
        if not self.is_main:
            return
        metadata = self.task.metadata() | {"epoch": row["epoch"]}
        if better:
            save_weights(candidates[best], self.folder.best_weights, metadata | {metric: row[best]})
        save_weights(self.bare, self.folder.last_weights, metadata | {metric: row[f"eval_{metric}"]})
        if self.ema is not None:
            save_weights(self.ema.module, self.folder.last_ema_weights, metadata | {metric: row[f"ema_{metric}"]})
        self.folder.write_rows(self.rows)
        save_state(self._state(), self.folder.state)

    def _state(self) -> State:
        scaler = self.accelerator.scaler
        return State(
            epochs=len(self.rows),
            updates=self.updates,
            total_batch=self.total_batch,
            best=self.best,
            best_epoch=self.best_epoch,
            model=self.bare.state_dict(),
            optimizer=self.optimizer.state_dict(),
            ema=self.ema.module.state_dict() if self.ema is not None else {},
            scaler=scaler.state_dict() if scaler is not None else {},
        )

    def _restore(self) -> None:
        """Go back to the last whole epoch; a run that was stopped before its first one starts anew."""
        if not self.folder.state.is_file():
            return
        state = load_state(self.folder.state)
        if state.total_batch != self.total_batch:
            raise SubquadError(
                f"{self.folder.path} was trained with {state.total_batch} images an update, not {self.total_batch}: "
                f"resume it with as many processes"
            )
        self.bare.load_state_dict(state.model)
        self.optimizer.load_state_dict(state.optimizer)
        if self.ema is not None:
            self.ema.module.load_state_dict(state.ema)
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state.scaler)
        self.epochs_done, self.updates = state.epochs, state.updates
        self.best, self.best_epoch = state.best, state.best_epoch
        self.rows = self.folder.rows()[: state.epochs]
        self.scheduler.step_update(self.updates)

    def _facts(self) -> dict[str, Any]:
        costs = {"params": self.params, "macs": self.macs}
        return describe_run(self.accelerator) | self.task.metadata() | {"creation": self.bare.creation} | costs

    def _loaders(self) -> tuple[Any, Any]:
        """Batches to train on, which Accelerate will share out, and this process's share of those to judge by."""
        load = partial(
            create_loader,
            batch_size=self.recipe.batch_size,
            workers=self.recipe.workers,
            pin_memory=self.accelerator.device.type == "cuda",
        )
        share = {"rank": self.accelerator.process_index, "world_size": self.accelerator.num_processes}
        task = self.task
        judged = load(task.eval_images, collate=task.eval_collate, **share)
        return load(self.view, collate=task.collate, drop_last=True), judged

    def _progress(self, epoch: int) -> Iterable[Any]:
        """The batches of this epoch, behind a bar where there is a terminal to draw it on."""
        hidden = not (self.is_main and sys.stderr.isatty())
        return tqdm(self.loader, desc=f"epoch {epoch + 1}/{self.num_epochs}", leave=False, disable=hidden)
