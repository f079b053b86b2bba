"""What was written, opened in its engine again, in the place of the network that it was written from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from subquad.diffusion.called_with import arguments_of
from subquad.errors import SubquadError, reason_of, unknown_name
from subquad.exports.engine_networks import ANY_SIZE, CalledInEngine, InEngine
from subquad.exports.exporting import exporter_named
from subquad.exports.formats import EXPORTERS, Runner
from subquad.exports.quiet_logs import without_warnings
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
    """A network whose answers come from a file that `subquad.export` wrote of it, for the one that there was.

    Args:
        trained: a network of images, or a U-Net or autoencoder of diffusers; or what `subquad.open_trained` gives,
            of which all else stays.
        path: the file.

    Raises:
        SubquadError: there is no such file, or it can't be opened.
    """
    if not isinstance(trained, nn.Module):
        return replace(trained, model=in_engine(trained.model, path))
    kind = InEngine if arguments_of(trained, ANY_SIZE) is None else CalledInEngine
    return kind(trained, open_exported(path), str(path)).eval()
