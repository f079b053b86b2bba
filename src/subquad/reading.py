"""YAML and settings, wherever they come from: small, shallow, and without what would grow beyond its text."""

import re
from pathlib import Path
from typing import Any

import yaml

from subquad.errors import SubquadError, reason_of, shown

MOST_BYTES = 2**17
DEEPEST = 32
LONGEST = 2**12
"""Characters of a value: numbers of more take long to read."""

MOST_ENTRIES = 2**14
"""Of a document, what its aliases stand for counted as often as they are used."""


# the one in C, where PyYAML has it, is ten times as fast
_Fast: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Fast):
    """PyYAML's, but for keys that are there twice: it would take the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # in front of what `<<` brings along, which own keys may override
        seen: set[Any] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is there twice", key.start_mark)
            seen.add(key.value)
        return dict(super().construct_mapping(node, deep))


def read_yaml(path: Path) -> Any:
    """What a YAML file says.

    Raises:
        FileNotFoundError: there is none.
        SubquadError: where it can't be read, is no YAML, larger than 128 KiB or deeper than 32 levels, in one line.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SubquadError(f"{path} can't be read: {error.strerror}") from None
    if len(content) > MOST_BYTES:
        raise SubquadError(f"{path} is no recipe: it has more than {MOST_BYTES // 1024} KiB")
    try:
        return parse_yaml(content.decode("utf-8"))
    except (SubquadError, UnicodeDecodeError) as error:
        raise SubquadError(f"{path} is not YAML: {reason_of(error)}") from None


def parse_yaml(text: str) -> Any:
    """What a text in YAML says; raises a SubquadError in one line."""
    if len(text) > MOST_BYTES:
        raise SubquadError(f"it has more than {MOST_BYTES // 1024} KiB")
    try:
        _check_size(text)
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, AttributeError, TypeError) as error:
        # numbers of thousands of digits and days that no month has are no YAMLError
        raise SubquadError(reason_of(error).replace(' in "<unicode string>",', ",")) from None


def _check_size(text: str) -> None:
    """Raise for a text that is too deep or stands for too much, before any of it is made."""
    anchored: dict[str, int] = {}
    # name and number of entries so far of each collection that is open
    opened: list[tuple[str | None, int]] = []
    entries = 0
    for event in yaml.parse(text, _Fast):
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, entries))
            entries += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor is not None:
                anchored[anchor] = entries - before
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in opened):
                raise SubquadError(f"*{event.anchor} stands inside of itself")
            entries += anchored.get(str(event.anchor), 1)
        elif isinstance(event, yaml.ScalarEvent):
            entries += 1
            if len(event.value) > LONGEST:
                raise SubquadError(f"it has a value of more than {LONGEST} characters")
        if len(opened) > DEEPEST:
            raise SubquadError(f"it is deeper than {DEEPEST} levels")
        if entries > MOST_ENTRIES:
            raise SubquadError(f"it has more than {MOST_ENTRIES} entries")


_WORDS = {"true": True, "false": False, "none": None, "null": None}
_WHOLE = re.compile(r"[+-]?[0-9]+")
_FRACTION = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_COMMA = re.compile(r",(?![^\[]*\])")
"""Between settings, not within a list."""


def parse_settings(text: str, within: str = "") -> dict[str, Any]:
    """What "name=value,name=value" says: `num_agents=16,local=false` is {"num_agents": 16, "local": False}.

    A value is a number, true, false, none, [a list, of, these], or else text, with quotation marks or without.

    Args:
        text: the settings.
        within: the longer text that they are a part of, for complaints.

    Raises:
        SubquadError: for a part that is no setting, a name that is there twice, or a value of thousands of characters.
    """
    settings: dict[str, Any] = {}
    for part in filter(None, _COMMA.split(text)):
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals or not name:
            raise SubquadError(f"{shown(part)} in {shown(within or text)} is no setting: write name=value,name=value")
        if name in settings:
            raise SubquadError(f"{shown(within or text)} names {name} twice")
        if len(value) > LONGEST:
            raise SubquadError(f"{name} in {shown(within or text)} has more than {LONGEST} characters")
        value = value.strip()
        if (value[:1] == "[", value[-1:] == "]", value.count("[")) not in ((False, False, 0), (True, True, 1)):
            raise SubquadError(f"{shown(part)} in {shown(within or text)} is no list: write {name}=[1,2,3]")
        settings[name] = _literal(value)
    return settings


def _literal(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _WHOLE.fullmatch(text):
        return int(text)
    if _FRACTION.fullmatch(text):
        return float(text)
    if text.startswith("[") and text.endswith("]"):
        return [_literal(part.strip()) for part in text[1:-1].split(",") if part.strip()]
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    return text
