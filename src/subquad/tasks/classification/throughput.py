"""How many images a second a model classifies."""

import statistics
import time

import torch
from torch import nn

from subquad.tasks.accuracy import evaluating

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
    images = torch.randn(batch_size, 3, *img_size, device=device)
    seconds = []
    with evaluating(model):
        for _ in range(_WARM_UP + repeats):
            _wait(device)
            start = time.perf_counter()
            model(images)
            _wait(device)
            seconds.append(time.perf_counter() - start)
    return batch_size / statistics.median(seconds[_WARM_UP:])


def _wait(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
