"""What places of an image see in the teacher's blocks and in the student's: explicit weights of both, side by side.

A layer converted to softmax answers as the teacher's own does, and shows its weights as every mechanism of ours: so the
teacher's maps come out of the same probes, in whichever library its layers are written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from subquad.analysis.explicit_attention import visit_attention
from subquad.analysis.margins import on_picture
from subquad.analysis.probes import LayerAttention, without_weights
from subquad.analysis.small_maps import Looking, small_map
from subquad.conversion.aligning import relative_error
from subquad.conversion.conversion_plan import Plan
from subquad.conversion.conversion_record import Record
from subquad.conversion.conversion_run import open_plan
from subquad.conversion.delta_files import DELTA, load_converted
from subquad.conversion.distilling import answers_of
from subquad.conversion.judged_steps import few_images, held_out_of
from subquad.conversion.replacing import conversion_of, convert
from subquad.data import InputConfig

IMAGES = 3
"""How many are shown."""

MOST_TOKENS = 2500
"""Of a block whose weights are formed, which are quadratic in them."""


ALIKE = 1e-6
"""Relative error ‖y − t‖² / ‖t‖² up to which two networks are the same one."""


@dataclass(frozen=True)
class PairedMaps:
    """Maps of both networks.

    Attributes:
        pictures: as the networks got them.
        looks: of "teacher" and "student", for each picture a map of each chosen block, by its number from 0.
        without: why there are none, or why some blocks are missing; "" where all are there.
    """

    pictures: list[Image.Image] = field(default_factory=list)
    looks: dict[str, list[list[Looking]]] = field(default_factory=dict)
    without: str = ""


def maps_of_folder(folder: Path, record: Record) -> PairedMaps:
    """Maps of the conversion in a folder, of some of the images that it was judged on.

    Raises:
        SubquadError: its teacher, its images or its own files can't be opened any more.
    """
    plan = Plan(**record.plan | {"source": record.teacher(folder)})
    opened = open_plan(plan)
    teacher, device = opened.trained.model, opened.trained.device
    images = few_images(held_out_of(opened.trained, plan, IMAGES), opened.drawn[0], IMAGES).to(device)
    student = load_converted(folder / DELTA, teacher)
    return paired_maps(student.eval(), teacher.eval(), images, opened.input)


def paired_maps(student: nn.Module, teacher: nn.Module, images: Tensor, config: InputConfig) -> PairedMaps:
    """Maps of the first, a middle and the last converted block of a student, and of its teacher's same blocks."""
    conversion = conversion_of(student)
    numbers = sorted(conversion.paths)
    chosen = sorted({numbers[0], numbers[len(numbers) // 2], numbers[-1]})
    height, width, prefix = conversion.grid
    if (tokens := height * width + prefix) > MOST_TOKENS:
        return PairedMaps(without=f"Weights of {tokens} tokens are not formed: at most of {MOST_TOKENS}.")
    as_softmax = convert(teacher, "softmax", blocks=numbers, **conversion.made_by)
    looks = {"student": [_looks(student, image[None], chosen) for image in images]}
    if not _same(as_softmax, teacher, images[:1]):
        without = "The teacher's own attention is no softmax over the whole map, and is not shown."
        return PairedMaps([_picture(image, config) for image in images], looks, without)
    looks = {"teacher": [_looks(as_softmax, image[None], chosen) for image in images]} | looks
    missing = {who: _missing(of_images, chosen) for who, of_images in looks.items()}
    reasons = [
        f"The {who} shows no weights over a whole map in block{'s' if len(some) > 1 else ''} "
        f"{', '.join(map(str, some))}."
        for who, some in missing.items()
        if some
    ]
    if reason := without_weights(student):
        reasons.append(f"{reason}.")
    return PairedMaps([_picture(image, config) for image in images], looks, " ".join(reasons))


def _looks(model: nn.Module, image: Tensor, numbers: Sequence[int]) -> list[Looking]:
    """Maps of one image (1, c, y, x), so that few weights are held at a time."""
    names = {f"{path}.inner": number for number, path in conversion_of(model).paths.items() if number in numbers}
    looks: list[Looking] = []

    def visit(layer: LayerAttention) -> None:
        # what is called once for each window has no map of the image
        if layer.name in names and len(layer.weights) == 1 and min(layer.grid.height, layer.kv_grid.height) > 1:
            layer = on_picture(layer, model)
            looks.append(small_map(layer, layer.weights[0].mean((0, 1)), names[layer.name]))

    visit_attention(model, image, visit)
    return looks


@torch.no_grad()
def _same(model: nn.Module, teacher: nn.Module, images: Tensor) -> bool:
    """Whether two networks answer alike, but for rounding."""
    ours, theirs = (answers_of(each.eval(), images) for each in (model, teacher))
    return all(float(relative_error(ours[name], theirs[name])) < ALIKE for name in theirs)


def _missing(of_images: Sequence[Sequence[Looking]], numbers: Sequence[int]) -> list[int]:
    there = {look.layer for looks in of_images for look in looks}
    return [number for number in numbers if number not in there]


def _picture(image: Tensor, config: InputConfig) -> Image.Image:
    """An image (c, y, x) as it was before it was normalised."""
    mean, std = (torch.tensor(each)[:, None, None] for each in (config.mean, config.std))
    return to_pil_image((image.float().cpu() * std + mean).clamp(0, 1))
