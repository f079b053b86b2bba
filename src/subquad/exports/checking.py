"""What was written against the network that it was written from."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from subquad.errors import SubquadError, reason_of
from subquad.exports.changing_axes import Axes
from subquad.kernels import use_backend

TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.int8: 2e-1}
"""How far an engine's answer may be from the network's, by the network's largest number."""

Shape = tuple[int, int, int]
"""Images, and their height and width."""


def checked_shapes(size: tuple[int, int], batch: int, dynamic: Sequence[str], other: tuple[int, int]) -> list[Shape]:
    """The sizes at which what was written is tried: its own, and an `other` not traced, where any may change."""
    sides = other if "size" in dynamic else size
    return list(dict.fromkeys([(batch, *size), (3 if "batch" in dynamic else batch, *sides)]))


def other_sides(least: int, step: int) -> tuple[int, int]:
    """Height and width that are not traced, of a network that takes multiples of `step` from `least` on."""
    return multiples_from((least + 37, least + 86), step)


def other_sides_of_maps(least: int, step: int) -> tuple[int, int]:
    """The same of maps, each place of which is a token: one of thousands has millions of scores."""
    return multiples_from((least + 1, least + 9), step)


def multiples_from(sides: tuple[int, int], step: int) -> tuple[int, int]:
    """The least two sides, each from the one that is asked for on, that are multiples of a step and no larger one."""
    found: list[int] = []
    for side in sides:
        times = -(-side // step)
        # odd ones, and those of no patches of 14
        while step > 1 and (times % 2 == 0 or times % 7 == 0 or step * times in found):
            times += 1
        found.append(step * times)
    return found[0], found[1]


def answer_of(model: nn.Module, *tensors: Tensor) -> Tensor:
    """What a network makes of images, or of the tensors that it takes, in the eager form.

    Raises:
        SubquadError: it does not take them, or gives something other than one tensor.
    """
    try:
        with torch.no_grad(), use_backend("eager"):
            answer = model(*tensors)
    except SubquadError:
        raise
    except Exception as error:
        shape = " and ".join(" × ".join(map(str, one.shape)) for one in tensors)
        raise SubquadError(f"the network itself does not take images of {shape}: {reason_of(error)}") from error
    if not isinstance(answer, Tensor):
        several = f" of {len(answer)}" if isinstance(answer, list | tuple | dict) else ""
        raise SubquadError(
            f"the network gives a {type(answer).__name__}{several}, and what is written gives one tensor: "
            "wrap it in a module that returns the tensor that you want"
        )
    if not answer.numel():
        raise SubquadError(f"the network gives no numbers, but {tuple(answer.shape)}")
    return answer


class DoesNotRunError(SubquadError):
    """A file that its engine can open and can't run."""


Tried = tuple[str, tuple[Tensor, ...]]
"""What a network is tried with, and of what size it is."""


def tried_images(shapes: Sequence[Shape], channels: int, dtype: torch.dtype) -> list[Tried]:
    """Images that what was written is tried with, and of what size they are."""
    generator = torch.Generator().manual_seed(0)
    tried: list[Tried] = []
    for batch, height, width in shapes:
        images = torch.randn(batch, channels, height, width, generator=generator)
        tried.append((f"at {batch} × {height} × {width} px", (images.to(dtype),)))
    return tried


def tried_like(examples: Sequence[Tensor], axes: Sequence[Axes], shapes: Sequence[Shape]) -> list[Tried]:
    """The same of what are not only images, of which not any numbers are taken.

    It is tried with the examples as they are, and in each size with their rows the other way around.
    """
    tried: list[Tried] = []
    for number, (batch, height, width) in enumerate(shapes):
        alike = [one.resized(tensor, batch, (height, width)) for tensor, one in zip(examples, axes, strict=True)]
        where = f"of {' and '.join(' × '.join(map(str, one.shape)) or '1' for one in alike)} numbers"
        if number == 0:
            tried.append((where, tuple(alike)))
        tried.append((where, tuple(one.flip(0) if one.dim() else one for one in alike)))
    return tried


def largest_difference(
    model: nn.Module,
    run: Callable[..., Tensor],
    tried: Sequence[Tried],
    dtype: torch.dtype,
    tolerance: float,
) -> float:
    """How far the answers of `run` to what is tried are from those of `model`, by the network's largest number.

    Raises:
        SubquadError: it does not run, gives another shape, or is further off than `tolerance`; or the network itself
            gives numbers that are not finite, which nothing can be held against.
    """
    worst = 0.0
    for where, tensors in tried:
        wanted = answer_of(model, *tensors).float()
        if not wanted.isfinite().all():
            raise SubquadError(
                f"the network itself gives numbers that are not finite {where}, in {dtype}: its weights are not "
                "finite, or name a wider dtype"
            )
        try:
            got = run(*tensors).float()
        except Exception as error:
            raise DoesNotRunError(f"what was written does not run {where}: {reason_of(error)}") from error
        if got.shape != wanted.shape:
            raise SubquadError(f"what was written gives {tuple(got.shape)} {where}, not {tuple(wanted.shape)}")
        off = float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
        if not off <= tolerance:
            raise SubquadError(
                f"what was written is off by {off:.1e} {where}, more than {tolerance:.0e}: it is not kept"
            )
        worst = max(worst, off)
    return worst
