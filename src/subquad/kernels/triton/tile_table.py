"""Tiles chosen by time: a table for each kind of device in $SUBQUAD_HOME, which `subquad tune` writes.

    $SUBQUAD_HOME/tiles/nvidia-h200.json
    {"version": 1, "device": "NVIDIA H200", "triton": "3.9.0",
     "tiles": {"linear.state bf16 d64 n4096 h8": {"BLOCK": 64, "num_warps": 4, "num_stages": 2}}}

A kernel's shape is that of its tokens: channels of a head, and the next powers of 2 above the number of tokens and that
of heads of all images; where there are agents or landmarks, above their number as well. What is not in the table has
the tiles that the library comes with. It is looked up when a kernel starts, which torch.compile does not look into, and
it holds nothing but a few numbers out of RANGES. A table of another version of Triton is as if it were not there: what
was fast with that, or could be compiled, need not be so any more.
"""

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.errors import SubquadError, reason_of, shown
from subquad.home import home
from subquad.writing import write_json

VERSION = 1
LARGEST = 2**20
"""Bytes of a table."""

RANGES: dict[str, tuple[int, ...]] = {
    "BLOCK": (16, 32, 64, 128, 256),
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": (1, 2, 3, 4),
}
"""What can be chosen, and from what: tokens of a tile, warps of a program, tiles that are read ahead."""

INTERPRETER = "Triton's interpreter"
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

Tile = dict[str, Any]
Tiles = dict[str, dict[str, int]]
Watcher = Callable[[str, Tile], Tile]

_watcher: Watcher | None = None
_tables: dict[str, Tiles] = {}


def with_choice(kernel: str, defaults: Tile, tokens: Tensor, few: int = 0) -> Tile:
    """The settings of a kernel for tokens (b, h, n, d): `defaults`, and what was chosen by time in their place."""
    if _watcher is None:
        tiles = _tiles_of(device_name(tokens.device))
        return {**defaults, **_known(tiles.get(key_of(kernel, tokens, few)), defaults)} if tiles else defaults
    return {**defaults, **_watcher(key_of(kernel, tokens, few), defaults)}


def _known(choice: Mapping[str, int] | None, defaults: Tile) -> Tile:
    """Of a choice what the kernel has."""
    return {} if choice is None else {name: value for name, value in choice.items() if name in defaults}


def key_of(kernel: str, tokens: Tensor, few: int = 0) -> str:
    """What a choice is known by."""
    b, h, n, d = tokens.shape
    words = [kernel, NAMES[tokens.dtype], f"d{d}", f"n{power_of_2(n)}", f"h{power_of_2(b * h)}"]
    return " ".join([*words, f"f{power_of_2(few)}"] if few else words)


def power_of_2(number: int) -> int:
    """The next one that is not smaller."""
    return 1 << max(number - 1, 0).bit_length()


@lru_cache
def device_name(device: torch.device) -> str:
    """What a device is called in tables."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else INTERPRETER


def path_of(device: str) -> Path:
    """The file of a device's table."""
    return home() / "tiles" / f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def _tiles_of(device: str) -> Tiles:
    """A device's table as kernels use it: read once, and empty, with a warning, where it can't be read."""
    if device not in _tables:
        try:
            _tables[device] = read_tiles(device)
        except SubquadError as error:
            _tables[device] = {}
            warnings.warn(f"{error}; until then kernels have the tiles that they come with", stacklevel=2)
    return _tables[device]


def read_tiles(device: str) -> Tiles:
    """The choices in a device's table; none where there is no table, or one of another Triton.

    Raises:
        SubquadError: it can't be read, or is no such table, in one line.
    """
    path = path_of(device)
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise SubquadError(f"{path} can't be read: {error.strerror}") from None
    try:
        if len(content) > LARGEST:
            raise ValueError(f"it has more than {LARGEST} bytes")
        table = json.loads(content)
        if not isinstance(table, dict) or not isinstance(table.get("tiles"), dict):
            raise ValueError("it holds no tiles")
        if (table.get("version"), table.get("device"), table.get("triton")) != (VERSION, device, version("triton")):
            return {}
        return {str(key): _checked(key, choice) for key, choice in table["tiles"].items()}
    except (ValueError, RecursionError) as error:
        raise SubquadError(f"{path} is no table of tiles, {reason_of(error)}: remove it and tune again") from None


def _checked(key: str, choice: Any) -> dict[str, int]:
    """A choice as it stands in a table."""
    if not isinstance(choice, dict) or not choice.keys() <= RANGES.keys():
        raise ValueError(f"{shown(key)} has {shown(choice)}")
    for name, value in choice.items():
        if isinstance(value, bool) or not isinstance(value, int) or value not in RANGES[name]:
            raise ValueError(f"{shown(key)} has {name} {shown(value)}")
    return choice


def keep_tiles(device: str, tiles: Tiles) -> Path:
    """Add choices to a device's table, which kernels of this process have from then on; returns its file.

    Raises:
        SubquadError: there is something else, or it can't be written.
    """
    path, every = path_of(device), read_tiles(device) | tiles
    write_json(path, {"version": VERSION, "device": device, "triton": version("triton"), "tiles": every}, indent=1)
    _tables[device] = every
    return path


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Let `watcher(key, defaults)` say what kernels have in place of their settings, in all threads."""
    global _watcher
    before, _watcher = _watcher, watcher
    try:
        yield
    finally:
        _watcher = before
