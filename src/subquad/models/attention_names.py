"""Mechanisms by name, as the API, recipes and the command line write them.

    "agent"                                     in all blocks
    "linear:feature_map=elu,local=true"         with settings of its own
    "agent+agent+softmax"                       one for each stage or block; so is ["agent", "agent", "softmax"]
    ["agent", [["agent", 2], ["softmax", 16]]]  pairs of a name and a number stand for so many blocks

This is the one reader of them.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from subquad.attention import ATTENTION
from subquad.errors import SubquadError, shown, unknown_name
from subquad.reading import parse_settings

Names = str | Sequence[str | Sequence[Any]]
"""One mechanism for all blocks; one for each stage or block; a (name, count) pair stands for `count` blocks."""

Block = tuple[str, dict[str, Any]]
"""A mechanism's name and its own settings."""

# a plus within a number, as in 1e+3, is followed by a digit
_PLUS = re.compile(r"\+(?=\s*[A-Za-z_])")


def parse_attention(text: str) -> Block:
    """Read "linear:feature_map=elu,local=true": ("linear", {"feature_map": "elu", "local": True}).

    Raises:
        SubquadError: for what is no text, or no settings behind a name.
    """
    if not isinstance(text, str):
        raise SubquadError(f"attention is a name, or one for each stage or block, got {shown(text)}")
    name, _, rest = text.partition(":")
    settings = parse_settings(rest, within=text)
    return name.strip(), {key: value for key, value in settings.items() if value is not None}


def parse_blocks(attention: Names, depths: Sequence[int]) -> list[Block]:
    """Name and own settings of each block's mechanism.

    Raises:
        SubquadError: for a name that is none, or entries that fit neither the stages nor the blocks.
    """
    blocks = [parse_attention(entry) for entry in per_block(split_names(attention), depths, "attention")]
    for mechanism, _ in blocks:
        if mechanism not in ATTENTION:
            raise unknown_name("attention", mechanism, ATTENTION)
    return blocks


def names_in(attention: Any) -> list[str]:
    """The names that `attention` holds, without their settings, each once: of "agent:local=false+softmax" these two."""
    return list(dict.fromkeys(entry.partition(":")[0].strip() for entry in _entries(split_names(attention))))


def per_block(entries: Any, depths: Sequence[int], what: str) -> list[Any]:
    """`entries`, one for all, for each stage or for each block, as a list with one for each block."""
    total = sum(depths)
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        return [entries] * total
    expanded = [single for entry in entries for single in _repeat(entry, total)]
    if len(expanded) == total:
        return expanded
    if len(entries) == len(depths):
        return [
            single for entry, depth in zip(entries, depths, strict=True) for single in per_block(entry, [depth], what)
        ]
    raise SubquadError(
        f"{what} has {len(expanded)} entries for {len(depths)} stages and {total} blocks: "
        "give one for all, one for each stage or one for each block"
    )


def is_count(entry: Any) -> bool:
    """Whether an entry is a (value, count) pair."""
    return isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 2 and isinstance(entry[1], int)


def _repeat(entry: Any, most: int) -> list[Any]:
    """A (value, count) pair written out, as far as shows that it is too often."""
    return [entry[0]] * min(entry[1], most + 1) if is_count(entry) else [entry]


def split_names(attention: Any) -> Any:
    """Texts with a plus between names as lists of these, at every level."""
    if isinstance(attention, str):
        parts = _PLUS.split(attention)
        return parts if len(parts) > 1 else attention
    if isinstance(attention, Sequence):
        return [split_names(entry) for entry in attention]
    return attention


def _entries(attention: Any) -> Iterator[str]:
    if isinstance(attention, str):
        yield attention
        return
    for entry in attention[:1] if is_count(attention) else attention:
        yield from _entries(entry)
