"""What a run says about itself: lines while it trains, facts and summary in its folder."""

import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from subquad.errors import SubquadError
from subquad.models import attention_label
from subquad.text import si
from subquad.training.recipe import Recipe
from subquad.training.run_folder import Row
from subquad.training.setup import Setup

Log = Callable[[str], None]


def silent(line: str) -> None:
    """The log of a caller who gave none."""


def describe_setup(recipe: Recipe, setup: Setup, params: int, macs: int) -> str:
    """What is trained on what, in one line."""
    images = f"{len(setup.train_images)}+{len(setup.eval_images)} images"
    attention = attention_label(recipe.model, recipe.attention)
    return f"{recipe.model}, {attention}: {si(params)} parameters, {si(macs)} MACs; {recipe.data}, {images}"


def epoch_line(row: Row, num_epochs: int) -> str:
    """One epoch in one line of a terminal."""
    top1 = f"top-1 {row['eval_top1']:.2f}"
    average = f" (EMA {row['ema_top1']:.2f})" if "ema_top1" in row else ""
    return (
        f"epoch {row['epoch'] + 1:.0f}/{num_epochs}  loss {row['train_loss']:.3f}  {top1}{average}"
        f"  {row['images_per_second']:.0f} img/s  {row['epoch_seconds']:.1f} s"
    )


def describe_run(accelerator: Any) -> dict[str, Any]:
    """How and where a run is made."""
    device = f"cpu ({platform.machine()}, {os.cpu_count()} cores)"
    if accelerator.device.type == "cuda":
        device = torch.cuda.get_device_name(accelerator.device)
    return {
        "command": shlex.join(sys.argv),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("subquad", "torch", "timm", "accelerate")},
        "device": device,
        "processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
    }


def summarise(rows: list[Row], best_top1: float, best_epoch: int, params: int, macs: int) -> dict[str, Any]:
    """A finished run in a few numbers."""
    return {
        "status": "finished",
        "epochs": len(rows),
        "best_top1": best_top1,
        "best_epoch": best_epoch,
        "last_top1": rows[-1]["eval_top1"],
        "eval_loss": rows[-1]["eval_loss"],
        "params": params,
        "macs": macs,
        "train_seconds": sum(row["epoch_seconds"] for row in rows),
        # the median: the first epoch warms up, and a machine is not always one's own
        "images_per_second": statistics.median(row["images_per_second"] for row in rows),
        "peak_memory_mb": max(row["peak_memory_mb"] for row in rows),
    }


def make_writer(folder: Path, first_epoch: int) -> Any:
    """TensorBoard's writer; what an interrupted run wrote of later epochs is hidden."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SubquadError("training needs tensorboard: pip install 'subquad[train]'") from error
    return SummaryWriter(str(folder), purge_step=first_epoch)
