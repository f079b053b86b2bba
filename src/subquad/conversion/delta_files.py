"""What conversion has changed in a network, as a small file; and the converted network as a whole one.

Both are safetensors with a note. A delta holds the tensors that the teacher has not, or has with other numbers, and the
digest of the teacher's weights, without which it means nothing.
"""

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subquad.besides import Network
from subquad.conversion.example_calls import of_outline
from subquad.conversion.replacing import Conversion, conversion_of, convert, converted_layers
from subquad.conversion.towers import made_for, move_to
from subquad.errors import SubquadError, check_suffix, reason_of, shown
from subquad.ranges import Positive, fits
from subquad.text import one_line
from subquad.weights.digest import check_plain, digest_of
from subquad.weights.files import read_weights, within_wrappers, write_tensors
from subquad.weights.fitting import some
from subquad.weights.notes import MOST_SIDE
from subquad.writing import json_text

DELTA, STUDENT = "delta.safetensors", "student.safetensors"
"""What is in the folder of a conversion at the end, beside the record."""

KIND = "conversion"
"""The key of a note that says that a file is of a converted network."""


def save_delta(
    student: nn.Module, path: Path | str, *, teacher: nn.Module | None = None, about: Mapping[str, Any] | None = None
) -> int:
    """Write what conversion and training have changed, whole or not at all; returns the number of its tensors.

    Args:
        student: of `convert`.
        path: of the file, .safetensors.
        teacher: the network before it was converted. Needed where more than attention layers was trained, or
            moved to another size.
        about: what else the note holds, as JSON can hold it: figures, commands.

    Raises:
        SubquadError: other parts were trained and `teacher` is left out, or it is another network; the file has
            another suffix, or converted blocks are gone.
    """
    path, student = _weight_file(path, "what conversion changed is"), within_wrappers(student)
    teacher = None if teacher is None else within_wrappers(teacher)
    conversion, state = _whole(student), student.state_dict()
    check_plain(state)
    before = _state_before(student, conversion, teacher)
    if teacher is not None:
        _check_fits(student, teacher, conversion)
    changed = {name: tensor for name, tensor in state.items() if not _same(tensor, before.get(name))}
    _write(changed, path, student, complete=False, about=about)
    return len(changed)


def save_converted(student: nn.Module, path: Path | str, *, about: Mapping[str, Any] | None = None) -> None:
    """Write all weights of a converted network, with what was done to it; the teacher's are not needed to read it.

    Args:
        student: of `convert`.
        path: of the file, .safetensors.
        about: what else the note holds, as JSON can hold it: figures, commands.

    Raises:
        SubquadError: the file has another suffix, or converted blocks are gone.
    """
    path, student = _weight_file(path, "a converted network is"), within_wrappers(student)
    _whole(student)
    _write(student.state_dict(), path, student, complete=True, about=about)


def load_converted(path: Path | str, teacher: Network, *, in_place: bool = False) -> Network:
    """The converted network of a file of `save_delta` or `save_converted`.

    Args:
        path: of the file, or of the folder of a conversion, whose delta is taken.
        teacher: the network that was converted, with its weights; with any where the file is a whole one.
        in_place: convert `teacher` itself instead of a copy.

    Raises:
        SubquadError: the file holds something else or is damaged, or the teacher is another network than the file's.
    """
    if not isinstance(teacher, nn.Module):
        raise SubquadError(f"the teacher is the network that was converted, with its weights, got {shown(teacher)}")
    path = _path(path)
    if path.is_dir():
        path = path / DELTA
    tensors, note = read_weights(path)
    about = note.get(KIND)
    if not isinstance(about, dict):
        raise SubquadError(f"{path} is no file of a converted network")
    try:
        height, width, prefix = (int(number) for number in about["grid"])
        size = None if about["img_size"] is None else tuple(map(int, about["img_size"]))
        given_prefix = None if about["prefix"] is None else int(about["prefix"])
        attention = {int(number): str(name) for number, name in about["attention"].items()}
        given = None if about.get("given") is None else of_outline(dict(about["given"]))
        settings, complete, digest = dict(about["settings"]), bool(about["complete"]), str(about["teacher"])
        teacher.get_submodule(str(about["embedding"]))
    except (AttributeError, IndexError, KeyError, SubquadError, TypeError, ValueError) as error:
        # `subquad convert` holds networks of transformers as ours are called
        named = str(about.get("embedding")).startswith("network.") and not hasattr(teacher, "network")
        raise SubquadError(
            f"{path} does not fit this {type(teacher).__name__}, or its note is damaged: {type(error).__name__}"
            + (
                "; written of a folder of transformers, its teacher is subquad.open_trained(folder).model"
                if named
                else ""
            )
        ) from None
    if not complete and digest_of(teacher.state_dict(), "") != digest:
        raise SubquadError(
            f"{path} holds changes to other weights than this {type(teacher).__name__} has: load the teacher that was "
            f"converted, whose digest is {digest[:12]}…"
        )
    try:
        as_before: Any = {"img_size": size, "prefix": given_prefix, "given": given, "in_place": in_place}
        student = convert(teacher, attention, **as_before, **settings)
    except SubquadError as error:
        raise SubquadError(f"{path} does not fit this {type(teacher).__name__}: {error}") from None
    if conversion_of(student).grid != (height, width, prefix):
        raise SubquadError(
            f"{path} is of a grid of {height}×{width} tokens behind {prefix}, and this {type(teacher).__name__} of one "
            f"of {conversion_of(student).grid}: make the teacher for images of the same size"
        )
    _move(student, about.get("made_for"), path)
    state = student.state_dict()
    unknown = [name for name in tensors if name not in state or tensors[name].shape != state[name].shape]
    missing = [name for name in state if name not in tensors] if complete else []
    if unknown or missing:
        raise SubquadError(f"{path} does not fit this {type(teacher).__name__}: {some(unknown or missing)}")
    student.load_state_dict(tensors, strict=False)
    noted: Any = student
    # a whole file may have come with other weights than its teacher's
    noted.subquad_conversion = replace(conversion_of(student), teacher=digest)
    return student


def _move(student: nn.Module, size: Any, path: Path | str) -> None:
    """Have a network made for the images that it was for when its file was written, as its tables there are."""
    paths = _inside(conversion_of(student))
    # nothing is said in earlier files, and of networks that don't know their size
    if size is None or size == list(made_for(student, paths) or ()):
        return
    if not fits(size, tuple[Positive, Positive]) or max(size) > MOST_SIDE:
        raise SubquadError(f"{path} is of images of {shown(size)} px: two sides of 1 to {MOST_SIDE} px are taken")
    try:
        move_to(student, paths, (size[0], size[1]))
    except Exception as error:
        # each library's networks have a set_input_size of their own, or none
        raise SubquadError(
            f"{path} is of a network made for images of {size[0]}×{size[1]} px, and this {type(student).__name__} "
            f"can't be moved there ({type(error).__name__}: {one_line(reason_of(error))}): make the teacher for them"
        ) from None


def _inside(conversion: Conversion) -> list[str]:
    return [conversion.embedding, *conversion.paths.values()]


def _path(path: Any) -> Path:
    if not isinstance(path, str | PathLike):
        raise SubquadError(f"`path` names a file, got {shown(path)}")
    return Path(path)


def _weight_file(path: Any, what: str) -> Path:
    """The path of a file to write: readers go by its suffix."""
    path = _path(path)
    check_suffix(path, what, ".safetensors")
    return path


def _whole(student: nn.Module) -> Conversion:
    """What was done to a network; raises SubquadError where not all of it is there, which nothing could read."""
    converted_layers(student)
    return conversion_of(student)


def _write(tensors: Mapping[str, Tensor], path: Path, student: nn.Module, *, complete: bool, about: Any) -> None:
    check_plain(tensors)
    conversion = conversion_of(student)
    # set_input_size may have moved it since it was converted
    now = {"complete": complete, "made_for": made_for(student, _inside(conversion))}
    note = json_text({KIND: conversion.as_note() | now, **(about or {})})
    stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_tensors(stored, path, note)


def _state_before(student: nn.Module, conversion: Conversion, teacher: nn.Module | None) -> dict[str, Tensor]:
    """The teacher's weights: those of `teacher`, or the student's with its old layers, if these are what they were."""
    if teacher is not None:
        before = dict(teacher.state_dict())
        hint = "`teacher` is another network than the one that was converted"
    else:
        before = _with_old_layers(student, conversion)
        hint = (
            "more than attention layers was trained, or set_input_size moved other tables: give `teacher`, the network "
            "before it was converted"
        )
    if digest_of(before, "") != conversion.teacher:
        raise SubquadError(f"can't tell what has changed, since {hint}")
    return before


def _check_fits(student: nn.Module, teacher: nn.Module, conversion: Conversion) -> None:
    """Raise where a student has other parts than its teacher, as a head of one's own, which no delta could bring back.

    One that was moved to another size has other tables alone, and is moved there again when it is read.
    """
    paths = _inside(conversion)
    if made_for(student, paths) != made_for(teacher, paths):
        return
    inside = tuple(f"{path}." for path in conversion.paths.values())
    ours, theirs = (
        {name: tensor.shape for name, tensor in each.state_dict().items() if not name.startswith(inside)}
        for each in (student, teacher)
    )
    if differing := [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]:
        raise SubquadError(
            f"{some(differing)} are not in both, the network and its teacher, or have other shapes, which changes to "
            "the teacher's weights can't say: keep it by subquad.conversion.save_converted"
        )


def _with_old_layers(student: nn.Module, conversion: Conversion) -> dict[str, Tensor]:
    inside = tuple(f"{path}." for path in conversion.paths.values())
    before = {name: tensor for name, tensor in student.state_dict().items() if not name.startswith(inside)}
    for number, layer in converted_layers(student).items():
        for name, tensor in layer.original.state_dict().items():
            before[f"{conversion.paths[number]}.{name}"] = tensor
    return before


def _same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
