"""Which blocks to convert: what each costs in the features, and the networks between all softmax and none.

An aligned student holds both layers of each block. A hybrid is the student with the old ones in some blocks.
"""

import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from subquad.conversion.aligning import chosen_layers, relative_error, tokens_there
from subquad.conversion.distilling import agreeing, answers_of, judged_by
from subquad.conversion.replacing import check_teacher, conversion_of, converted_layers, exchange, old_layer, put
from subquad.conversion.unlabelled_images import num_images
from subquad.copying import copied
from subquad.errors import SubquadError
from subquad.inference import in_evaluation
from subquad.models.stated_inputs import image_channels
from subquad.ranges import check_repeats
from subquad.text import one_line
from subquad.timing import interleaved_ms
from subquad.weights.files import within_wrappers


@dataclass(frozen=True)
class BlockDamage:
    """What converting one block alone does.

    Attributes:
        block: its number.
        damage: ‖y − t‖² / ‖t‖² of the last features, the mean over images.
        agreement: share of images whose most likely class stays; None for networks without logits.
    """

    block: int
    damage: float
    agreement: float | None


@dataclass(frozen=True)
class HybridRow:
    """A network with some blocks converted: those that cost least first.

    Attributes:
        converted: numbers of the converted blocks.
        damage, agreement: as in `BlockDamage`, of the network as a whole.
        ms: the median of a pass over one image of the size that was asked for; None where none was.
    """

    converted: tuple[int, ...]
    damage: float
    agreement: float | None
    ms: float | None = None


@contextmanager
def converting_only(student: nn.Module, blocks: Collection[int]) -> Iterator[nn.Module]:
    """The student with its old attention layers in all but some blocks, for the time of the context."""
    away = [layer for number, layer in converted_layers(student).items() if number not in set(blocks)]
    pairs = [(layer, old_layer(layer)) for layer in away]
    parents = list(student.modules())
    try:
        for layer, old in pairs:
            exchange(parents, layer, old)
        yield student
    finally:
        for layer, old in pairs:
            exchange(parents, old, layer)


def hybrid(student: nn.Module, blocks: Sequence[int]) -> nn.Module:
    """A copy of a student in which only some blocks are converted.

    Raises:
        SubquadError: one of them is not converted in the student, or there are none.
    """
    chosen = chosen_layers(student, blocks)
    mixed = copied(student)
    conversion, modules = conversion_of(mixed), dict(mixed.named_modules())
    for number, layer in converted_layers(mixed).items():
        if number not in chosen:
            put(modules, conversion.paths[number], old_layer(layer))
    noted: Any = mixed
    noted.subquad_conversion = replace(
        conversion,
        attention={number: name for number, name in conversion.attention.items() if number in chosen},
        paths={number: path for number, path in conversion.paths.items() if number in chosen},
    )
    return mixed


def sensitivity(student: nn.Module, teacher: nn.Module, images: Iterable[Any]) -> list[BlockDamage]:
    """What each converted block does alone, in the order of the blocks; `images` are batches, see `Batches`."""
    student, teacher = within_wrappers(student), within_wrappers(teacher)
    check_teacher(student, teacher)
    images = _batches(images)
    rows = []
    with in_evaluation(teacher), in_evaluation(student):
        targets = [_answers(teacher, batch) for batch in images]
        for number in converted_layers(student):
            with converting_only(student, [number]):
                rows.append(BlockDamage(number, *_damage(student, images, targets)))
    return rows


def trade_off(
    student: nn.Module,
    teacher: nn.Module,
    images: Iterable[Any],
    damages: Sequence[BlockDamage],
    *,
    at: tuple[int, int] | None = None,
    repeats: int = 5,
) -> list[HybridRow]:
    """Hybrids from no converted block to all, those added first that cost least alone.

    Args:
        student: aligned.
        teacher: the network before it was converted.
        images: batches, see `Batches`.
        damages: of `sensitivity`.
        at: (height, width) of an image that all hybrids are timed on, in turns.
        repeats: passes of each.
    """
    check_repeats(repeats)
    order = [row.block for row in sorted(damages, key=lambda row: row.damage)]
    student, teacher = within_wrappers(student), within_wrappers(teacher)
    check_teacher(student, teacher)
    images = _batches(images)
    hybrids = [tuple(sorted(order[:count])) for count in range(len(order) + 1)]
    rows = []
    with in_evaluation(teacher), in_evaluation(student):
        targets = [_answers(teacher, batch) for batch in images]
        times = {} if at is None else _times(student, hybrids, at, repeats)
        for blocks in hybrids:
            with converting_only(student, blocks):
                rows.append(HybridRow(blocks, *_damage(student, images, targets), times.get(blocks)))
    return rows


def blocks_within(rows: Sequence[HybridRow], *, tolerance: float) -> tuple[int, ...]:
    """The most blocks whose damage is within `tolerance`.

    Raises:
        SubquadError: there are none.
    """
    some = [row for row in rows if row.converted]
    fitting = [row for row in some if row.damage <= tolerance]
    if not fitting:
        least = min(some, key=lambda row: row.damage)
        raise SubquadError(
            f"no block can be converted within a tolerance of {tolerance:g}: the least is {least.damage:.4f}, of "
            f"block {least.converted[0]}; align for longer, or allow more"
        )
    return max(fitting, key=lambda row: len(row.converted)).converted


def blocks_for(rows: Sequence[HybridRow], *, speedup: float) -> tuple[int, ...]:
    """The fewest blocks that make the network `speedup` times as fast as it was; rows of `trade_off` with times.

    Raises:
        SubquadError: all of them do not, or nothing was timed.
    """
    before = next((row.ms for row in rows if not row.converted), None)
    if before is None:
        raise SubquadError("these rows have no times: trade_off(…, at=(height, width)) measures them")
    gains = {row.converted: before / row.ms for row in rows if row.converted and row.ms}
    reached = [blocks for blocks, gain in gains.items() if gain >= speedup]
    if not reached:
        quickest = max(gains, key=lambda blocks: gains[blocks])
        raise SubquadError(
            f"converting {len(quickest)} of {len(rows) - 1} blocks, the quickest of all, makes the network "
            f"{gains[quickest]:.2f} times as fast at this size, not {speedup:g} times: `subquad advise` shows what is "
            "possible"
        )
    return min(reached, key=len)


def blocks_but(damages: Sequence[BlockDamage], *, keep: int) -> tuple[int, ...]:
    """All blocks but the `keep` that cost most.

    Raises:
        SubquadError: that leaves none.
    """
    if not 0 <= keep < len(damages):
        raise SubquadError(f"{len(damages)} blocks can be converted: keep from 0 to {len(damages) - 1}, got {keep}")
    order = sorted(damages, key=lambda row: row.damage)
    return tuple(sorted(row.block for row in order[: len(order) - keep]))


def _batches(images: Any) -> list[Any]:
    """Batches in a list: those of any iterable, or one that comes alone."""
    batches = [images] if isinstance(images, Tensor | Mapping) else list(images)
    if not batches:
        raise SubquadError("there are no images to measure blocks on: give batches of them")
    return batches


def _times(
    student: nn.Module, hybrids: Sequence[tuple[int, ...]], at: tuple[int, int], repeats: int
) -> dict[tuple[int, ...], float]:
    """Medians of passes over one image, in milliseconds."""
    parameter = next(student.parameters())
    image = torch.randn(1, image_channels(student), *at, device=parameter.device, dtype=parameter.dtype)

    def run() -> None:
        with torch.inference_mode():
            student(image)

    def only(blocks: tuple[int, ...]) -> AbstractContextManager[object]:
        return converting_only(student, blocks)

    try:
        for blocks in hybrids:
            with only(blocks):
                run()
    except Exception as error:
        # each library refuses sizes in its own way
        raise SubquadError(
            f"the network does not run on one image of {at[0]}×{at[1]} alone, to be timed: {one_line(error, 120)}"
        ) from None
    times = interleaved_ms(dict.fromkeys(hybrids, run), repeats, parameter.device, within=only)
    return {blocks: statistics.median(ms) for blocks, ms in times.items()}


def _answers(model: nn.Module, images: Any) -> dict[str, Tensor]:
    with torch.no_grad():
        return answers_of(model, images)


def _damage(
    student: nn.Module, images: Sequence[Any], targets: Sequence[dict[str, Tensor]]
) -> tuple[float, float | None]:
    damage, same, count = 0.0, 0.0, 0
    with_classes = all("logits" in target for target in targets)
    for batch, target in zip(images, targets, strict=True):
        answers = _answers(student, batch)
        features, images_here = judged_by(target), num_images(batch)
        there = tokens_there(student, target[features])
        damage += images_here * float(relative_error(answers[features], target[features], there))
        if with_classes:
            same += agreeing(answers, target)
        count += images_here
    return damage / count, same / count if with_classes else None
