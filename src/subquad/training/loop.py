"""The training loop: epochs of updates, an evaluation after each, everything kept in the run folder.

A run that was killed goes on from its last whole epoch and ends with the same weights as an unbroken one: whatever is
random follows from the seed, the epoch and the image (order.py).
"""

import math
import statistics
import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from tqdm import tqdm

from subquad.data import create_loader
from subquad.data.dataset import PictureDataset
from subquad.errors import SubquadError
from subquad.kernels import unavailable
from subquad.kernels.backends import asked
from subquad.models import save_weights
from subquad.runs.run_folder import RunFolder
from subquad.runs.run_state import State, load_state, not_finite, put_back, save_state
from subquad.tasks.network_costs import count_parameters
from subquad.tasks.task import Row, Task
from subquad.tasks.task_contract import check_loss, notes_of, row_of
from subquad.training.engine import Interruptions
from subquad.training.journal import (
    Log,
    add_row,
    describe_run,
    describe_schedule,
    describe_setup,
    describe_slow_precision,
    epoch_line,
    event_writer,
    silent,
    summarise,
)
from subquad.training.optim import learning_rates, make_optimizer, make_scheduler
from subquad.training.order import STEPS, EpochView, count_updates, seed_all
from subquad.training.process_memory import reset_run_peak, run_peak_mb


class Trainer:
    """One run, from set-up to summary."""

    def __init__(self, task: Task, folder: RunFolder, accelerator: Any, interruptions: Interruptions, log: Log):
        recipe = task.recipe
        self.interruptions = interruptions
        self.task, self.recipe, self.folder, self.accelerator = task, recipe, folder, accelerator
        self.is_main = accelerator.is_main_process
        self.log = log if self.is_main else silent
        self.total_batch = recipe.batch_size * recipe.grad_accum_steps * accelerator.num_processes
        self.updates_per_epoch = count_updates(
            len(task.train_images), self.total_batch, recipe.updates_per_epoch, task.examples
        )
        self.bare: nn.Module = task.model.to(accelerator.device)
        self.ema = None
        if recipe.model_ema:
            self.ema = ModelEmaV3(self.bare, decay=recipe.model_ema_decay, use_warmup=recipe.model_ema_warmup)
        self.params = count_parameters(self.bare)
        self.macs, self.metric = task.macs(), task.columns[0].entry
        self.rates = learning_rates(recipe, self.total_batch)
        optimizer = make_optimizer(recipe, self.bare, self.rates.peak)
        self.scheduler, self.num_epochs = make_scheduler(recipe, optimizer, self.rates, self.updates_per_epoch)
        self.view = EpochView(task.train_images, self.updates_per_epoch * self.total_batch, recipe.seed)
        loader, self.eval_loader = self._loaders()
        self.model, self.optimizer, self.loader = accelerator.prepare(self.bare, optimizer, loader)
        self.epochs_done = self.updates = 0
        # images of the gradients that are accumulated
        self.images = 0
        self.best, self.best_epoch = -1.0, -1
        self.rows: list[Row] = []
        self.broken_told: dict[str, int] = {}

    def run(self, resume: bool) -> dict[str, Any]:
        """Train until the last epoch; the summary."""
        reset_run_peak(self.accelerator.device)
        if not resume:
            # before there is a folder
            for doubt in self.task.examine():
                self.log(doubt)
        if resume:
            self._restore()
        elif self.is_main:
            self.folder.create(self.recipe, self._facts())
        self.log(describe_setup(self.task, self.params, self.macs))
        self.log(
            describe_schedule(self.task, self.num_epochs, self.updates_per_epoch, self.total_batch, self.rates.peak)
        )
        if (slow := describe_slow_precision(self.recipe, self.accelerator.device)) is not None:
            self.log(slow)
        if self.accelerator.device.type == "cpu" and asked(None) != "eager":
            # where they have to be compiled first, that is no part of an epoch
            unavailable("native")
        with event_writer(self.folder.tensorboard, self.epochs_done) if self.is_main else nullcontext() as writer:
            for epoch in range(self.epochs_done, self.num_epochs):
                row = self._epoch(epoch)
                self.log(epoch_line(self.task, row, self.num_epochs))
                if writer is not None:
                    add_row(writer, row)
        summary = summarise(self.rows, self.metric, self.best, self.best_epoch, self.params, self.macs)
        if self.is_main:
            self.folder.check_there()
            self.folder.finish(summary)
        self.accelerator.wait_for_everyone()
        return summary

    def _epoch(self, epoch: int) -> Row:
        """Train, evaluate and save one epoch; its row of metrics."""
        start = time.perf_counter()
        train_loss, lr = self._train(epoch)
        train_seconds = time.perf_counter() - start
        row: Row = {"epoch": epoch, "train_loss": train_loss} | self._evaluate()
        self._check_judged(row, lr)
        for images in (self.task.train_images, self.task.eval_images):
            # an epoch of fewer images, or judged by others, is none of this run's
            if isinstance(images, PictureDataset):
                images.check_all_there()
        row |= {
            "lr": lr,
            "epoch_seconds": time.perf_counter() - start,
            "images_per_second": len(self.view) / train_seconds,
            "peak_memory_mb": run_peak_mb(self.accelerator.device),
        }
        self.rows.append(row)
        with self.interruptions.held_back():
            self._save(row)
            self.epochs_done = epoch + 1
        self._tell_broken()
        return row

    def _tell_broken(self) -> None:
        """Say how many images are left out, where more are known of than were said."""
        for what, images in {"training": self.task.train_images, "held-out": self.task.eval_images}.items():
            broken = getattr(images, "num_broken", 0)
            if broken > self.broken_told.get(what, 0):
                first = images.broken_paths()[0]
                self.log(f"skipped {broken} broken {what} {'image' if broken == 1 else 'images'}, the first is {first}")
                self.broken_told[what] = broken

    def _train(self, epoch: int) -> tuple[float, float]:
        """The updates of one epoch: mean loss and last learning rate."""
        seed_all(self.recipe.seed, epoch, self.accelerator.process_index, STEPS)
        self.view.start_epoch(epoch)
        self.model.train()
        losses: list[float | None] = []
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
        counted = [loss for loss in losses if loss is not None]
        if not counted:
            first = next(iter(self.task.train_images.broken_paths()), "not known here")
            raise SubquadError(
                f"none of the {len(self.view)} training images of epoch {epoch + 1} can be read, the first is {first}"
            )
        if not any(counted):
            raise SubquadError(
                f"every loss of epoch {epoch + 1} is 0: the training images have no label that could be learnt, "
                f"as where all of a mask is void"
            )
        return statistics.fmean(counted), lr

    def _step(self, batch: Any) -> Tensor:
        """One batch of this process, and an update with the last one of those that are accumulated.

        Returns:
            Its loss and 1; zeros for a batch whose images are all broken.
        """
        self.interruptions.check()
        size, updated = self.task.size(batch), False
        loss = torch.zeros((), device=self.accelerator.device)
        with self.accelerator.accumulate(self.model):
            # without an image it still passes through the network where other processes wait for the gradients
            if size or self.accelerator.num_processes > 1:
                loss = self.task.loss(self.model, batch)
                check_loss(self.task, loss)
                self.accelerator.backward(loss)
            self.images += size
            if self.accelerator.sync_gradients and (self.images or self._has_gradient()):
                if self.recipe.clip_grad:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.recipe.clip_grad)
                self.optimizer.step()
                updated = True
            self.optimizer.zero_grad()
        if self.accelerator.sync_gradients:
            self.images = 0
            self.updates += 1
            self.scheduler.step_update(self.updates)
            if self.ema is not None and updated:
                self.ema.update(self.bare, step=self.updates)
        return torch.stack([loss.detach().float() * bool(size), loss.new_full((), bool(size), dtype=torch.float)])

    def _has_gradient(self) -> bool:
        """Whether another process had an image: it is asked by those that had none, whose own gradients are zero."""
        gradients = [parameter.grad for parameter in self.bare.parameters() if parameter.grad is not None]
        return any(bool(gradient.any()) for gradient in gradients)

    def _checked(self, losses: list[Tensor], epoch: int, first: int, lr: float) -> list[float | None]:
        """The losses, means over the processes that had images, None where none had; raises if one is not finite."""
        sums = self.accelerator.reduce(torch.stack(losses), "sum").tolist()
        means = [total / processes if processes else None for total, processes in sums]
        for step, loss in enumerate(means, start=first):
            self._check_finite(loss or 0.0, f"epoch {epoch + 1}, step {step + 1}", lr)
        return means

    def _check_finite(self, loss: float, where: str, lr: float) -> None:
        """Stop before broken weights take the place of the last good ones."""
        if not math.isfinite(loss):
            raise SubquadError(f"the loss is {loss} in {where}, at lr {lr:.2g}: {self._advice()}")

    def _check_judged(self, row: Row, lr: float) -> None:
        """Raise where an epoch ends in what is no number; its last update shows in no training loss."""
        after = f"after epoch {row['epoch'] + 1:.0f}"
        for kind, model in {"eval": self.bare, "ema": self.ema and self.ema.module}.items():
            if model is None:
                continue
            what = {"eval": "weights", "ema": "averaged weights"}[kind]
            if not_finite(model.parameters()):
                raise SubquadError(f"the {what} are not finite {after}, at lr {lr:.2g}: {self._advice()}")
            self._check_finite(row.get(f"{kind}_loss", 0.0), f"the evaluation {after}", lr)
            if not math.isfinite(worth := row[f"{kind}_{self.metric}"]):
                title = self.task.columns[0].title
                raise SubquadError(f"{title} is {worth} {after}: nothing of the held-out images could be judged")

    def _advice(self) -> str:
        kept = f"{self.epochs_done} whole epochs are kept in {self.folder.path}" if self.epochs_done else "none is kept"
        return f"try another --experiment with a lower --lr, --clip-grad 1 or without --amp; {kept}"

    def _evaluate(self) -> Row:
        """What the weights and their average are worth."""
        self._share_buffers()
        models = {"eval": self.bare} | ({} if self.ema is None else {"ema": self.ema.module})
        amp_dtype = {"": None, "bf16": torch.bfloat16, "fp16": torch.float16}[self.recipe.amp]
        row: Row = {}
        for kind, model in models.items():
            figures = row_of(self.task, self.task.judge(model, self.eval_loader, self.accelerator.device, amp_dtype))
            row |= {f"{kind}_{name}": value for name, value in figures.items()}
        return row

    def _share_buffers(self) -> None:
        """Give every process what the first one saves: batch norms remember the images of their own process alone."""
        if self.accelerator.num_processes == 1:
            return
        for model in [self.bare] if self.ema is None else [self.bare, self.ema.module]:
            saved = model.state_dict()
            for name, buffer in model.named_buffers():
                if name in saved:
                    dist.broadcast(buffer, src=0)

    def _save(self, row: Row) -> None:
        """Write weights, metrics and, last of all, the state from which a run goes on."""
        metric = self.metric
        candidates: dict[str, nn.Module] = {f"eval_{metric}": self.bare}
        if self.ema is not None:
            candidates[f"ema_{metric}"] = self.ema.module
        best = max(candidates, key=lambda name: row[name])
        # of epochs in which nothing was found the last, as one that was trained for longer
        better = row[best] > self.best or row[best] == self.best == 0
        if better:
            self.best, self.best_epoch = row[best], int(row["epoch"])
        if not self.is_main:
            return
        self.folder.check_there()
        metadata = notes_of(self.task) | {"epoch": row["epoch"]}
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
            rows=self.rows,
        )

    def _restore(self) -> None:
        """Go back to the last whole epoch; a run that was stopped before its first one starts anew.

        Raises:
            SubquadError: the state is missing, damaged or of another network, in one line.
        """
        self.folder.check_classes(self.task.metadata().get("classes"))
        if not self.folder.has_facts() and self.is_main:
            self.folder.write_facts(self._facts())
        if not self.folder.state.exists():
            # in its first epoch the state is written last
            if len(rows := self.folder.rows()) > 1:
                raise SubquadError(f"{self.folder.state} is missing, {len(rows)} epochs can't be gone on from without")
            return
        state = load_state(self.folder.state)
        if state.total_batch != self.total_batch:
            raise SubquadError(
                f"{self.folder.path} was trained with {state.total_batch} images an update, not {self.total_batch}: "
                f"resume it with as many processes"
            )
        self.rows = self.folder.rows()[: state.epochs] if state.rows is None else state.rows
        if len(self.rows) != state.epochs:
            raise SubquadError(f"the metrics have {len(self.rows)} rows, not the {state.epochs} of {self.folder.state}")
        if not self.folder.best_weights.is_file():
            best = f"{self.folder.best_weights}, the weights of epoch {state.best_epoch + 1}, is missing"
            raise SubquadError(f"{best}: put it back, or a copy of {self.folder.last_weights.name} in its place")
        ema = self.ema.module if self.ema is not None else None
        put_back(state, self.folder.state, self.bare, self.optimizer, ema, self.accelerator.scaler)
        self.epochs_done, self.updates = state.epochs, state.updates
        if state.updates != state.epochs * self.updates_per_epoch:
            before = state.updates / max(state.epochs, 1)
            self.log(f"the training images are others: epochs of {before:g} updates have {self.updates_per_epoch} now")
        elif others := self.folder.other_images(self._counts()):
            self.log(others)
        self.best, self.best_epoch = state.best, state.best_epoch
        self.scheduler.step_update(self.updates)
        if self.is_main:
            # the metrics may be cut short, or have an epoch of which the state was not written any more
            self.folder.write_rows(self.rows)

    def _facts(self) -> dict[str, Any]:
        costs = {"params": self.params, "macs": self.macs}
        about = {"creation": self.bare.creation, "images": self._counts(), "paths_from": self.folder.way_here()}
        return describe_run(self.accelerator) | notes_of(self.task) | about | costs

    def _counts(self) -> list[int]:
        """How many images there are to train on, and to judge by."""
        return [len(self.task.train_images), len(self.task.eval_images)]

    def _loaders(self) -> tuple[Any, Any]:
        """Batches to train on, which Accelerate will share out, and this process's share of those to judge by."""
        task, size = self.task, self.recipe.batch_size
        usual: dict[str, Any] = {
            "workers": self.recipe.workers,
            "pin_memory": self.accelerator.device.type == "cuda",
        }
        share = {"rank": self.accelerator.process_index, "world_size": self.accelerator.num_processes}
        alone = 1 if task.judged_alone else size
        judged = create_loader(task.eval_images, batch_size=alone, collate=task.eval_collate, **usual, **share)
        return create_loader(self.view, batch_size=size, collate=task.collate, drop_last=True, **usual), judged

    def _progress(self, epoch: int) -> Iterable[Any]:
        """The batches of this epoch, behind a bar where there is a terminal to draw it on."""
        hidden = not (self.is_main and sys.stderr.isatty())
        return tqdm(self.loader, desc=f"epoch {epoch + 1}/{self.num_epochs}", leave=False, disable=hidden)
