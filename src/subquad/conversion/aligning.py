"""Alignment: each converted attention layer fitted to the one that it replaced, block by block, without labels.

The teacher runs as it is. At each of its attention layers the converted one gets the same tokens, and the relative
error of its answer, ‖y − t‖² / ‖t‖² of an image, is its loss. Blocks do not see each other: memory is that of one
block, and any of them can be aligned alone. Each ends in the best state that held-out images found it in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subquad.attention import traits_of
from subquad.conversion.best_states import Part
from subquad.conversion.converted_attention import ConvertedAttention
from subquad.conversion.fit_schedule import schedule_of
from subquad.conversion.fitting_loop import Goal, Progress, fit
from subquad.conversion.replacing import check_teacher, conversion_of, converted_layers, restore
from subquad.conversion.unlabelled_images import Taking, as_batches, fed
from subquad.copying import copied
from subquad.errors import SubquadError, shown
from subquad.inference import in_evaluation
from subquad.weights.files import within_wrappers


@dataclass(frozen=True)
class Alignment:
    """What `align` did.

    Attributes:
        before, after: relative errors ‖y − t‖² / ‖t‖² of each block, by its number, on the same images, which are
            not those of the updates; `after` is never above `before`.
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


@torch.inference_mode(False)
@torch.enable_grad()
def align(
    student: nn.Module,
    images: Any,
    *,
    teacher: nn.Module | None = None,
    blocks: Sequence[int] | None = None,
    batch_size: int = 64,
    seed: int = 0,
    config: Taking | None = None,
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
        config: how the network takes pictures, where `images` are those: an InputConfig, or a processor of
            transformers, whose patches the network is handed.
        state_file: where the state is kept: called again with it, the fit goes on.
        schedule: fields of `Schedule`: `updates=500`, `lr=3e-4`, `time_budget=600`, …

    Raises:
        SubquadError: something is not converted, not known or not finite, in one line.
    """
    plan = schedule_of(schedule, lr=1e-3)
    student, teacher = within_wrappers(student), within_wrappers(teacher)
    layers = chosen_layers(student, blocks)
    teacher = teacher_of(student) if teacher is None else teacher
    batches = as_batches(images, batch_size=batch_size, seed=seed, config=config, network=teacher)
    taps = Taps(student, teacher, layers)
    goal = Goal("aligning", taps.parts, taps.step, begin=taps.choose_start_values)
    progress = fit(goal, student, teacher, batches, plan, state_file=state_file)
    return Alignment(_by_number(progress.first), _by_number(progress.last), progress)


def teacher_of(student: nn.Module) -> nn.Module:
    """The network that a student was made of, a copy.

    Raises:
        SubquadError: the student is not converted, or was trained in other parts since.
    """
    again = copied(student, "give `teacher`, or take it away")
    try:
        return restore(again)
    except SubquadError as error:
        conversion_of(student)
        raise SubquadError(f"the teacher can't be made of its student, give `teacher`: {error}") from None


def relative_errors(
    student: nn.Module, teacher: nn.Module, images: Tensor, blocks: Sequence[int] | None = None
) -> dict[int, float]:
    """‖y − t‖² / ‖t‖² of each converted layer's answer to the teacher's tokens, by the number of its block."""
    student, teacher = within_wrappers(student), within_wrappers(teacher)
    taps = Taps(student, teacher, chosen_layers(student, blocks))
    with in_evaluation(teacher), in_evaluation(student), torch.no_grad():
        return _by_number(taps.step(images))


def chosen_layers(student: nn.Module, blocks: Sequence[int] | None) -> dict[int, ConvertedAttention]:
    """The converted layers of some blocks, or of all.

    Raises:
        SubquadError: one of these blocks is not converted.
    """
    layers = converted_layers(student)
    if blocks is None:
        return layers
    try:
        # whole numbers of any type
        numbers = [index(number) for number in blocks]
    except TypeError:
        numbers = []
    wrong = [number for number in numbers if number not in layers]
    if wrong or not numbers:
        which = f"; block {wrong[0]} is not converted" if wrong else ""
        some = ", ".join(map(str, layers))
        raise SubquadError(f"blocks are some of {some}, at least one, got {shown(blocks)}{which}")
    return {number: layers[number] for number in numbers}


class Taps:
    """Lets converted layers answer the tokens that the teacher's layers get, as the teacher comes by."""

    def __init__(self, student: nn.Module, teacher: nn.Module, layers: dict[int, ConvertedAttention]):
        check_teacher(student, teacher)
        self.teacher, self.layers = teacher, layers
        conversion = conversion_of(student)
        self.paths = {number: conversion.paths[number] for number in layers}
        self.embeddings = [teacher.get_submodule(path) for path in (conversion.embedding, *conversion.resizing)]
        self._figures: dict[str, float] = {}

    def step(self, images: Any) -> dict[str, float]:
        """Relative errors on a batch by the names of blocks; with their gradients, where gradients are on."""
        self._figures = {}
        with_gradients = torch.is_grad_enabled()
        recorder = next(iter(self.layers.values())).recorder
        handles = [recorder.hook_onto(embedding) for embedding in self.embeddings]
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

    @property
    def parts(self) -> list[Part]:
        """The parameters of each layer, and the name of its error."""
        return [Part(layer.trainable(), (f"block {number}",)) for number, layer in self.layers.items()]

    @torch.no_grad()
    def choose_start_values(self, batches: Sequence[Any]) -> None:
        """Set the parameters that a mechanism names in `start_values` to what answers best; as they are counts, too."""
        inners = {number: layer.inner for number, layer in self.layers.items()}
        names = {name for inner in inners.values() for name in traits_of(inner).start_values}
        for name in sorted(names):
            concerned = {n: inner for n, inner in inners.items() if name in traits_of(inner).start_values}
            tried = {n: list(traits_of(inner).start_values[name]) for n, inner in concerned.items()}
            kept = {n: inner.get_parameter(name).clone() for n, inner in concerned.items()}
            least = self.errors(batches)
            for place in range(max(map(len, tried.values()))):
                for number, inner in concerned.items():
                    inner.get_parameter(name).fill_(tried[number][min(place, len(tried[number]) - 1)])
                for number, error in self.errors(batches).items():
                    if number in concerned and error < least[number]:
                        least[number], kept[number] = error, concerned[number].get_parameter(name).clone()
            for number, inner in concerned.items():
                inner.get_parameter(name).copy_(kept[number])

    def errors(self, batches: Sequence[Any]) -> dict[int, float]:
        """Relative errors by the numbers of blocks, the means over batches."""
        rows = [_by_number(self.step(batch)) for batch in batches]
        return {number: sum(row[number] for row in rows) / len(rows) for number in rows[0]}

    def _hook(self, number: int, with_gradients: bool) -> Any:
        layer = self.layers[number]

        def answer(module: nn.Module, arguments: Any, keywords: Any, target: Any) -> None:
            with torch.set_grad_enabled(with_gradients):
                # behind its tokens an eager layer of transformers gives the weights that it formed
                pairs = zip(tensors_of(layer(*arguments, **keywords)), tensors_of(target), strict=False)
                errors = [relative_error(one, other, tokens_there(layer, other)) for one, other in pairs]
                error = torch.stack(errors).mean()
                if with_gradients:
                    error.backward()
            # a layer of windows may be called more than once
            self._figures[f"block {number}"] = float(error.detach())

        return answer


def relative_error(answer: Tensor, target: Tensor, there: Tensor | None = None) -> Tensor:
    """The mean over images of ‖y − t‖² / ‖t‖²; of tokens (b, n, c) those alone that are `there` (b, n)."""
    if there is not None:
        answer, target = (one.masked_fill(~there.unsqueeze(-1), 0) for one in (answer, target))
    # an image may have one number, (b,)
    answer, target = (one.float().unsqueeze(-1).flatten(1) for one in (answer, target.detach()))
    return ((answer - target).square().sum(1) / target.square().sum(1).clamp(min=1e-12)).mean()


def tokens_there(network: nn.Module, answer: Tensor) -> Tensor | None:
    """(b, n), True for the tokens of an answer (b, n, c) that do not just fill up an image; None where none does.

    Args:
        network: a converted network, or layer, that was called last with these images.
        answer: its own or its teacher's.
    """
    layer = next((one for one in network.modules() if isinstance(one, ConvertedAttention)), None)
    there = None if layer is None else layer.recorder.present
    return there if there is not None and answer.dim() == 3 and answer.shape[:2] == there.shape else None


def tensors_of(answered: Any) -> list[Tensor]:
    """The tokens of an answer: one tensor, or those of a pair that are there, as of image and text."""
    return [answered] if isinstance(answered, Tensor) else [one for one in answered if isinstance(one, Tensor)]


def _by_number(figures: dict[str, float]) -> dict[int, float]:
    return {int(name.removeprefix("block ")): figure for name, figure in figures.items()}
