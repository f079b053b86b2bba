"""How well a denoising network predicts the noise in images, image by image: what a change of it costs, with power.

Two networks, or one with and without a patch, are asked about the same noisy images, so that their errors are paired:
a few thousand images show differences that no Fréchet distance of as many samples would.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from subquad.errors import SubquadError
from subquad.ranges import Positive, Share, checks_arguments

Predict = Callable[[Tensor, int, Tensor], Tensor]
"""From noisy images (b, c, y, x), a noise level and classes (b,) to the noise in them."""

APART = 10_000_000
"""Images of one seed before those of the next."""


def noise_of(numbers: Tensor, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """The noise (b, *shape) that belongs to images of these numbers (b,), the same in whichever batch they stand."""
    # torch's generator of the CPU looks at 32 bits of its seed alone
    seeds = [(APART * seed + number) % 2**32 for number in numbers.tolist()]
    drawn = [torch.randn(shape, generator=torch.Generator().manual_seed(number)) for number in seeds]
    return torch.stack(drawn)


def noisy(images: Tensor, noise: Tensor, kept: float) -> Tensor:
    """Images at the noise level at which the share `kept` of their variance is left (ᾱ of the schedule)."""
    return kept**0.5 * images + (1 - kept) ** 0.5 * noise


@torch.no_grad()
@checks_arguments
def noise_errors(
    predict: Predict,
    images: Tensor,
    labels: Tensor,
    level: int,
    kept: Share,
    *,
    batch_size: Positive = 64,
    seed: int = 0,
) -> Tensor:
    """The mean squared error of the predicted noise, for each of the images (n, c, y, x) with classes (n,).

    Args:
        predict: the network.
        images: from -1 to 1.
        labels: their classes.
        level: of the noise, a training step of the schedule.
        kept: what the schedule leaves of the images at that level, ᾱ.
        batch_size: images at a time, which changes nothing else.
        seed: of the noise.

    Raises:
        SubquadError: images and labels are not as many, or what is predicted is not the noise of each number.
    """
    if len(images) != len(labels):
        raise SubquadError(f"images have a class each: got {len(images)} images and {len(labels)} classes")
    errors = []
    for numbers in torch.arange(len(images)).split(batch_size):
        noise = noise_of(numbers, tuple(images.shape[1:]), seed).to(images)
        answer = predict(noisy(images[numbers], noise, kept), level, labels[numbers])
        if answer.shape != noise.shape:
            raise SubquadError(
                f"predict is to give the noise of each number, {tuple(noise.shape)}, got {tuple(answer.shape)}: of "
                "networks that learn a variance as well take the channels of the noise alone"
            )
        errors.append((answer.float() - noise).square().flatten(1).mean(dim=1).cpu())
    return torch.cat(errors)
