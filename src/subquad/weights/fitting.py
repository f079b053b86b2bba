"""Making a state dict fit a model: under its names, its tables at its size; and saying what does not fit."""

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.positions import GridTable
from subquad.text import one_line
from subquad.weights.notes import oblong_size, size_built_for
from subquad.weights.released import HOST_OF, family_of, from_timm, to_our_layout
from subquad.weights.released_heads import head_of, to_our_network

MOST_RESAMPLED = 2**26
"""Numbers of tables that are stored for another size than the note says, or made for one and moved to another."""


@dataclass(repr=False)
class Adapted:
    """A state dict made ready for a model.

    Attributes:
        state: under the model's names.
        family: whose layout it had; None for ours.
        resized: entries that were resampled to the model's size.
        new: entries of the model that the weights have nothing for, and that are as they were.
        unused: entries of the weights that the model has no place for.
        partly: fused projections of which the weights have some parts: queries and values, but no gate.
    """

    state: dict[str, Tensor]
    family: str | None = None
    resized: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    partly: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        """What was done, in one line."""
        layout = f"the released {self.family} layout" if self.family else "our layout"
        what = (("resampled", self.resized), ("partly new", self.partly), ("new", self.new), ("unused", self.unused))
        parts = [f"{len(names)} {words} ({some(_kinds(names))})" for words, names in what if names]
        return ", ".join([f"{len(self.state) - len(self.new)} entries from {layout}", *parts])

    def keep_what_fits(self, own: dict[str, Tensor], model: nn.Module) -> None:
        """Leave out what has no place in `own`, the entries of `model`, and take from there what is missing."""
        for name in self.state.keys() & own.keys():
            if (mixed := _of_other_parts(self.state[name], own[name], _layer_above(model, name))) is not None:
                self.state[name] = mixed
                self.partly.append(name)
        fitting = {
            name: tensor
            for name, tensor in self.state.items()
            if name in own and tensor.shape == own[name].shape and _converts(tensor, own[name])
        }
        self.new = [name for name in own if name not in fitting]
        self.unused = [name for name in self.state if name not in fitting]
        self.resized = [name for name in self.resized if name in fitting]
        self.state = fitting | {name: own[name] for name in self.new}


SOFTMAX_PARTS = "qkv"
"""What networks of the usual attention project, in this order."""


def _layer_above(model: nn.Module, name: str) -> nn.Module | None:
    """The layer that holds the layer that an entry is of."""
    owner, _, _ = name.rpartition(".")
    return model.get_submodule(owner.rpartition(".")[0]) if owner else None


def _of_other_parts(stored: Tensor, own: Tensor, layer: Any) -> Tensor | None:
    """A stored projection of a layer to queries, keys and values as one to other parts; `own` has what it lacks.

    That may be parts, or heads that the layer's mechanism has beside the host's: the output projection's columns then,
    too. None where it is no such projection, or nothing is lacking.
    """
    parts: Sequence[str] = getattr(layer, "projected", ())
    if not parts or not stored.dim() or stored.shape == own.shape or not _converts(stored, own):
        return None
    num_heads = getattr(layer, "num_heads", 1)
    all_heads = getattr(layer, "all_heads", num_heads)
    if stored.dim() == 2 and stored.shape[0] == own.shape[0]:
        return _wider(stored, own, num_heads, all_heads)
    width = len(own) // len(parts)
    hosts = width * num_heads // all_heads
    if not hosts or stored.shape[1:] != own.shape[1:] or len(stored) != hosts * len(SOFTMAX_PARTS):
        return None
    known = dict(zip(SOFTMAX_PARTS, stored.split(hosts), strict=True))
    mixed = [
        torch.cat([known[part].to(own), rows[hosts:]]) if part in known else rows
        for part, rows in zip(parts, own.split(width), strict=True)
    ]
    return torch.cat(mixed)


def _wider(stored: Tensor, own: Tensor, num_heads: int, all_heads: int) -> Tensor | None:
    """An output projection (c, h·d) as one that reads more heads, whose columns are those of `own`."""
    if stored.shape[1] * all_heads != own.shape[1] * num_heads:
        return None
    return torch.cat([stored.to(own), own[:, stored.shape[1] :]], dim=1)


def stored_grids(note: Mapping[str, Any], model: nn.Module, where: Path | str) -> dict[str, TokenGrid]:
    """The grid that every table of a file stands on, by its name in `model`, where the file's note says it.

    Raises:
        SubquadError: weights of that network mean something else in `model`; `where` names them there.
    """
    sized = next((part for part in model.modules() if _has_size(part)), None)
    if what := _made_otherwise(size_built_for(note), sized):
        raise SubquadError(f"{where}: {what}")
    size = oblong_size(note)
    return {} if size is None else _grids_at(size, model)


def _grids_at(img_size: tuple[int, int], model: nn.Module) -> dict[str, TokenGrid]:
    """The grid of every table of a network, by the table's name, once the network takes images of (height, width)."""
    # a copy without memory, as a file may say any size
    memo: Any = {id(x): nn.Parameter(x.detach().to("meta"), x.requires_grad) for x in model.parameters()}
    moved = copy.deepcopy(model, memo)
    # a dense network has its backbone within
    sized: Any = next((part for part in moved.modules() if _has_size(part)), None)
    if sized is None:
        return {}
    sized.set_input_size(img_size)
    return {name: table.grid for name, table in moved.named_modules() if isinstance(table, GridTable)}


def _made_otherwise(img_size: tuple[int, int], sized: Any) -> str:
    """What weights of a network that was made for images of (height, width) mean otherwise in this one, if anything.

    Mechanisms say it by `differs_on(grid)`, of the grid of their stage.
    """
    grids = sized.grids(img_size) if hasattr(sized, "grids") else []
    for number, grid in enumerate(grids):
        for name, module in sized.stages[number].named_modules():
            if hasattr(module, "differs_on") and (what := module.differs_on(grid)):
                return f"stages.{number}.{name} has {what}: create the model with built_for={img_size}, as theirs was"
    return ""


def _has_size(part: nn.Module) -> bool:
    return hasattr(part, "img_size") and hasattr(part, "set_input_size")


def check_tables(adapted: Adapted, sketch: nn.Module, first: nn.Module) -> None:
    """Raise SubquadError where a note asks for tables of far more numbers than its file has.

    Args:
        adapted: the file's state.
        sketch: the network without memory.
        first: the same as it is made before it is moved to another size.
    """
    own, made = sketch.state_dict(), first.state_dict()
    moved = sum(map(Tensor.numel, made.values())) - sum(map(Tensor.numel, own.values()))
    if (total := max(moved, sum(own[name].numel() for name in adapted.resized))) > MOST_RESAMPLED:
        raise SubquadError(f"its note asks for tables of {total} numbers, and those in it are smaller")


def adapt(state: dict[str, Tensor], model: nn.Module, grids: Mapping[str, TokenGrid] | None = None) -> Adapted:
    """Bring a state dict, in our layout or a released one, to the names and table sizes of `model`.

    `grids` are those that the stored tables stand on, as far as they are known.
    """
    grids = grids or {}
    own = {name: tensor.shape for name, tensor in model.state_dict().items()}
    state = from_timm(under_current_names(state, own))
    # timm's PVTv2 shares most names with ours: what tells a foreign layout is an entry that the model has not
    foreign = state.keys() - own.keys()
    family, head = family_of(foreign), head_of(foreign)
    if head is not None:
        if layout := getattr(model, "layout", ""):
            raise SubquadError(f"these are weights of a network with the head {head}, and the model is a {layout}")
        state, family = _renamed(state, head, own, to_our_network), head
    elif family is not None:
        host = HOST_OF.get(family, family)
        if host != getattr(model, "layout", host):
            raise SubquadError(f"these are weights of a {family} network, and the model is a {model.layout}")
        state = _renamed(state, family, own, to_our_layout)
        # released PVTs of PolaFormer carry a final norm that nothing calls
        if family == "pvt" and "norm.weight" not in own:
            state = {name: tensor for name, tensor in state.items() if name not in ("norm.weight", "norm.bias")}
    adapted = Adapted(dict(state), family)
    # counters that released files may lack, and that nothing reads
    adapted.state |= {
        name: tensor for name, tensor in model.state_dict().items() if name.endswith(COUNTER) and name not in state
    }
    for name in sorted(own.keys() & state.keys()):
        owner, _, parameter = name.rpartition(".")
        stored = grids.get(owner)
        if stored is None and not _is_other_table(state[name], own[name]):
            continue
        table = model.get_submodule(owner)
        if isinstance(table, GridTable) and stored != table.grid:
            resampled = table.fitted(parameter, state[name], stored)
            if resampled.shape == own[name]:
                adapted.state[name] = resampled
                adapted.resized.append(name)
    return adapted


EARLIER_NAMES = ((r"(^|\.)attn\.project\.(weight|bias)$", r"\1attn.qkv.\2"),)
"""What entries of ours were called in earlier versions, as patterns, and what they are called now."""


def under_current_names(state: dict[str, Tensor], own: Collection[str]) -> dict[str, Tensor]:
    """A state dict of an earlier version under today's names; `own` are those of the model that it is for.

    An entry that the model has as it is keeps its name: modules of others may be called as ours were.
    """
    renamed = {}
    for name, tensor in state.items():
        if name not in own:
            for pattern, replacement in EARLIER_NAMES:
                current = re.sub(pattern, replacement, name)
                name = current if current in own and current not in state else name
        renamed[name] = tensor
    return renamed


def rename_earlier(state: dict[str, Tensor], prefix: str, own: Collection[str]) -> None:
    """Bring the entries under `prefix` of a state dict, in place, under today's names.

    For a module that is loaded as a part of another, whatever that is; `own` are the module's own names.
    """
    inner = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    current = under_current_names(inner, own)
    for name in inner.keys() - current.keys():
        del state[prefix + name]
    state.update({prefix + name: tensor for name, tensor in current.items() if name not in inner})


def _renamed(
    state: dict[str, Tensor], family: str, own: dict[str, torch.Size], rename: Callable[..., dict[str, Tensor]]
) -> dict[str, Tensor]:
    try:
        return rename(state, family, own)
    except SubquadError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        # rules expect the axes that the authors' tables have
        raise SubquadError(
            f"its entries are not shaped as in the released {family} layout: {one_line(error)}"
        ) from None


def _is_other_table(stored: Tensor, own: torch.Size) -> bool:
    """Whether a stored tensor can be a table of ours at another size."""
    return stored.shape != own and stored.dim() == len(own) and stored.numel() > 0 and stored.is_floating_point()


COUNTER = ".num_batches_tracked"


def misfits(state: dict[str, Tensor], own: dict[str, Tensor]) -> str:
    """What keeps `state` from being loaded where `own` is, in words; empty if nothing does."""
    missing = sorted(own.keys() - state.keys())
    unexpected = sorted(state.keys() - own.keys())
    common = sorted(own.keys() & state.keys())
    shapes = [
        f"{name} is {tuple(state[name].shape)}, the model's {tuple(own[name].shape)}"
        for name in common
        if own[name].shape != state[name].shape
    ]
    kinds = [
        f"{name} is {_kind(state[name])}, the model's {_kind(own[name])}"
        for name in common
        if own[name].shape == state[name].shape and not _converts(state[name], own[name])
    ]
    return "; ".join(
        f"{len(names)} {what} ({some(names)})"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", shapes),
            ("of another kind", kinds),
        )
        if names
    )


def not_finite(state: dict[str, Tensor]) -> list[str]:
    """Entries with a number that is none or infinite."""
    return [name for name, tensor in state.items() if not _is_finite(tensor)]


def some(names: list[str], most: int = 3) -> str:
    """The first of some names."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def _kinds(names: list[str]) -> list[str]:
    """Names without the numbers of stages, blocks and branches, each once."""
    return list(dict.fromkeys(re.sub(r"\b(stages|blocks|branches)\.\d+\.", "", name) for name in names))


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _converts(stored: Tensor, own: Tensor) -> bool:
    """Whether numbers of one type stand for those of another: floats for floats, and whole ones for counters."""
    if stored.is_floating_point() == own.is_floating_point():
        return stored.is_complex() == own.is_complex() and (stored.dtype == torch.bool) == (own.dtype == torch.bool)
    # trainers that average a state dict make floats of its counters
    return not own.is_complex() and own.dtype != torch.bool and not own.is_floating_point() and _is_whole(stored)


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.is_complex() and (tensor.is_meta or bool((tensor == tensor.round()).all()))


def _is_finite(tensor: Tensor) -> bool:
    if tensor.is_meta or not tensor.numel() or not tensor.is_floating_point():
        return True
    # one pass without a temporary; 8-bit floats know no extremes
    numbers = tensor.detach() if tensor.dtype.itemsize > 1 else tensor.detach().float()
    least, most = numbers.aminmax()
    return bool(least.isfinite() and most.isfinite())
