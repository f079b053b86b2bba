"""What a run says about itself: lines while it trains, facts and summary in its folder."""

import os
import platform
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from subquad.errors import SubquadError
from subquad.instructions import slow_in_bf16
from subquad.models import attention_label
from subquad.starting import command_line
from subquad.tasks.common_recipe import CommonRecipe
from subquad.tasks.task import Row, Task
from subquad.text import counted, si, speed_text

Log = Callable[[str], None]


def silent(line: str) -> None:
    """The log of a caller who gave none."""


def describe_setup(task: Task, params: int, macs: int) -> str:
    """What is trained on what, in one line."""
    recipe = task.recipe
    network = task.network_name(recipe.to_dict())
    attention = attention_label(network, recipe.attention)
    return f"{network}, {attention}: {si(params)} parameters, {si(macs)} MACs; {task.describe()}"


def describe_schedule(task: Task, epochs: int, updates: int, total_batch: int, lr: float) -> str:
    """How long and how fast, in one line."""
    recipe, example = task.recipe, task.examples.removesuffix("s")
    long = f"{counted(epochs, 'epoch')} of {counted(updates, 'update')} of {counted(total_batch, example)}"
    warmup = recipe.warmup_epochs * updates if recipe.warmup_updates is None else recipe.warmup_updates
    never = (
        f", which a warm-up of {counted(warmup, 'update')} does not reach" if warmup >= recipe.epochs * updates else ""
    )
    return f"{long}, {recipe.opt} at {lr:g}{never}"


def describe_slow_precision(recipe: CommonRecipe, device: torch.device) -> str | None:
    """What makes every step slow for nothing, in one line, if it does."""
    if recipe.amp != "bf16" or (slower := slow_in_bf16(device)) is None:
        return None
    # recipes of ours ask for it, too, which nobody can leave out
    return f"--amp bf16 {slower}: leave it out, or turn it off with --amp '' where the recipe says it"


def epoch_line(task: Task, row: Row, num_epochs: int) -> str:
    """One epoch in one line of a terminal."""
    seen = "img" if task.examples == "images" else task.examples
    return (
        f"epoch {row['epoch'] + 1:.0f}/{num_epochs}  loss {row['train_loss']:.3f}  {task.words(row)}"
        f"  {speed_text(row['images_per_second'])} {seen}/s  {row['epoch_seconds']:.1f} s"
    )


def describe_run(accelerator: Any) -> dict[str, Any]:
    """How and where a run is made."""
    from subquad import __version__

    device = f"cpu ({platform.machine()}, {os.cpu_count()} cores)"
    if accelerator.device.type == "cuda":
        device = torch.cuda.get_device_name(accelerator.device)
    return {
        "command": command_line(),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "subquad": __version__}
        | {name: version(name) for name in ("torch", "timm", "accelerate")},
        "device": device,
        "processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
    }


def summarise(rows: list[Row], metric: str, best: float, best_epoch: int, params: int, macs: int) -> dict[str, Any]:
    """A finished run in a few numbers."""
    loss = {"eval_loss": rows[-1]["eval_loss"]} if "eval_loss" in rows[-1] else {}
    return {
        "status": "finished",
        "epochs": len(rows),
        f"best_{metric}": best,
        "best_epoch": best_epoch,
        f"last_{metric}": rows[-1][f"eval_{metric}"],
        **loss,
        "params": params,
        "macs": macs,
        "train_seconds": sum(row["epoch_seconds"] for row in rows),
        # the median: the first epoch warms up, and a machine is not always one's own
        "images_per_second": statistics.median(row["images_per_second"] for row in rows),
        "peak_memory_mb": max(row["peak_memory_mb"] for row in rows),
    }


def summary_numbers(metric: str) -> tuple[str, ...]:
    """What a summary must hold to stand for a finished run."""
    costs = ("params", "macs", "train_seconds", "images_per_second", "peak_memory_mb")
    return ("epochs", "best_epoch", f"best_{metric}", f"last_{metric}", *costs)


@contextmanager
def event_writer(folder: Path, first_epoch: int) -> Iterator[Any]:
    """TensorBoard's writer; what an interrupted run wrote of later epochs is hidden.

    What its thread can't write is raised by the next row, and shows no trace of its own.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SubquadError("training needs tensorboard: pip install 'subquad[train]'") from error
    shown = threading.excepthook

    def quiet(fault: threading.ExceptHookArgs) -> None:
        if not (isinstance(fault.exc_value, OSError) and type(fault.thread).__name__ == "_AsyncWriterThread"):
            shown(fault)

    threading.excepthook = quiet
    try:
        writer = SummaryWriter(str(folder), purge_step=first_epoch)
        try:
            yield writer
        except BaseException:
            # what ended the run is said, and not what follows from it
            with suppress(OSError):
                writer.close()
            raise
        writer.close()
    finally:
        threading.excepthook = shown


def add_row(writer: Any, row: Row) -> None:
    """Show the metrics of an epoch in TensorBoard."""
    for name, value in row.items():
        writer.add_scalar(name, value, int(row["epoch"]))
    writer.flush()
