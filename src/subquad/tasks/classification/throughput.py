"""How many images a second a model classifies."""

import statistics

import torch
from torch import nn

from subquad.models.stated_inputs import image_channels
from subquad.tasks.accuracy import evaluating
from subquad.timing import seconds_of

_WARM_UP = 2


def measure_throughput(
    model: nn.Module,
    img_size: tuple[int, int],
    batch_size: int = 64,
    device: torch.device | str = "cpu",
    repeats: int = 10,
) -> float:
    """Images a second, the median of `repeats` batches of random images; loading is not counted."""
    device = torch.device(device)
    images = torch.randn(batch_size, image_channels(model), *img_size, device=device)
    with evaluating(model):
        seconds = [seconds_of(lambda: model(images), device) for _ in range(_WARM_UP + repeats)]
    return batch_size / statistics.median(seconds[_WARM_UP:])
