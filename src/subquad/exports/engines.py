"""What was written, opened in its engine again, in the place of the network that it was written from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subquad.errors import SubquadError, reason_of, unknown_name
from subquad.exports.exporting import exporter_named
from subquad.exports.formats import EXPORTERS, Runner
from subquad.exports.quiet_logs import without_warnings
from subquad.ranges import checks_arguments
from subquad.text import counted


@checks_arguments
def open_exported(path: Path | str, format: str | None = None) -> Runner:
    """A file of `subquad.export`, as a function of images.

    Args:
        path: the file.
        format: its name in EXPORTERS; told by the file's suffix, and by trying where several share one, if left out.

    Raises:
        SubquadError: there is no such file or format, a package is missing, or it can't be opened as that.
    """
    path = Path(path)
    check_file(path)
    if format is not None and format not in EXPORTERS:
        raise unknown_name("format", format, EXPORTERS)
    names = [format] if format else [one for one in EXPORTERS.usable_names() if EXPORTERS[one].suffix == path.suffix]
    if not names:
        suffixes = ", ".join(sorted({exporter.suffix for exporter in EXPORTERS.usable()}))
        raise SubquadError(f"what was exported ends in {suffixes}, got {path.name}")
    for name in names:
        try:
            # PyTorch logs the trace of what is no file of its format, which another may open
            with without_warnings():
                return exporter_named(name).load(path)
        except SubquadError:
            raise
        except Exception as error:
            reason = reason_of(error)
    raise SubquadError(f"{path} can't be opened as {' or '.join(names)}: {reason}")


def check_file(path: Path | str) -> None:
    """Raise where there is no file to open, before the network is that it was written from."""
    if not Path(path).is_file():
        raise SubquadError(f"there is no file {path}")


def in_engine(trained: Any, path: Path | str) -> Any:
    """A trained network whose answers come from a file that `subquad.export` wrote of it."""
    return replace(trained, model=InEngine(trained.model, open_exported(path), str(path)).eval())


FARTHEST = 0.3
"""How far answers may be off, by the network's largest number: what is exported in int8 is by 0.2 at most, and other
networks, unless they are much alike, by more."""

PRECISIONS = torch.float32, torch.float16, torch.bfloat16
"""What images may have to be for a file, as it was written."""


class InEngine(nn.Module):
    """A network whose answers come from the engine that its file is for; all else is asked of the network itself.

    The first answer is held against the network's own, so that a file of another network is not judged in its place.

    Args:
        network: what the file was written from.
        run: the file, opened.
        name: of the file.
    """

    def __init__(self, network: nn.Module, run: Runner, name: str = "the exported file") -> None:
        super().__init__()
        self.network, self.name = network, name
        # a program may be a module of its own, which neither trains nor moves with this one
        self._held = (run,)
        self._dtype: torch.dtype | None = None
        self._batch = 0

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        if not isinstance(images, Tensor):
            raise SubquadError("networks that take lists of images, as detectors do, have no exported files")
        answer = self._run(images.cpu()).float().to(images.device)
        if not self._batch:
            self._check(images, answer)
        self._batch = max(self._batch, len(images))
        return answer

    def _run(self, images: Tensor) -> Tensor:
        """The file's answer, to images of what it was written in: the first that it takes."""
        errors: list[Exception] = []
        for dtype in PRECISIONS if self._dtype is None else (self._dtype,):
            for more in dict.fromkeys((0, max(self._batch - len(images), 0))):
                # the last images may be fewer than a file takes that was written for a number of them
                filled = torch.cat([images, images[-1:].expand(more, -1, -1, -1)]).to(dtype)
                try:
                    answer = self._held[0](filled)
                except Exception as error:
                    # engines raise what they like
                    errors.append(error)
                    continue
                self._dtype = dtype
                return answer[: len(images)]
        height, width = images.shape[2:]
        raise SubquadError(
            f"{self.name} does not take {counted(len(images), 'image')} of {height}×{width} px: write it with "
            f"--dynamic batch,size, or judge it with the number and size of images it was written for (--batch-size "
            f"and --img-size, where the command has them): "
            f"{reason_of(errors[0])}"
        ) from errors[0]

    def _check(self, images: Tensor, answer: Tensor) -> None:
        own = self.network(images)
        if not isinstance(own, Tensor) or own.shape != answer.shape:
            what = tuple(own.shape) if isinstance(own, Tensor) else type(own).__name__
            raise SubquadError(f"{self.name} gives {tuple(answer.shape)} and the network {what}: it is of another one")
        off = float((own.float() - answer).abs().max() / own.abs().max().clamp(min=1e-12))
        if not off <= FARTHEST:
            raise SubquadError(
                f"{self.name} is off by {off:.1g} of the network's largest number: it was written of another network"
            )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("network"), name)
