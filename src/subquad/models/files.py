"""Weight files: safetensors with the arguments that made the model, so that a file alone says what it holds.

Nothing in a file is executed: safetensors, or pickles through torch's `weights_only`.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from subquad.errors import SubquadError
from subquad.models.create import create_model

WRAPPERS = ("state_dict_ema", "model_ema", "model", "state_dict")
"""Under which keys trainers put the weights, the preferred one first."""


def save_weights(model: nn.Module, path: Path | str, metadata: dict[str, Any] | None = None) -> None:
    """Write the weights of `model`, its creation arguments and `metadata` (JSON) to `path`, whole or not at all."""
    path = Path(path)
    note = {"creation": getattr(model, "creation", None), **(metadata or {})}
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in model.state_dict().items()}
    partial = path.with_name(f".{path.name}.part")
    save_file(tensors, partial, metadata={"format": "pt", "subquad": json.dumps(note)})
    partial.replace(path)


def read_weights(path: Path | str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state dict and the metadata of a weight file, ours or anyone's."""
    path = Path(path)
    if not path.is_file():
        raise SubquadError(f"no weight file at {path}")
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                note = json.loads((file.metadata() or {}).get("subquad", "{}"))
            return load_file(path), note
        except SafetensorError as error:
            raise SubquadError(f"{path} is no safetensors file or is cut short: {error}") from None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).partition("\n")[0] or "the file is empty or cut short"
        raise SubquadError(f"{path} can't be loaded without running code from it: {reason}") from None
    return unwrap(content, path), {}


def unwrap(content: Any, path: Path | str) -> dict[str, Tensor]:
    """The tensors of a loaded file, from under the keys of WRAPPERS and without a `module.` prefix."""
    for key in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not content or not all(isinstance(value, Tensor) for value in content.values()):
        raise SubquadError(f"{path} holds no weights: expected names and tensors, or them under {', '.join(WRAPPERS)}")
    return {key.removeprefix("module."): value for key, value in content.items()}


def load_checkpoint(model: nn.Module, source: Path | str | dict[str, Tensor]) -> None:
    """Load weights into `model`, strictly: every key and every shape must agree.

    Raises:
        SubquadError: if they do not, in one line that names the keys; the model is then untouched.
    """
    state, where = (source, "the state dict") if isinstance(source, dict) else (read_weights(source)[0], source)
    own = model.state_dict()
    missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    shapes = [
        f"{key} is {tuple(state[key].shape)}, the model's {tuple(own[key].shape)}"
        for key in own.keys() & state.keys()
        if own[key].shape != state[key].shape
    ]
    parts = [
        f"{len(keys)} {what} ({_some(keys)})"
        for what, keys in (("missing", missing), ("unexpected", unexpected), ("of another shape", sorted(shapes)))
        if keys
    ]
    if parts:
        raise SubquadError(f"{where} is of another model: {'; '.join(parts)}")
    model.load_state_dict(state)


def restore_model(path: Path | str) -> tuple[nn.Module, dict[str, Any]]:
    """The model that `save_weights` wrote to `path`, and the metadata that came with it."""
    state, note = read_weights(path)
    creation = note.get("creation")
    if not isinstance(creation, dict) or "name" not in creation:
        raise SubquadError(f"{path} does not say which model it holds: create the model and use load_checkpoint")
    model = create_model(**creation)
    load_checkpoint(model, state)
    return model, note


def _some(keys: list[str], most: int = 3) -> str:
    return ", ".join(keys[:most]) + (", …" if len(keys) > most else "")
