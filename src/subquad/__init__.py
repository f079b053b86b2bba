"""subquad: sub-quadratic attention for vision.

import subquad

model = subquad.create_model("agent_swin_tiny")
model = subquad.create_model("deit_tiny", attention="agent", img_size=224, num_agents=49)
"""

from subquad.starting import end_by_signals, is_command

# PyTorch takes seconds. The command `subquad`, also as `python -m subquad`, imports it when it looks at its arguments,
# and can be interrupted meanwhile; everybody else has all of it, the models' names in timm too, from here on.
_LATER = is_command()
if _LATER:
    end_by_signals()

import importlib.util  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from subquad.errors import SubquadError  # noqa: E402

if TYPE_CHECKING:
    from subquad import analysis as analysis
    from subquad import api as api
    from subquad import benchmarks as benchmarks
    from subquad import conversion as conversion
    from subquad import data as data
    from subquad import diffusion as diffusion
    from subquad import exports as exports
    from subquad import large as large
    from subquad import runs as runs
    from subquad import tasks as tasks
    from subquad.advice import advise
    from subquad.api import analyze, bench, compare, evaluate, export, predict, report, stream, train, tune
    from subquad.attention import ATTENTION, Traits, register_attention
    from subquad.conversion import convert, load_converted, register_family, restore
    from subquad.grid import TokenGrid
    from subquad.inference import optimize
    from subquad.keeping_memory import keep_memory
    from subquad.kernels import BACKENDS, use_backend
    from subquad.large import band_rows, chunk_blocks, chunk_mlps, split_tokens
    from subquad.models import (
        convert_checkpoint,
        create_model,
        join_frames,
        load_checkpoint,
        restore_model,
        save_weights,
    )
    from subquad.runs import open_trained
    from subquad.tasks import register_task

__version__ = "0.1.0"

__all__ = [
    "ATTENTION",
    "BACKENDS",
    "SubquadError",
    "TokenGrid",
    "Traits",
    "advise",
    "analyze",
    "band_rows",
    "bench",
    "chunk_blocks",
    "chunk_mlps",
    "compare",
    "convert",
    "convert_checkpoint",
    "create_model",
    "evaluate",
    "export",
    "join_frames",
    "keep_memory",
    "load_checkpoint",
    "load_converted",
    "open_trained",
    "optimize",
    "predict",
    "register_attention",
    "register_family",
    "register_task",
    "report",
    "restore",
    "restore_model",
    "save_weights",
    "split_tokens",
    "stream",
    "train",
    "tune",
    "use_backend",
]

_PLACES = {
    "attention": ("ATTENTION", "Traits", "register_attention"),
    "kernels": ("BACKENDS", "use_backend"),
    "grid": ("TokenGrid",),
    "inference": ("optimize",),
    "keeping_memory": ("keep_memory",),
    "models": ("convert_checkpoint", "create_model", "join_frames", "load_checkpoint", "restore_model", "save_weights"),
}
"""Which module each name comes from."""

_WHEN_ASKED_FOR = {
    "advice": ("advise",),
    "api": ("analyze", "bench", "compare", "evaluate", "export", "predict", "report", "stream", "train", "tune"),
    "conversion": ("convert", "load_converted", "register_family", "restore"),
    "large": ("band_rows", "chunk_blocks", "chunk_mlps", "split_tokens"),
    "runs": ("open_trained",),
    "tasks": ("register_task",),
}
"""The same of modules that take time to import, and that a user of networks alone does without."""


def __getattr__(name: str) -> Any:
    for place, names in (_PLACES | _WHEN_ASKED_FOR).items():
        if name in names:
            return getattr(importlib.import_module(f"subquad.{place}"), name)
    # a module of the library, as in subquad.exports.open_exported
    if not name.startswith("_") and importlib.util.find_spec(f"subquad.{name}") is not None:
        return importlib.import_module(f"subquad.{name}")
    raise AttributeError(f"module 'subquad' has no attribute '{name}'")


def __dir__() -> list[str]:
    """What is here, and what is loaded when it is asked for."""
    return sorted({*globals(), *__all__})


if not _LATER:
    globals().update({name: __getattr__(name) for names in _PLACES.values() for name in names})
