"""Weight files: safetensors with the arguments that made the model, so that a file alone says what it holds.

Nothing in a file is executed: safetensors, or pickles through `torch_files`.
"""

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from subquad.errors import SubquadError, check_suffix, reason_of, shown
from subquad.grid import TokenGrid
from subquad.home import home
from subquad.ranges import checks_arguments
from subquad.text import one_line
from subquad.weights.digest import DIGEST, check_digest, check_plain, digest_of
from subquad.weights.downloading import Wanted, download, locked, remember
from subquad.weights.fitting import Adapted, adapt, misfits, not_finite, some, stored_grids
from subquad.weights.notes import parse_note
from subquad.weights.released import evaluated_under
from subquad.weights.released_heads import head_of
from subquad.weights.stored import MOST_REPEATED, StoredTensor, StrangeTensor
from subquad.weights.torch_files import opened
from subquad.weights.web_requests import check_address, is_link
from subquad.writing import json_text, replacing, sorted_json

WRAPPERS = ("state_dict_ema", "model_ema", "model", "state_dict", "model_state_dict", "net")
"""Under which keys trainers put the weights, the preferred one first."""

WRAPPED = ("module.", "_orig_mod.")
"""What DataParallel and torch.compile put in front of names."""

ATTRIBUTES = ("model", "net", "network", "backbone")
"""What trainers' modules, Lightning's among them, call the network that they hold: it stands in front of its names."""

Entry = TypeVar("Entry")

STATE = "last.pt"
"""What a run goes on from, in its folder."""

BEST = "best.safetensors"
"""The weights of a run folder that are taken where it is named instead of a file."""

HUB = "model.safetensors"
"""The weights in a folder that was made to be uploaded, or fetched."""

MOST_ENTRIES = 100_000
"""Of a weight file."""

MOST_NAME = 500
"""Characters of an entry's name."""


@checks_arguments
def save_weights(model: nn.Module, path: Path | str, metadata: dict[str, Any] | None = None) -> None:
    """Write the weights of `model`, its creation arguments and `metadata` (JSON) to `path`, whole or not at all.

    Of a network within torch.compile, DataParallel or AveragedModel they are the network's own.

    Raises:
        SubquadError: `path` does not end in .safetensors, by which such files are told from pickles; the network was
            quantized or sharded, or is on the meta device; or `metadata` is no JSON.
    """
    path, model = Path(path), within_wrappers(model)
    check_suffix(path, "weights are", ".safetensors")
    content = {"creation": getattr(model, "creation", None), **(metadata or {})}
    try:
        note = json_text(content)
    except (TypeError, ValueError, RecursionError) as error:
        raise SubquadError(f"metadata must be JSON, got {shown(metadata)}: {reason_of(error)}") from None
    state = model.state_dict()
    check_plain(state)
    if empty := [key for key, tensor in state.items() if tensor.is_meta]:
        raise SubquadError(f"{empty[0]} is on the meta device and has no numbers: give the network its weights first")
    write_tensors({key: tensor.detach().cpu().contiguous() for key, tensor in state.items()}, path, note)


def write_tensors(tensors: dict[str, Tensor], path: Path, note: str) -> None:
    """Write contiguous tensors of the CPU with a note (JSON) and their digest to `path`, whole or not at all."""
    with replacing(path) as aside:
        aside.touch()
        mode = aside.stat().st_mode
        save_file(tensors, aside, metadata={"format": "pt", "subquad": note, DIGEST: digest_of(tensors, note)})
        _sort_header(aside)
        # safetensors' files are their writer's alone; ours are read by those whom the user's mask allows
        with suppress(OSError):
            aside.chmod(stat.S_IMODE(mode))


def _sort_header(path: Path) -> None:
    """Sort what a file says of its tensors, which safetensors writes in another order each time.

    Files of the same weights are the same bytes then, as whoever compares or stores them by their digests expects.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        text = sorted_json(header).encode()
        # spaces fill it up to where the tensors begin
        if len(text) <= length:
            file.seek(8)
            file.write(text.ljust(length))


def within_wrappers(model: Any) -> Any:
    """The network within what torch.compile, DataParallel, DistributedDataParallel and AveragedModel make of one.

    Its names have no prefix, and it alone knows how it was made.
    """
    while True:
        if isinstance(model, nn.DataParallel | DistributedDataParallel | AveragedModel):
            model = model.module
        elif (compiled := getattr(model, "_orig_mod", None)) is not None:
            model = compiled
        else:
            return model


def weight_file(path: Path | str) -> Path:
    """`path`, or the weights of the folder that it is: the best ones of a run, or those for the hub."""
    path = Path(path)
    if not path.is_dir():
        return path
    if not (path / BEST).is_file() and (path / HUB).is_file():
        return path / HUB
    if not (path / BEST).is_file():
        # of a folder of runs
        if any((path / name).is_file() for name in ("model_index.json", "diffusion_pytorch_model.safetensors")):
            raise SubquadError(
                f"{path} is of diffusers, whose networks are opened in Python and given to subquad.convert; "
                "`subquad diffuse --model` makes images with its pipelines"
            )
        within = min((file.parent for file in path.glob(f"*/{BEST}")), default=None)
        raise SubquadError(
            f"{path} holds no {BEST}: name a run folder that has finished an epoch, or a finished conversion"
            + ("" if within is None else f", as {within}")
        )
    return path / BEST


def read_weights(path: Path | str, *, key: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state dict and the note of a weight file, ours or anyone's; the note is empty where it is not ours.

    Args:
        path: of the file.
        key: what is preferred to the keys of WRAPPERS, where a trainer's file has several state dicts.

    Raises:
        SubquadError: if there is no such file, or it is damaged or of another kind, in one line.
    """
    path = Path(path)
    check_readable(path)
    if path.suffix == ".safetensors":
        with _safetensors(path) as file:
            names = list(file.keys())
            _check_entries({name: tuple(file.get_slice(name).get_shape()) for name in names})
            tensors = {name: file.get_tensor(name) for name in names}
            check_digest(path, tensors, file.metadata() or {})
            note = _note_in(file)
            # what we wrote has the names of its network, which may itself hold a `module`
            return tensors if note else without_wrappers(tensors, path), note
    with opened(path) as content:
        return unwrap(content, path, key), {}


def read_note(path: Path | str) -> dict[str, Any]:
    """The note of a weight file alone; empty where it is not ours."""
    path = Path(path)
    check_readable(path)
    if path.suffix != ".safetensors":
        return {}
    with _safetensors(path) as file:
        return _note_in(file)


def check_readable(path: Path) -> None:
    """Raise where `path` is no file that can be read, before a device or a pipe is waited for."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise SubquadError(f"no weight file at {path}: nothing is there") from None
    except (OSError, ValueError) as error:
        raise SubquadError(f"no weight file at {one_line(path, 100)}: {one_line(error, 100)}") from None
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise SubquadError(f"no weight file at {path}: it is {what}")
    try:
        path.open("rb").close()
    except OSError as error:
        raise SubquadError(f"cannot read {path}: {error.strerror}") from None


@contextmanager
def _safetensors(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SubquadError as error:
        raise SubquadError(f"cannot open {path}: {error}") from None
    except Exception as error:
        # the library has an exception of its own, and others for kinds of numbers that PyTorch has not
        raise SubquadError(f"{path} is no safetensors file or is cut short: {one_line(error)}") from None


def _note_in(file: Any) -> dict[str, Any]:
    return parse_note((file.metadata() or {}).get("subquad", "{}"))


def unwrap(content: Any, path: Path | str, preferred: str | None = None) -> dict[str, Tensor]:
    """The tensors of a pickled file, from under the keys of WRAPPERS and without the prefixes that wrappers leave."""
    content = _inner(content, preferred)
    kinds = StoredTensor | StrangeTensor
    if not isinstance(content, dict) or not content or not all(isinstance(value, kinds) for value in content.values()):
        raise SubquadError(
            f"{path} holds no weights: expected names and tensors, as torch.save(model.state_dict(), …) writes them, "
            f"and no whole module, or them under {', '.join(WRAPPERS)}"
        )
    for key, value in content.items():
        if not isinstance(key, str):
            raise SubquadError(f"{path} has an entry whose name is no text, but the number {key}")
        if isinstance(value, StrangeTensor):
            raise SubquadError(
                f"{path}: {one_line(key)} is {value.kind} tensor, which is not read: save it as a plain one"
            )
    bare: dict[str, StoredTensor] = without_wrappers(content, path)
    try:
        _check_entries({name: tensor.size for name, tensor in bare.items()})
    except SubquadError as error:
        raise SubquadError(f"cannot open {path}: {error}") from None
    return {name: tensor.read() for name, tensor in bare.items()}


def _inner(content: Any, preferred: str | None = None) -> Any:
    """What lies under the first key of WRAPPERS that there is, or what is given where there is none."""
    for key in (preferred, *WRAPPERS):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            evaluated = content.get(_evaluated(content[key]))
            return evaluated if isinstance(evaluated, Mapping) and _evaluated(evaluated) else content[key]
    return content


def without_wrappers(state: Mapping[str, Entry], where: Path | str) -> dict[str, Entry]:
    """A state dict without what DataParallel, torch.compile and AveragedModel put in front of its names.

    Raises:
        SubquadError: two names would be one.
    """
    bare: dict[str, Entry] = {}
    for name, value in state.items():
        if _bare(name) in bare:
            raise SubquadError(
                f"{where} has two entries for {one_line(_bare(name))}, with and without a wrapper's prefix"
            )
        bare[_bare(name)] = value
    if bare.keys() != state.keys():
        # how many states AveragedModel has averaged
        bare.pop("n_averaged", None)
    return bare


def _plain_state(source: Mapping[Any, Any], where: str) -> Mapping[str, Tensor]:
    """The tensors of a dict that a caller has read, be it a trainer's checkpoint."""
    state = _inner(source)
    wrong = [key for key, value in state.items() if not isinstance(key, str) or not isinstance(value, Tensor)]
    if wrong:
        key, value = wrong[0], state[wrong[0]]
        raise SubquadError(
            f"{where} holds no weights, but {one_line(key, 60)!r} of type {type(value).__name__}: expected names and "
            f"tensors, or them under {', '.join(WRAPPERS)}"
        )
    return state


def within_attribute(state: Mapping[str, Entry], model: nn.Module) -> tuple[dict[str, Entry], list[str]]:
    """The entries of the network that a trainer's module holds, without the attribute's name, and those beside it.

    They are as they are where the module has several networks, where `model` has a part of that name itself, and where
    what stands beside is a head that is known, as of a detector whose `backbone` is a part of it.
    """
    first = {name.partition(".")[0] for name in state}
    found = [attribute for attribute in ATTRIBUTES if attribute in first]
    if len(found) != 1 or hasattr(model, found[0]) or head_of(state) is not None:
        return dict(state), []
    inner = {
        name.removeprefix(f"{found[0]}."): entry for name, entry in state.items() if name.startswith(f"{found[0]}.")
    }
    return inner, [name for name in state if not name.startswith(f"{found[0]}.")]


def _evaluated(state: Mapping[Any, Any]) -> str | None:
    """The key beside `state` under which the weights lie that its authors evaluated, if it is not its own."""
    return evaluated_under(_bare(name) for name in state if isinstance(name, str))


def _check_entries(shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise for names that cannot stand in a message, and for sides that hold no numbers."""
    if len(shapes) > MOST_ENTRIES:
        raise SubquadError(f"it has {len(shapes)} entries, more than {MOST_ENTRIES}")
    for name, shape in shapes.items():
        if len(name) > MOST_NAME or not name.isprintable():
            raise SubquadError(f"it has an entry with a name that is too long or not printable: {one_line(name, 60)}")
        if max(shape, default=0) > max(math.prod(shape), MOST_REPEATED):
            raise SubquadError(f"its entry {name} of shape {shape} has a side that holds no numbers")


def _bare(key: str) -> str:
    """A name without what DataParallel and torch.compile put in front."""
    # compiled before they were spread, or the other way round
    while key.startswith(WRAPPED):
        key = key.partition(".")[2]
    return key


def load_checkpoint(
    model: nn.Module, source: Path | str | Mapping[str, Any], *, head: bool | None = True, strict: bool = True
) -> Adapted:
    """Load weights into `model`, strictly: every entry must have its place, and every place its entry.

    Reads our own files and those that the papers' authors released (also under `state_dict_ema`, `model_ema`, `model`
    or `state_dict`, and with `module.` or `_orig_mod.` in front), what Lightning and other trainers save of a module
    that holds the network as `model`, `net`, `network` or `backbone`, and dicts of all these; nothing in a file is
    executed.
    Position and bias tables of another image size are resampled, those of the same size are taken exactly. Tables of
    tokens stand on a square where nothing says otherwise: files of ours say the size, state dicts do not.

    Args:
        model: of `create_model`, perhaps within torch.compile or DataParallel.
        source: a file, its link, a run folder, whose best weights are taken, or a state dict.
        head: False leaves the classifier as it is, for weights with other classes; None does so where they have
            another number of them, or no classifier.
        strict: False takes what fits and leaves the rest of the model as it is: softmax weights into a network of the
            same host with another mechanism.

    Returns:
        What was done, which prints as one line: the layout that was found, the tables that were resampled, and what
        stayed new or unused.

    Raises:
        SubquadError: if something does not fit or is not finite, in one line that names the entries; the model is then
            untouched.
    """
    model = within_wrappers(model)
    grids: Mapping[str, TokenGrid] = {}
    if isinstance(source, Mapping):
        where = "the state dict"
        state = _plain_state(source, where)
    elif not isinstance(source, str | os.PathLike):
        hint = ": take its state_dict()" if isinstance(source, nn.Module) else ""
        raise SubquadError(
            f"weights are a file, its link, a run folder or a state dict, got {type(source).__name__}{hint}"
        )
    else:
        fetched = isinstance(source, str) and is_link(source)
        file = linked_file(str(source)) if fetched else weight_file(source)
        try:
            (state, note), where = read_weights(file), str(file)
        except SubquadError as error:
            # it was whole when it came
            again = "; remove it, and the next call fetches it anew" if fetched else ""
            raise SubquadError(f"{error}{again}") from None
        grids = stored_grids(note, model, where)
    if not state.keys() & model.state_dict().keys():
        state = without_wrappers(state, where)
    state, beside = within_attribute(state, model)
    adapted = fitted(state, model, where, head=head, strict=strict, grids=grids)
    adapted.unused += beside
    # weights without numbers are only asked whether their shapes fit
    if any(own.is_meta for own in model.parameters()) and not all(tensor.is_meta for tensor in state.values()):
        raise SubquadError(f"a network on the meta device does not hold the weights of {where}: make it on another one")
    model.load_state_dict(adapted.state)
    return adapted


def linked_file(url: str) -> Path:
    """The file of a link, fetched at the first call; it is kept in $SUBQUAD_HOME/weights/links.

    Raises:
        SubquadError: it can't be had, or holds no weights, in one line.
    """
    check_address(url)
    ending = ".safetensors" if urlsplit(url).path.endswith(".safetensors") else ".pth"
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", urlsplit(url).path.rpartition("/")[2].removesuffix(ending))[:60] or "weights"
    digest = hashlib.sha256(url.encode()).hexdigest()[:8]
    target = home() / "weights" / "links" / f"{name}-{digest}{ending}"
    wanted = Wanted(url, target, "a file of weights, of torch.save or safetensors")
    if target.is_file():
        # a folder that others wrote need not be written to
        return target
    with locked(target):
        if not target.is_file():
            seen = download(wanted)
            try:
                read_weights(target)
            except SubquadError as error:
                target.unlink(missing_ok=True)
                raise wanted.error(str(error)) from None
            remember(wanted, seen)
    return target


def fitted(
    state: dict[str, Tensor],
    model: nn.Module,
    where: Path | str,
    *,
    head: bool | None = True,
    strict: bool = True,
    grids: Mapping[str, TokenGrid] | None = None,
) -> Adapted:
    """A state dict as `model` takes it; a model on the meta device only says whether its shapes fit.

    `grids` are those that its tables stand on, where they are known, see `adapt`.

    Raises:
        SubquadError: as `load_checkpoint` does; `where` names the weights there.
    """
    own = model.state_dict()
    is_sketch = any(tensor.is_meta for tensor in own.values())
    try:
        state = {name: tensor.to("meta") for name, tensor in state.items()} if is_sketch else state
        adapted = adapt(state, model, grids)
    except SubquadError as error:
        raise SubquadError(f"{where}: {error}") from None
    if head is None:
        head = classes_in(adapted.state) == classes_in(own)
    if not head:
        for name in HEAD:
            adapted.state.pop(name, None)
            if name in own:
                adapted.state[name] = own[name]
    layout = f" (a released {adapted.family} layout)" if adapted.family else ""
    if not strict:
        adapted.keep_what_fits(own, model)
        if not adapted.state.keys() - adapted.new:
            raise SubquadError(f"{where}{layout} has nothing that fits this model: {some(list(adapted.unused))}")
    if trouble := misfits(adapted.state, own):
        of_head = any(f"2 {what} (head." in trouble for what in ("missing", "unexpected", "of another shape"))
        hint = "; head=False keeps the model's own head, or that it has none" if of_head else ""
        if Path(where).name == STATE:
            # of the whole network, whatever is to be started
            hint = f"; it is what a run goes on from: name its folder, or {BEST} in it"
        raise SubquadError(f"{where}{layout} does not fit this model: {trouble}{hint}")
    if names := not_finite(adapted.state):
        raise SubquadError(f"{where}{layout} has weights that are not finite: {some(names)}")
    return adapted


HEAD = ("head.weight", "head.bias")
"""Entries of a classifier."""


def classes_in(state: dict[str, Tensor]) -> int | None:
    """Classes of the head in a state dict, None where it has none."""
    head = state.get("head.weight", state.get("head.fc.weight"))
    # released heads may be convolutions of one tap
    return head.shape[0] if head is not None and (head.dim() == 2 or head.shape[2:] == (1, 1)) else None
