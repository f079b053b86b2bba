"""What there is: mechanisms, hosts, models, backends and their kernels as rows of text, for listings."""

import fnmatch
import inspect
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from subquad.attention import ATTENTION, traits_of
from subquad.errors import SubquadError, unknown_name
from subquad.kernels import BACKENDS, KERNELS, PLUGGED_IN, kernels_by_title, unavailable
from subquad.models.assembling import settings_of
from subquad.models.attention_names import is_count, names_in
from subquad.models.create import create_model
from subquad.models.networks import NETWORKS
from subquad.models.pretrained import dense_rows, pretrained_rows
from subquad.models.variants import HOSTS, VARIANTS
from subquad.text import si

Row = dict[str, str]

SIZES = Path(__file__).parent / "generated" / "sizes.json"
"""Parameters and pixels of every network, which would take half a minute to count each time."""


def mechanism_rows() -> list[Row]:
    """Name, cost, inputs and settings of every mechanism; of a plug-in that can't be used, why."""
    rows = []
    for name in ATTENTION:
        row = {"mechanism": name, "called": "", "cost": "", "inputs": ""}
        try:
            cls: Any = ATTENTION[name]
            traits = traits_of(cls)
            row |= {"called": traits.label or name, "cost": traits.cost or ("n²" if traits.quadratic else "n")}
            row |= {"inputs": " ".join(cls.inputs)}
            row["settings"] = ", ".join(f"{key}={value}" for key, value in settings_of(name).items())
        except SubquadError as error:
            row["settings"] = str(error)
        rows.append(row)
    return rows


def host_rows() -> list[Row]:
    """Name and first line of every host."""
    return [
        {"host": name, "what": inspect.getdoc(inspect.getmodule(host)).splitlines()[0]}  # type: ignore[union-attr]
        for name, host in HOSTS.items()
    ]


def model_rows(pattern: str = "*") -> list[Row]:
    """Sizes of the networks of a pattern, parameters counted with 1000 classes, and what was published about them."""
    rows, known = [], known_sizes()
    for name in fnmatch.filter(dict.fromkeys((*VARIANTS, *NETWORKS)), pattern):
        network = NETWORKS.get(name)
        variant = VARIANTS[network.variant if network else name]
        params, *px = known.get(name) or sizes_of(name)
        rows.append({"model": name, "attention": attention_label(name, None) if network else "any"})
        rows[-1] |= {"px": "×".join(map(str, px)), "params": si(params), "recipe": variant.recipe}
        rows[-1]["top-1"] = f"{network.top1}" if network and network.top1 else ""
    return rows


def sizes_of(name: str) -> list[int]:
    """Parameters with 1000 classes, height and width of a network: it is built to be counted, which takes a while."""
    model = create_model(name, device="meta")
    return [sum(parameter.numel() for parameter in model.parameters()), *model.img_size]


@cache
def known_sizes() -> dict[str, list[int]]:
    """What `sizes_of` gives, of all networks that are ours; `scripts/model_table.py` writes it."""
    return json.loads(SIZES.read_text(encoding="utf-8"))


def backend_rows() -> list[Row]:
    """Every backend: what it is, and whether it works on this machine or why not."""
    rows = []
    for name in dict.fromkeys([*BACKENDS, *PLUGGED_IN]):
        try:
            reason = unavailable(name)
        except SubquadError as error:
            reason = str(error)
        here = f"no: {reason}" if reason else "yes"
        rows.append({"backend": name, "what": BACKENDS.get(name, "a plug-in"), "here": here})
    return rows


def operation_rows() -> list[Row]:
    """What each backend has kernels for, all else being PyTorch's; "forward" where only without a gradient."""
    return [
        {"operation": title, **{name: backends.get(name, "") for name in KERNELS}}
        for title, backends in kernels_by_title().items()
    ]


def pattern_of(attention: Any) -> str:
    """Mechanisms in words: "agent", or "agent agent agent×2+softmax×16 softmax" by stage."""
    if isinstance(attention, str):
        return attention
    if is_count(attention):
        return f"{attention[0]}×{attention[1]}"
    parts = [
        pattern_of(part) if isinstance(part, str) or is_count(part) else "+".join(map(pattern_of, part))
        for part in attention
    ]
    return ("+" if any(map(is_count, attention)) else " ").join(parts)


def attention_label(model: str, attention: str | None) -> str:
    """What a run of `model` is labelled with: the mechanisms it was given, else those of its row, "agent+softmax"."""
    if attention:
        return attention
    if model not in NETWORKS:
        return "softmax"
    return NETWORKS[model].label or "+".join(names_in(NETWORKS[model].attention))


LISTINGS: dict[str, Callable[[str], list[Row]]] = {
    "mechanisms": lambda pattern: _matching(mechanism_rows(), pattern),
    "hosts": lambda pattern: _matching(host_rows(), pattern),
    "models": model_rows,
    "pretrained": pretrained_rows,
    "pretrained heads": dense_rows,
    "backends": lambda pattern: _matching(backend_rows(), pattern),
    "operations": lambda pattern: _matching(operation_rows(), pattern),
}


def _matching(rows: list[Row], pattern: str) -> list[Row]:
    """The rows whose name, which stands first, is of a shell pattern."""
    return [row for row in rows if fnmatch.fnmatch(next(iter(row.values())), pattern)]


def listing(what: str, pattern: str = "*") -> str:
    """One listing as a table, its rows filtered by a shell pattern on their names; empty if none is left."""
    if what not in LISTINGS:
        raise unknown_name("listing", what, LISTINGS)
    rows = LISTINGS[what](pattern)
    if not rows:
        return ""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
