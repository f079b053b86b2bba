"""What readers of an exported file have to know beside its numbers: classes, and how images are brought to it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from subquad.errors import SubquadError, reason_of, shown
from subquad.tasks.trained import Trained
from subquad.writing import json_text

IMAGES = "RGB, (value / 255 - mean) / std"
"""What a network of ours is shown."""


def notes_of(trained: Trained, img_size: tuple[int, int] | None = None) -> dict[str, Any]:
    """Collect the task of a trained network, its classes, and how it was trained to see images.

    Args:
        trained: the network.
        img_size: (height, width) that it is written for, where that is another size than in training.
    """
    # an encoder has no classes, and no task of ours
    has_none = getattr(getattr(trained, "model", None), "num_classes", None) == 0
    notes: dict[str, Any] = {} if has_none else {"task": trained.task}
    if trained.classes:
        notes["classes"] = list(trained.classes)
    seen = getattr(trained, "input", None)
    if dataclasses.is_dataclass(seen) and not isinstance(seen, type):
        notes |= {"images": IMAGES, **dataclasses.asdict(seen)}
        if img_size is not None and "img_size" in notes:
            notes["img_size"] = img_size
    return notes


def as_texts(notes: Mapping[str, Any]) -> dict[str, str]:
    """Give each note as a text, JSON where it is none already: formats hold nothing else.

    Raises:
        SubquadError: a name is no text or empty, a note is no JSON, or one of them has characters that not all formats
            hold.
    """
    return {
        _name(name): _text(name, note) if isinstance(note, str) else _json(name, note) for name, note in notes.items()
    }


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise SubquadError(f"notes have names, texts such as 'classes', got {shown(name)}")
    return _text(name, name)


def _text(name: str, text: str) -> str:
    # OpenVINO's files end a text at NUL, and no file holds halves of characters
    if wrong := next((one for one in text if one == "\0" or "\ud800" <= one <= "\udfff"), None):
        raise SubquadError(f"the note {shown(name)} has the character {wrong!r}, which files do not hold: leave it out")
    return text


def _json(name: str, note: Any) -> str:
    try:
        return json_text(note)
    except (TypeError, ValueError, RecursionError) as error:
        raise SubquadError(
            f"the note '{name}' must be JSON (texts, numbers, lists, dicts), got {shown(note)}: {reason_of(error)}"
        ) from None
