"""What there is: mechanisms, hosts and models as rows of text, for listings."""

import fnmatch
import inspect
from collections.abc import Callable
from typing import Any

import torch

from subquad.attention import ATTENTION, QUADRATIC
from subquad.errors import unknown_name
from subquad.models.create import create_model, settings_of
from subquad.models.variants import HOSTS, VARIANTS
from subquad.text import si

Row = dict[str, str]


def mechanism_rows() -> list[Row]:
    """Name, cost, inputs and settings of every mechanism."""
    rows = []
    for name, cls in ATTENTION.items():
        settings = ", ".join(f"{key}={value}" for key, value in settings_of(name).items())
        cost = "n²" if name in QUADRATIC else "n"
        rows.append({"mechanism": name, "cost": cost, "inputs": " ".join(cls.inputs), "settings": settings})  # type: ignore[attr-defined]
    return rows


def host_rows() -> list[Row]:
    """Name and first line of every host."""
    return [
        {"host": name, "what": inspect.getdoc(inspect.getmodule(host)).splitlines()[0]}  # type: ignore[union-attr]
        for name, host in HOSTS.items()
    ]


def model_rows() -> list[Row]:
    """Sizes of every network, its parameters counted with softmax attention and 1000 classes."""
    rows = []
    for name, variant in VARIANTS.items():
        with torch.device("meta"):
            model = create_model(name)
        size: Any = model.img_size
        params = sum(parameter.numel() for parameter in model.parameters())
        shape = f"{variant.arguments['embed_dim']} wide, {'-'.join(map(str, variant.depths))} deep"
        rows.append({"model": name, "host": variant.host, "size": shape, "px": f"{size[0]}×{size[1]}"})
        rows[-1] |= {"params": si(params), "recipe": variant.recipe}
    return rows


LISTINGS: dict[str, Callable[[], list[Row]]] = {
    "mechanisms": mechanism_rows,
    "hosts": host_rows,
    "models": model_rows,
}


def listing(what: str, pattern: str = "*") -> str:
    """One listing as a table, its rows filtered by a shell pattern on their names; empty if none is left."""
    if what not in LISTINGS:
        raise unknown_name("listing", what, LISTINGS)
    rows = [row for row in LISTINGS[what]() if fnmatch.fnmatch(next(iter(row.values())), pattern)]
    if not rows:
        return ""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
