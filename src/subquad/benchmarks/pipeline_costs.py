"""A whole pipeline with its attention untouched, through agents and on merged tokens: time, memory and difference."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from subquad.benchmarks.memory import peak_memory_mb
from subquad.diffusion import apply_agent_attention, apply_token_merging, remove_agent_attention
from subquad.diffusion.folder import ImageFolder, ImageRow, check_folder
from subquad.diffusion.pipelines import Sampling, check_asked, make_image
from subquad.diffusion.settings import agent_phases, merging_phase
from subquad.errors import unknown_name
from subquad.holding import holding
from subquad.text import columns
from subquad.timing import now

METHODS: dict[str, Callable[..., Any]] = {
    "softmax": lambda pipe: None,
    "agent": apply_agent_attention,
    "tome": apply_token_merging,
}
"""What can be done to a pipeline, by name; the first is the one that others are compared with."""


_PATCHING = ("max_downsample", "random", "reuse")
"""What is set of a patch beside its phases."""


@dataclass(frozen=True)
class MethodRow:
    """What a method comes to over all images: medians, and means of the differences; see ImageRow."""

    method: str
    seconds: float
    gain: float | None
    peak_mb: float | None
    psnr: float | None
    difference: float | None


def check_images(folder: Path, methods: dict[str, dict[str, Any]]) -> None:
    """Raise where images can't be made so whatever the pipeline, which may have to be fetched."""
    check_folder(folder)
    for method, options in methods.items():
        if method not in METHODS:
            raise unknown_name("method", method, METHODS)
        own = {name: value for name, value in options.items() if name not in _PATCHING}
        if method != "softmax":
            (agent_phases if method == "agent" else merging_phase)(**own)


def make_images(
    pipe: Any,
    prompts: Sequence[str],
    folder: Path,
    *,
    methods: dict[str, dict[str, Any]],
    sampling: Sampling | None = None,
    seeds: Sequence[int] = (0,),
    about: dict[str, Any] | None = None,
    memory: bool = True,
    log: Callable[[str], None] = lambda line: None,
) -> tuple[list[ImageRow], list[MethodRow]]:
    """Make an image of each prompt, seed and method; the methods take turns.

    Args:
        pipe: a pipeline of diffusers.
        prompts: what to show.
        folder: where to write; what it has of the same settings is kept.
        methods: names of METHODS, and what they are set to.
        sampling: how images are made.
        seeds: of the noises, for each prompt.
        about: what else decides on the images, such as the model: written to the folder, and held against it.
        memory: whether to measure the most memory that two steps hold beyond the pipeline's own.
        log: hears of every image.

    Raises:
        SubquadError: the folder has images of other settings, or the pipeline does not take what is given.
    """
    check_images(folder, methods)
    with holding(folder):
        for prompt in prompts:
            check_asked(pipe, prompt, sampling or Sampling())
        for method, options in methods.items():
            # what can't be is said before the images of the methods in front of it
            METHODS[method](pipe, **options)
            remove_agent_attention(pipe)
        return _make_images(pipe, prompts, folder, methods, sampling or Sampling(), seeds, about or {}, memory, log)


def _make_images(
    pipe: Any,
    prompts: Sequence[str],
    folder: Path,
    methods: dict[str, dict[str, Any]],
    sampling: Sampling,
    seeds: Sequence[int],
    about: dict[str, Any],
    memory: bool,
    log: Callable[[str], None],
) -> tuple[list[ImageRow], list[MethodRow]]:
    kept = ImageFolder(folder, {"methods": methods, "sampling": asdict(sampling), **about})
    # what is named twice is made once
    wanted = list(dict.fromkeys((prompt, seed) for prompt in prompts for seed in seeds))
    for number, (prompt, seed) in enumerate(wanted, 1):
        first: Image.Image | None = None
        for method, options in methods.items():
            row = kept.find(prompt, seed, method)
            if row is None:
                if memory and method not in kept.peaks:
                    kept.keep_peak(method, _peak_mb(pipe, method, options, prompt, sampling))
                    log(f"{method}: {kept.peaks[method]:.0f} MB at most beyond what the pipeline holds")
                image, seconds = _timed(pipe, method, options, prompt, seed, sampling)
                row = kept.add(image, first, ImageRow(prompt, seed, method, "", seconds))
                log(f"{number} of {len(wanted)}, {method}: {seconds:.1f} s, {row.file}")
            first = first or kept.image(row)
    rows = [row for row in kept.rows if (row.prompt, row.seed) in wanted and row.method in methods]
    return rows, _summary(rows, list(methods), kept.peaks)


def _timed(
    pipe: Any, method: str, options: dict[str, Any], prompt: str, seed: int, sampling: Sampling
) -> tuple[Image.Image, float]:
    METHODS[method](pipe, **options)
    try:
        device = torch.device(pipe.device)
        start = now(device)
        image = make_image(pipe, prompt, seed, sampling)
        return image, now(device) - start
    finally:
        remove_agent_attention(pipe)


def _peak_mb(pipe: Any, method: str, options: dict[str, Any], prompt: str, sampling: Sampling) -> float:
    """Measure two steps: what a step holds does not depend on how many there are. It also warms up."""
    few = Sampling(**{**vars(sampling), "steps": 2})
    METHODS[method](pipe, **options)
    bar = getattr(pipe, "_progress_bar_config", {})
    pipe.set_progress_bar_config(disable=True)
    try:
        return peak_memory_mb(lambda: make_image(pipe, prompt, 0, few), torch.device(pipe.device))
    finally:
        pipe.set_progress_bar_config(**bar)
        remove_agent_attention(pipe)


def _summary(rows: Sequence[ImageRow], methods: Sequence[str], peaks: dict[str, float]) -> list[MethodRow]:
    times = {(row.prompt, row.seed, row.method): row.seconds for row in rows}
    summaries = []
    for method in methods:
        own = [row for row in rows if row.method == method]
        ratios = [times[row.prompt, row.seed, methods[0]] / row.seconds for row in own]
        measured = [row for row in own if row.difference is not None]
        psnrs = [row.psnr for row in measured if row.psnr is not None]
        differences = [row.difference for row in measured if row.difference is not None]
        summaries.append(
            MethodRow(
                method=method,
                seconds=statistics.median(row.seconds for row in own),
                gain=statistics.median(ratios) if method != methods[0] else None,
                peak_mb=peaks.get(method),
                psnr=statistics.fmean(psnrs) if psnrs else None,
                difference=statistics.fmean(differences) if differences else None,
            )
        )
    return summaries


def images_table(rows: Sequence[MethodRow]) -> str:
    """The methods for a terminal."""

    def text(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    lines = [["method", "s/image", "gain", "peak MB", "PSNR dB", "difference"]]
    for row in rows:
        cells = [text(row.seconds, 2), text(row.gain, 2), text(row.peak_mb, 0), text(row.psnr, 1)]
        lines.append([row.method, *cells, text(row.difference, 1)])
    return columns(lines)
