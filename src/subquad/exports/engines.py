"""What was written, opened in its engine again, in the place of the network that it was written from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subquad.errors import SubquadError, reason_of, unknown_name
from subquad.exports.exporting import exporter_named
from subquad.exports.formats import EXPORTERS, Runner
from subquad.ranges import checks_arguments


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
    if not path.is_file():
        raise SubquadError(f"there is no file {path}")
    if format is not None and format not in EXPORTERS:
        raise unknown_name("format", format, EXPORTERS)
    names = [format] if format else [name for name, one in EXPORTERS.items() if path.suffix == one.suffix]
    if not names:
        suffixes = ", ".join(sorted({exporter.suffix for exporter in EXPORTERS.values()}))
        raise SubquadError(f"what was exported ends in {suffixes}, got {path.name}")
    for name in names:
        try:
            return exporter_named(name).load(path)
        except SubquadError:
            raise
        except Exception as error:
            reason = reason_of(error)
    raise SubquadError(f"{path} can't be opened as {' or '.join(names)}: {reason}")


def in_engine(trained: Any, path: Path | str) -> Any:
    """A trained network whose answers come from a file that `subquad.export` wrote of it."""
    return replace(trained, model=InEngine(trained.model, open_exported(path)).eval())


class InEngine(nn.Module):
    """A network whose answers come from the engine that its file is for; all else is asked of the network itself.

    Args:
        network: what the file was written from.
        run: the file, opened.
    """

    def __init__(self, network: nn.Module, run: Runner) -> None:
        super().__init__()
        self.network = network
        # a program may be a module of its own, which neither trains nor moves with this one
        self._held = (run,)

    def forward(self, images: Tensor) -> Tensor:
        try:
            with torch.no_grad():
                return self._held[0](images.cpu()).to(images.device)
        except Exception as error:
            shape = " × ".join(map(str, (images.shape[0], *images.shape[2:])))
            raise SubquadError(
                f"the exported file does not take {shape} px (was it written with --dynamic batch,size?): "
                f"{reason_of(error)}"
            ) from error

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("network"), name)
