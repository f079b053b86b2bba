"""What goes along with a walk: a bar on a terminal, evaluation for its time, and what it is known by."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from subquad.large.streaming import Watch


@contextmanager
def watching(shown: bool) -> Iterator[Callable[[int], Watch]]:
    """What is told how many tokens will be gone through, and draws a bar on a terminal if one is to be shown."""
    with tqdm(desc="streaming", unit="token", unit_scale=True, leave=False, disable=None if shown else True) as bar:

        def watch(total: int) -> Watch:
            def hear(tokens: int) -> None:
                bar.update(tokens)

            bar.reset(total)
            return hear

        yield watch


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Let a network be in evaluation for a while."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def identity_of(model: nn.Module, image: Any) -> str:
    """What tells a walk from others: the network's weights, and the image, a file by its name, size and time."""
    digest = hashlib.sha256(repr(model).encode())
    for name, tensor in sorted(model.state_dict().items()):
        wide = tensor.detach().double()
        digest.update(f"{name} {tuple(tensor.shape)} {wide.sum().item()!r} {wide.abs().sum().item()!r}".encode())
    if isinstance(image, str | Path):
        about = Path(image).stat()
        digest.update(f"{Path(image).resolve()} {about.st_size} {about.st_mtime_ns}".encode())
    else:
        pixels = image if isinstance(image, Tensor) else torch.as_tensor(image)
        digest.update(f"{tuple(pixels.shape)} {pixels.double().sum().item()!r}".encode())
    return digest.hexdigest()
