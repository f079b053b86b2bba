"""What goes along with a walk: a bar on a terminal, and what it is known by."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from subquad.large.kept_bands import LEAST_ROWS
from subquad.large.streaming import Watch

PLAIN = (bool, int, float, str, type(None))
"""What a module says of itself in a word or a number."""


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


def identity_of(model: nn.Module, image: Any, *others: Any) -> str:
    """What tells a walk from others: the network, and the image, a file by its name, size and times; and what else."""
    digest = hashlib.blake2b(f"{model!r} {others!r}".encode(), digest_size=32)
    for module in model.modules():
        # what changes no weight: numbers of heads, scales, epsilons
        plain = {name: value for name, value in vars(module).items() if isinstance(value, PLAIN) and name[0] != "_"}
        digest.update(repr(sorted((plain | {"training": None}).items())).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(_bytes_of(tensor))
    if isinstance(image, str | Path):
        path = Path(image)
        digest.update(str(path.resolve()).encode())
        for file in [path, *sorted(path.rglob("*"))] if path.is_dir() else [path]:
            about = file.stat()
            # times of modification come along with copies and out of archives, those of change do not
            times = f"{about.st_mtime_ns} {about.st_ctime_ns}"
            digest.update(f"{file.name} {about.st_size} {times}".encode())
    elif isinstance(image, Tensor):
        digest.update(f"{tuple(image.shape)} {image.dtype}".encode())
        for row in image.movedim(-2, 0):
            digest.update(_bytes_of(row))
    else:
        pixels = np.asarray(image) if not hasattr(image, "shape") else image
        digest.update(f"{tuple(pixels.shape)} {pixels.dtype}".encode())
        for first in range(0, pixels.shape[0], LEAST_ROWS):
            digest.update(np.ascontiguousarray(pixels[first : first + LEAST_ROWS]).tobytes())
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> Any:
    """A tensor's numbers, as they lie in memory."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy()
