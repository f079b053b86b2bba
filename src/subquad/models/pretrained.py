"""The authors' weights by name: fetched once, read without running what is in them, kept as safetensors of ours.

They are kept in $SUBQUAD_HOME/weights. SUBQUAD_WEIGHTS names a folder, or a link to one, that is looked into instead of
the authors' pages: NAME.safetensors or NAME.pth there.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from timm.models import adapt_input_conv
from torch import nn

from subquad.errors import SubquadError, naming, reason_of, shown
from subquad.home import folder_of, home
from subquad.models.checkpoint_conversion import convert_checkpoint
from subquad.models.networks import NETWORKS
from subquad.text import one_line, si
from subquad.weights.dense_links import DENSE_LINKS, DenseLink, dense_row
from subquad.weights.downloading import Wanted, check_same, download, locked, remember
from subquad.weights.files import classes_in, fitted, read_note, read_weights, save_weights
from subquad.weights.fitting import Adapted
from subquad.weights.hub_access import asking_hub
from subquad.weights.hub_files import hub_file
from subquad.weights.links import LINKS, PAGES, any_row_of, link_of, network_of
from subquad.weights.notes import check_task

MIRROR = "SUBQUAD_WEIGHTS"
PREFIX = "pretrained/"
"""In front of a network's name, where a path of weights could stand."""


HUB_WEIGHTS, HUB_CONFIG, HUB_PICTURES = "model.safetensors", "config.json", "preprocessor_config.json"
"""Files of a network in a repository of the Hugging Face hub; the last is how transformers' get their images."""


MAKERS: dict[str, Callable[[DenseLink], tuple[nn.Module, dict[str, Any]]]] = {}
"""By task: who makes the network of a link for it, and says what stands in the note of its file; tasks enter theirs."""


def weights_home() -> Path:
    """The folder of the authors' weights."""
    return home() / "weights"


def pretrained_file(name: str) -> Path:
    """The authors' weights of a network as a file of ours: fetched and converted at the first call.

    Args:
        name: of the network, with a tag where several files are of it: "agent_deit_small.r448", "soft_tiny.cuda"; with
            a head, of a detector or a segmenter: "agent_pvt_tiny/mask_rcnn_1x".

    Raises:
        SubquadError: nobody released any, or they can't be had, in one line that says what to do.
    """
    row = any_row_of(name)
    target = weights_home() / f"{row}.safetensors"
    if not target.is_file():
        with locked(target):
            # another process may have been there first
            if not target.is_file():
                _make(row, target)
    return target


def check_name(text: Path | str, task: str | None = None) -> None:
    """Raise a SubquadError where "pretrained/NAME" can't be opened, or not for a task; nothing is fetched for that."""
    path, words = Path(text), str(text)
    if not _is_name(words) or path.exists():
        return
    link = link_of(any_row_of(words.removeprefix(PREFIX)))
    if task is not None:
        with naming(path):
            check_task(link.task if isinstance(link, DenseLink) else "classify", task)


def source_of(text: Path | str, task: str | None = None) -> Path:
    """The file that "pretrained/NAME", "local-dir:FOLDER" or "hf-hub:OWNER/NAME" stands for; every other path as it is.

    Args:
        text: the name, or a path.
        task: what a network of the authors' must be for, known before anything is fetched; anything if left out.

    Raises:
        SubquadError: it can't be had, or is for another task, in one line.
    """
    path, words = Path(text), str(text)
    if words.startswith("local-dir:"):
        return Path(words.removeprefix("local-dir:")) / HUB_WEIGHTS
    if words.startswith("hf-hub:"):
        return _of_hub(words.removeprefix("hf-hub:"))
    if not _is_name(words) or path.exists():
        return path
    check_name(text, task)
    return pretrained_file(words.removeprefix(PREFIX))


def _of_hub(repository: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    name, _, revision = repository.partition("@")
    try:
        with asking_hub():
            # what says what it is and how it is asked, of networks of timm and transformers
            for beside in (HUB_CONFIG, HUB_PICTURES):
                with suppress(EntryNotFoundError):
                    hf_hub_download(name, beside, revision=revision or None)
            return Path(hf_hub_download(name, HUB_WEIGHTS, revision=revision or None))
    except Exception as error:
        # its library has many, and those of the libraries below it
        raise SubquadError(f"hf-hub:{repository} can't be had: {one_line(reason_of(error), 300)}") from None


def _is_name(text: str) -> bool:
    """Whether a text names a network, perhaps with a head, and not a file in some folder."""
    network, _, head = text.removeprefix(PREFIX).partition("/")
    return text.startswith(PREFIX) and (not head or (network in NETWORKS and "/" not in head))


def load_pretrained(model: nn.Module, name: str) -> Adapted:
    """Load the authors' weights into a network; a head for other than their 1000 classes stays as it is.

    A network of images of other than their three channels sees them through its first convolution as timm's networks
    do: of one channel it has the sum over theirs, of more theirs in turn, scaled.

    Raises:
        SubquadError: they can't be had, or do not fit: another mechanism, say.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise SubquadError(f"a network on the meta device holds no weights: make {name} without pretrained")
    path = pretrained_file(name)
    state = checked_weights(path)
    first = f"{getattr(model, 'first_conv', '')}.weight"
    if first in state:
        state[first] = adapt_input_conv(getattr(model, "in_chans", 3), state[first])
    adapted = fitted(state, model, path, head=classes_in(state) == getattr(model, "num_classes", None))
    model.load_state_dict(adapted.state)
    return adapted


def checked_weights(path: Path) -> dict[str, Any]:
    """The weights of a file that was made here.

    Raises:
        SubquadError: it was damaged since.
    """
    try:
        return read_weights(path)[0]
    except SubquadError as error:
        raise SubquadError(f"{error}; remove it, and the next call makes it anew") from None


def pretrained_rows(pattern: str = "*") -> list[dict[str, str]]:
    """What the authors released, as rows of text, and which of it is here."""
    rows = []
    for name, link in LINKS.items():
        if not fnmatch(name, pattern):
            continue
        network = NETWORKS.get(network_of(name))
        params = si(network.params * 1e6) if network and network.params else ""
        here = "yes" if (weights_home() / f"{name}.safetensors").is_file() else ""
        top1 = "" if link.top1 is None else f"{link.top1}"
        rows.append({"model": name, "px": str(link.px), "params": params, "published top-1": top1, "here": here})
        rows[-1]["page"] = PAGES[link.page].url.removeprefix("https://")
    return rows


def dense_rows(pattern: str = "*") -> list[dict[str, str]]:
    """The detectors and segmenters that the authors released, as rows of text, and which of them is here."""
    rows = []
    for name, link in DENSE_LINKS.items():
        if fnmatch(name, pattern):
            here = "yes" if (weights_home() / f"{name}.safetensors").is_file() else ""
            row = {"network": name, "task": link.task, "params": f"{link.params}M"}
            row |= {"published": figures_text(link.figures), "here": here}
            rows.append(row | {"page": PAGES[link.page].url.removeprefix("https://")})
    return rows


def figures_text(figures: Any) -> str:
    """Published figures in words, "box AP 41.4, mask AP 38.7"; nothing of what is none, as anyone writes notes."""
    if not isinstance(figures, Mapping):
        return ""
    numbers = {one_line(name, 30): value for name, value in figures.items() if isinstance(value, int | float)}
    return ", ".join(f"{name} {value}" for name, value in numbers.items())


def _make(row: str, target: Path) -> None:
    """Write the authors' weights as a file of ours."""
    link, network = link_of(row), network_of(row)
    if isinstance(link, DenseLink):
        with _released(row) as (source, _):
            convert_dense(source, target, row)
        return
    if network not in NETWORKS:
        raise SubquadError(f"{network} has released weights, but is no network of this version")
    with _released(row) as (source, wanted):
        about: dict[str, Any] = {"url": link.url, "page": PAGES[link.page].url, "top1": link.top1}
        about |= {"px": link.px, "remark": link.remark}
        _, adapted = convert_checkpoint(source, target, name=network, key=link.key, about={"released": about})
    if adapted.resized:
        warnings.warn(
            f"{wanted.url} has tables for another image size than {link.px} px: {len(adapted.resized)} were resampled",
            stacklevel=2,
        )


def convert_dense(source: Path, target: Path, name: str) -> tuple[str, Adapted]:
    """Write the authors' detector or segmenter as a file of ours.

    Args:
        source: their file.
        target: ends in .safetensors.
        name: of the network with its head, a row of DENSE_LINKS; its schedule may be left out where there is one.

    Returns:
        The row, and what was done to the weights.

    Raises:
        SubquadError: there is no such network, the file does not fit it, or `target` has another ending.
    """
    row = dense_row(name)
    if row is None:
        raise SubquadError(
            f"no detector or segmenter {shown(name)} is known here: see `subquad list models --pretrained`"
        )
    if target.suffix != ".safetensors":
        raise SubquadError(f"converted weights are written as .safetensors, got {target.name}")
    link = DENSE_LINKS[row]
    about = {"url": link.url, "page": PAGES[link.page].url, "figures": dict(link.figures), "remark": link.remark}
    state, _ = read_weights(source)
    # without memory at first, as most of what can be wrong with a file shows in its shapes
    with torch.device("meta"):
        sketch, _ = MAKERS[link.task](link)
    fitted(state, sketch, source)
    model, note = MAKERS[link.task](link)
    adapted = fitted(state, model, source)
    model.load_state_dict(adapted.state)
    save_weights(model, target, note | {"released": about})
    return row, adapted


@contextmanager
def _released(row: str) -> Iterator[tuple[Path, Wanted]]:
    """The authors' file: put there by hand, of the mirror, or fetched; what was fetched is not kept."""
    wanted = Wanted(link_of(row).url, weights_home() / f"{row}.pth", _expected(row))
    mirror = os.environ.get(MIRROR, "")
    if wanted.target.is_file():
        yield from _checked(wanted, wanted.target)
    elif mirror and "://" not in mirror:
        yield from _checked(wanted, _in_folder(folder_of(mirror, f"{MIRROR} to a folder or a link"), row, wanted))
    else:
        wanted = _wanted(row, wanted, mirror)
        seen = download(wanted)
        try:
            yield wanted.target, wanted
        except SubquadError as error:
            raise wanted.error(str(error)) from None
        finally:
            with suppress(OSError):
                wanted.target.unlink()
        remember(wanted, seen)


def _checked(wanted: Wanted, file: Path) -> Iterator[tuple[Path, Wanted]]:
    """A file that somebody else has put there: the same as at first."""
    seen = check_same(wanted, file)
    yield file, wanted
    remember(wanted, seen)


def _in_folder(folder: Path, row: str, wanted: Wanted) -> Path:
    files = [folder / f"{row}{ending}" for ending in (".safetensors", ".pth")]
    file = next(filter(Path.is_file, files), None)
    if file is None:
        raise SubquadError(
            f"{MIRROR} names {folder}, and neither {row}.safetensors nor {row}.pth is there: "
            f"put what {wanted.url} gives there as {row}.pth, expected is {wanted.what}"
        )
    return file


def _wanted(row: str, wanted: Wanted, mirror: str) -> Wanted:
    """What to fetch: from the mirror, from a repository of the hub, or from the authors' link."""
    if mirror:
        return Wanted(f"{mirror.rstrip('/')}/{row}.pth", wanted.target, wanted.what)
    link = link_of(row)
    if isinstance(link, DenseLink) or not (link.is_repository or link.is_share):
        return wanted
    if link.is_share:
        raise wanted.error("its authors share a folder that a browser has to open")
    try:
        file = hub_file(link.url, network_of(row))
    except SubquadError as error:
        raise wanted.error(str(error)) from None
    ending = ".released.safetensors" if file.path.endswith(".safetensors") else ".pth"
    return Wanted(file.url, wanted.target.with_name(f"{row}{ending}"), wanted.what, file.sha256)


def _expected(row: str) -> str:
    link = link_of(row)
    if isinstance(link, DenseLink):
        return f"the authors' {link.label}, {link.params} M parameters, {link.head} on {link.network}"
    network = NETWORKS.get(network_of(row))
    size = f", {network.params} M parameters" if network and network.params else ""
    return f"the authors' {link.label}{size}, at {link.px} px"


def published(path: Path) -> dict[str, Any]:
    """What is known of the authors' file that weights of ours were made of: its link, page, figures; else nothing."""
    return released_in(read_note(path))


def released_in(note: Mapping[str, Any]) -> dict[str, Any]:
    """What the note of a file says of the authors' file that it was made of; else nothing."""
    released = note.get("released")
    return released if isinstance(released, dict) else {}
