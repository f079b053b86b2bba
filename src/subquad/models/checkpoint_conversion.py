"""The authors' checkpoints as files of ours: which network a file holds is read off its entries."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from timm.data import ImageNetInfo
from torch import Tensor

from subquad.errors import SubquadError, naming
from subquad.models.assembling import assemble
from subquad.models.networks import NETWORKS, PUBLISHED
from subquad.models.timm_settings import default_cfg
from subquad.models.variants import VARIANTS
from subquad.ranges import checks_arguments
from subquad.weights.files import classes_in, fitted, read_weights, save_weights
from subquad.weights.fitting import Adapted, adapt, check_tables, misfits, stored_grids
from subquad.weights.notes import as_built, creation_of, task_in
from subquad.weights.released import HOST_OF, family_of, our_name
from subquad.weights.released_heads import head_of


@checks_arguments
def convert_checkpoint(
    source: Path | str,
    target: Path | str,
    *,
    name: str | None = None,
    key: str | None = None,
    about: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[str, Adapted]:
    """Write the weights of `source` to `target` as safetensors that say which network they are of.

    Args:
        source: a file of the papers' authors, or of ours.
        target: ends in .safetensors.
        name: the network; found out if left out.
        key: under which key of the file the weights lie, see `read_weights`.
        about: what else the note of the new file says.
        settings: of `create_model`, where the network is not as in the table; those that a file of ours says go without
            saying.

    Returns:
        The network's name, and what was done to the weights.

    Raises:
        SubquadError: if no network of the table fits, or several do, or `target` has another ending.
    """
    target = Path(target)
    if target.suffix != ".safetensors":
        raise SubquadError(f"converted weights are written as .safetensors, got {target.name}")
    state, note = read_weights(source, key=key)
    if task_in(note) is not None:
        settings = _own_settings(note, name, state, source) | settings
    name = name or settings.pop("name", None) or recognise(state, source)
    settings.setdefault("num_classes", classes_in(state) or 0)
    # without memory at first: a file may name a network far larger than its weights
    sketch = assemble(name, **settings, device="meta")
    grids = stored_grids(note, sketch, source)
    first = assemble(name, **as_built(settings), device="meta")
    adapted = fitted(state, sketch, source, grids=grids)
    with naming(Path(source)):
        check_tables(adapted, sketch, first)
    model = assemble(name, **settings)
    adapted = fitted(state, model, source, grids=grids)
    model.load_state_dict(adapted.state)
    note = _evaluation(name, model.num_classes) | note | (about or {}) | {"creation": model.creation}
    save_weights(model, target, note)
    return name, adapted


def _own_settings(
    note: dict[str, Any], name: str | None, state: dict[str, Tensor], where: Path | str
) -> dict[str, Any]:
    """The arguments of the network that a file of ours holds; none where it is to be read as another one's, `name`."""
    try:
        creation = creation_of(note, "classify", len(state))
    except SubquadError as error:
        raise SubquadError(f"cannot open {where}: {error}") from None
    if name is None:
        return creation
    return creation if creation.pop("name", None) == name else {}


def recognise(state: dict[str, Tensor], where: Path | str) -> str:
    """The one network of the table that a state dict fits without resampling anything."""
    if head := head_of(state):
        raise SubquadError(f"{where} is of a network with the head {head}: name it with --model, as NETWORK/{head}_…")
    family = family_of(state)
    names = [our_name(name, family) for name in state] if family else list(state)
    # whose layout it is trained what was published, not with other mechanisms what has the same entries
    tables = (PUBLISHED, NETWORKS) if family else (NETWORKS,)
    of_tables = (
        [name for name in table if _same_depths(name, family, names) and _fits(name, state)] for table in tables
    )
    fitting = next(filter(None, of_tables), [])
    if not fitting:
        raise SubquadError(
            f"{where} fits none of the {len(NETWORKS)} networks: name the nearest with --model to see what differs"
        )
    if len(fitting) > 1:
        raise SubquadError(f"{where} fits {' and '.join(fitting)} alike, entry by entry: name one with --model")
    return fitting[0]


def _same_depths(network: str, family: str | None, names: list[str]) -> bool:
    """Whether a network has the blocks that entries under our names speak of."""
    variant = VARIANTS[NETWORKS[network].variant]
    blocks = {match[0] for name in names if (match := re.match(r"stages\.\d+\.blocks\.\d+\.", name))}
    expected = {f"stages.{s}.blocks.{j}." for s, depth in enumerate(variant.depths) for j in range(depth)}
    return blocks == expected and (family is None or HOST_OF.get(family, family) == variant.host)


def _fits(network: str, state: dict[str, Tensor]) -> bool:
    model = assemble(network, num_classes=classes_in(state) or 0, device="meta")
    try:
        adapted = adapt(state, model)
    except SubquadError:
        # tables on a grid that is none with this network's prefix tokens, say
        return False
    return not adapted.resized and not misfits(adapted.state, model.state_dict())


def _evaluation(name: str, num_classes: int) -> dict[str, Any]:
    """How the network was evaluated: its input, and ImageNet's classes, by the names that its folders have."""
    if num_classes != 1000 or name not in NETWORKS:
        return {}
    cfg = default_cfg(name)
    config = {key: cfg[key] for key in ("mean", "std", "interpolation", "crop_pct", "crop_mode")}
    return {"classes": list(_imagenet_classes()), "input": config, "data": "imagenet"}


@cache
def _imagenet_classes() -> tuple[str, ...]:
    """The names of ImageNet's folders, in order: timm reads a file for them."""
    return tuple(ImageNetInfo().label_names())
