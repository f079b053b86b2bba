"""Alignment: each converted attention layer fitted to the one that it replaced, block by block, without labels.

The teacher runs as it is. At each of its attention layers the converted one gets the same tokens, and the relative
error of its answer, ‖y − t‖² / ‖t‖² of an image, is its loss. Blocks do not see each other: memory is that of one
block, and any of them can be aligned alone.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subquad.attention import traits_of
from subquad.conversion.converted_attention import ConvertedAttention
from subquad.conversion.fitting_loop import Progress, fit, schedule_of
from subquad.conversion.replacing import conversion_of, converted_layers, restore
from subquad.conversion.unlabelled_images import Batches, as_batches, fed, on_device
from subquad.data import InputConfig
from subquad.errors import SubquadError


@dataclass(frozen=True)
class Alignment:
    """What `align` did.

    Attributes:
        before, after: relative errors ‖y − t‖² / ‖t‖² of each block, by its number, on the first and on the last
            images.
        progress: updates, seconds, and the errors on the way.
    """

    before: dict[int, float]
    after: dict[int, float]
    progress: Progress

    @property
    def text(self) -> str:
        """A line for each block."""
        lines = [f"block {number}: error {self.before[number]:.4f} → {self.after[number]:.4f}" for number in self.after]
        return "\n".join([*lines, f"{self.progress.updates} updates in {self.progress.seconds:.0f} s"])


def align(
    student: nn.Module,
    images: Any,
    *,
    teacher: nn.Module | None = None,
    blocks: Sequence[int] | None = None,
    batch_size: int = 64,
    seed: int = 0,
    config: InputConfig | None = None,
    state_file: Path | str | None = None,
    **schedule: Any,
) -> Alignment:
    """Fit the converted attention layers of `student`, in place, to those that they stand for.

    Args:
        student: of `convert`.
        images: see `as_batches`: a tensor, a data set, a folder, or a function of an update's number.
        teacher: the network before it was converted; made of the student where it is left out.
        blocks: numbers of the blocks to fit; all converted ones if left out.
        batch_size: images of an update.
        seed: of the order of the images.
        config: how the network takes pictures, where `images` are those.
        state_file: where the state is kept: called again with it, the fit goes on.
        schedule: fields of `Schedule`: `updates=500`, `lr=3e-4`, `time_budget=600`, …

    Raises:
        SubquadError: something is not converted, not known or not finite, in one line.
    """
    plan = schedule_of(schedule, lr=1e-3)
    layers = chosen_layers(student, blocks)
    if teacher is None:
        teacher = restore(deepcopy(student))
    batches = as_batches(images, batch_size=batch_size, seed=seed, config=config)
    modes = [(module, module.training) for module in student.modules()]
    state = None if state_file is None else Path(state_file)
    try:
        student.eval()
        teacher.eval()
        if state is None or not state.exists():
            choose_start_values(student, teacher, layers, batches)
        taps = Taps(student, teacher, layers)
        groups = [[one for one in layer.parameters() if one.requires_grad] for layer in layers.values()]
        progress = fit(taps.step, groups, student, batches, plan, what="aligning", state_file=state)
        return Alignment(_by_number(progress.first), _by_number(progress.last), progress)
    finally:
        for module, training in modes:
            module.training = training


def relative_errors(
    student: nn.Module, teacher: nn.Module, images: Tensor, blocks: Sequence[int] | None = None
) -> dict[int, float]:
    """‖y − t‖² / ‖t‖² of each converted layer's answer to the teacher's tokens, by the number of its block."""
    taps = Taps(student, teacher, chosen_layers(student, blocks))
    with torch.no_grad():
        return _by_number(taps.step(images))


def chosen_layers(student: nn.Module, blocks: Sequence[int] | None) -> dict[int, ConvertedAttention]:
    """The converted layers of some blocks, or of all.

    Raises:
        SubquadError: one of these blocks is not converted.
    """
    layers = converted_layers(student)
    if blocks is None:
        return layers
    if wrong := [number for number in blocks if number not in layers]:
        raise SubquadError(f"block {wrong[0]} is not converted; converted are {', '.join(map(str, layers))}")
    return {number: layers[number] for number in blocks}


class Taps:
    """Lets converted layers answer the tokens that the teacher's layers get, as the teacher comes by."""

    def __init__(self, student: nn.Module, teacher: nn.Module, layers: dict[int, ConvertedAttention]):
        self.teacher, self.layers = teacher, layers
        conversion = conversion_of(student)
        self.paths = {number: conversion.paths[number] for number in layers}
        self.embedding = teacher.get_submodule(conversion.embedding)
        self._figures: dict[str, float] = {}

    def step(self, images: Any) -> dict[str, float]:
        """Relative errors on a batch by the names of blocks; with their gradients, where gradients are on."""
        self._figures = {}
        with_gradients = torch.is_grad_enabled()
        recorder = next(iter(self.layers.values())).recorder
        handles = [self.embedding.register_forward_hook(recorder)]
        for number, path in self.paths.items():
            module = self.teacher.get_submodule(path)
            handles.append(module.register_forward_hook(self._hook(number, with_gradients), with_kwargs=True))
        try:
            with torch.no_grad():
                fed(self.teacher, images)
        finally:
            for handle in handles:
                handle.remove()
        return self._figures

    def _hook(self, number: int, with_gradients: bool) -> Any:
        layer = self.layers[number]

        def answer(module: nn.Module, arguments: Any, keywords: Any, target: Any) -> None:
            with torch.set_grad_enabled(with_gradients):
                pairs = zip(tensors_of(layer(*arguments, **keywords)), tensors_of(target), strict=True)
                error = torch.stack([relative_error(*pair) for pair in pairs]).mean()
                if with_gradients:
                    error.backward()
            # a layer of windows may be called more than once
            self._figures[f"block {number}"] = float(error.detach())

        return answer


def relative_error(answer: Tensor, target: Tensor) -> Tensor:
    """The mean over images of ‖y − t‖² / ‖t‖²."""
    answer, target = answer.float().flatten(1), target.detach().float().flatten(1)
    return ((answer - target).square().sum(1) / target.square().sum(1).clamp(min=1e-12)).mean()


def tensors_of(answered: Any) -> list[Tensor]:
    """The tokens of an answer: one tensor, or those of a pair that are there, as of image and text."""
    return [answered] if isinstance(answered, Tensor) else [one for one in answered if isinstance(one, Tensor)]


@torch.no_grad()
def choose_start_values(
    student: nn.Module, teacher: nn.Module, layers: dict[int, ConvertedAttention], batches: Batches
) -> None:
    """Set the parameters that a mechanism names in `start_values` to what answers best on the first images."""
    images = on_device(batches(0), next(student.parameters()).device)
    names = sorted({name for layer in layers.values() for name in traits_of(layer.inner).start_values})
    taps = Taps(student, teacher, layers)
    for name in names:
        concerned = {n: layer for n, layer in layers.items() if name in traits_of(layer.inner).start_values}
        best: dict[int, tuple[float, float]] = {}
        for place in range(max(len(traits_of(layer.inner).start_values[name]) for layer in concerned.values())):
            tried = {}
            for number, layer in concerned.items():
                values = traits_of(layer.inner).start_values[name]
                tried[number] = values[min(place, len(values) - 1)]
                layer.inner.get_parameter(name).fill_(tried[number])
            errors = _by_number(taps.step(images))
            for number, value in tried.items():
                best[number] = min(best.get(number, (float("inf"), value)), (errors[number], value))
        for number, layer in concerned.items():
            layer.inner.get_parameter(name).fill_(best[number][1])


def _by_number(figures: dict[str, float]) -> dict[int, float]:
    return {int(name.removeprefix("block ")): figure for name, figure in figures.items()}
