"""Weight files: safetensors with the arguments that made the model, so that a file alone says what it holds.

Nothing in a file is executed: safetensors, or pickles through `read_pickle`.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from subquad.errors import SubquadError
from subquad.models.create import create_model
from subquad.models.digest import DIGEST, check_digest, digest_of
from subquad.models.fitting import Adapted, adapt, misfits
from subquad.models.pickles import read_pickle
from subquad.writing import json_text, replacing

WRAPPERS = ("state_dict_ema", "model_ema", "model", "state_dict")
"""Under which keys trainers put the weights, the preferred one first."""


def save_weights(model: nn.Module, path: Path | str, metadata: dict[str, Any] | None = None) -> None:
    """Write the weights of `model`, its creation arguments and `metadata` (JSON) to `path`, whole or not at all."""
    path = Path(path)
    note = json_text({"creation": getattr(model, "creation", None), **(metadata or {})})
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in model.state_dict().items()}
    with replacing(path) as aside:
        save_file(tensors, aside, metadata={"format": "pt", "subquad": note, DIGEST: digest_of(tensors, note)})


def read_weights(path: Path | str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state dict and the metadata of a weight file, ours or anyone's."""
    path = Path(path)
    if not path.is_file():
        raise SubquadError(f"no weight file at {path}")
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
            tensors = load_file(path)
        except SafetensorError as error:
            raise SubquadError(f"{path} is no safetensors file or is cut short: {error}") from None
        check_digest(path, tensors, metadata)
        return tensors, json.loads(metadata.get("subquad", "{}"))
    return unwrap(read_pickle(path), path), {}


def unwrap(content: Any, path: Path | str) -> dict[str, Tensor]:
    """The tensors of a loaded file, from under the keys of WRAPPERS and without the prefixes that wrappers leave."""
    for key in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not content or not all(isinstance(value, Tensor) for value in content.values()):
        raise SubquadError(f"{path} holds no weights: expected names and tensors, or them under {', '.join(WRAPPERS)}")
    return {_bare(key): value for key, value in content.items()}


def _bare(key: str) -> str:
    """A name without what DataParallel and torch.compile put in front."""
    for prefix in ("module.", "_orig_mod."):
        key = key.removeprefix(prefix)
    return key


def load_checkpoint(model: nn.Module, source: Path | str | dict[str, Any], *, head: bool = True) -> Adapted:
    """Load weights into `model`, strictly: every entry must have its place, and every place its entry.

    Reads our own files and those that the papers' authors released (also under `state_dict_ema`, `model_ema`, `model`
    or `state_dict`, and with `module.` in front); nothing in a file is executed. Position and bias tables of another
    image size are resampled, those of the same size are taken exactly.

    Args:
        model: of `create_model`.
        source: a file, or a state dict.
        head: False leaves the classifier as it is, for weights with other classes.

    Returns:
        What was done: the layout that was found, and the tables that were resampled.

    Raises:
        SubquadError: if something does not fit, in one line that names the entries; the model is then untouched.
    """
    state, where = (source, "the state dict") if isinstance(source, dict) else (read_weights(source)[0], source)
    adapted = adapt(state, model)
    own = model.state_dict()
    if not head:
        for name in ("head.weight", "head.bias"):
            adapted.state.pop(name, None)
            if name in own:
                adapted.state[name] = own[name]
    if trouble := misfits(adapted.state, own):
        layout = f" (a released {adapted.family} layout)" if adapted.family else ""
        hint = "; head=False keeps the model's own head" if "2 of another shape (head." in trouble else ""
        raise SubquadError(f"{where}{layout} does not fit this model: {trouble}{hint}")
    model.load_state_dict(adapted.state)
    return adapted


def restore_model(path: Path | str) -> tuple[nn.Module, dict[str, Any]]:
    """The model that `save_weights` wrote to `path`, and the metadata that came with it."""
    state, note = read_weights(path)
    creation = note.get("creation")
    if isinstance(creation, dict) and "task" in creation:
        raise SubquadError(f"{path} holds no classifier of images: it is for `subquad {creation['task']}`")
    if not isinstance(creation, dict) or "name" not in creation:
        raise SubquadError(f"{path} does not say which model it holds: create the model and use load_checkpoint")
    model = create_model(**creation)
    load_checkpoint(model, state)
    return model, note
