"""The one place where trained networks are opened: of every task, from run folders, files, or timm."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subquad.errors import SubquadError, naming, reason_of
from subquad.models import restore
from subquad.models.pretrained import source_of
from subquad.models.restoring import made_beside
from subquad.ranges import Pixels, checks_arguments
from subquad.runs.run_folder import place_of_data, recipe_beside
from subquad.runs.smp_folders import folder_of_smp, make_smp, open_smp_folder
from subquad.runs.timm_classifiers import folder_of_timm, make_timm, open_timm, open_timm_folder
from subquad.runs.transformers_classes import make_transformers
from subquad.runs.transformers_folders import folder_of_transformers, open_transformers_folder
from subquad.tasks import TASKS, ImageNetwork, Trained, task_named
from subquad.tasks.task_contract import check_opened
from subquad.text import one_line
from subquad.weights.files import BEST, HUB, read_note, weight_file
from subquad.weights.notes import parse_note, task_in
from subquad.writing import json_text

TIMM = "timm/"
"""What names of timm's networks begin with."""

MAKERS = {"timm": make_timm, "transformers": make_transformers, "smp": make_smp}
"""What makes the networks of other libraries again, by the key under which `Trained.made` has their names."""

FOLDERS_OF_OTHERS = (
    (folder_of_timm, open_timm_folder),
    (folder_of_transformers, open_transformers_folder),
    (folder_of_smp, open_smp_folder),
)
"""What finds a folder that another library saved, and what opens it."""

WHOSE = {"timm": "timm's", "transformers": "transformers'", "smp": "segmentation_models_pytorch's"}
"""How these are called in a sentence."""

FOLDERS = {"conversion": "subquad.conversion.opened_conversion"}
"""Folders of another kind than runs, by the name of the .json in them and the key of their files' notes: the module
whose `open_folder` opens them, and whose `for_hub` says what is uploaded of them. It is above this one, and imported
when there is something for it."""


@checks_arguments
def open_trained(
    source: Path | str,
    *,
    task: str | None = None,
    img_size: Pixels | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Open a trained network with what is known of its training.

    Args:
        source: a run folder, whose best weights are taken, or a weight file that training wrote; the folder of a
            conversion, whose teacher is opened with it; or a folder that timm saved (`timm.models.save_for_hf`), or
            transformers (`save_pretrained`, of a classifier, a semantic segmenter, a detector, a network of depth or an
            encoder, and of its image processor), or segmentation_models_pytorch (`save_pretrained`); or "timm/NAME"
            with timm's weights, or "timm/NAME=FILE" with those of a file; or "pretrained/NAME" with the authors'.
        task: what it must be for, a name of `TASKS`; anything if left out.
        img_size: pixels of its images, one number or (height, width), for a network that looks at images of one size;
            as in training if left out.
        device: where it goes; the fastest that there is if left out.

    Returns:
        A `Trained`, of the class that its task has for it: the model in evaluation mode, its classes, its data. What is
        subtracted from pixels, what they are divided by and the classes stand in `model.pretrained_cfg` as well.

    Raises:
        SubquadError: there is no such network or device, it is for another task, or the file is damaged or does not
            say what it holds, in one line that names it.
    """
    opened = _opened(source, task, img_size, _usable(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    _tell_of_pixels(opened)
    return opened


def _opened(source: Path | str, task: str | None, img_size: Pixels | None, where: torch.device) -> Any:
    """The network of a run, a file, a conversion or of timm."""
    if str(source).startswith(TIMM):
        return _for_task(open_timm(str(source).removeprefix(TIMM), img_size, where), source, task)
    path = source_of(source, task)
    for find, open_folder in FOLDERS_OF_OTHERS:
        if theirs := find(path):
            return _for_task(open_folder(theirs, img_size, where), source, task)
    if path.is_dir() and not any((path / f"{kind}.json").is_file() for kind in FOLDERS):
        # as `subquad.upload` leaves a conversion: its weights alone say what they are
        path = path / HUB if not (path / BEST).is_file() and (path / HUB).is_file() else path
    for kind_of_folder, module in FOLDERS.items():
        if (path / f"{kind_of_folder}.json").is_file() or (path.is_file() and kind_of_folder in read_note(path)):
            return import_module(module).open_folder(path, task=task, img_size=img_size, device=where)
    file = weight_file(path)
    if task is None:
        with naming(file):
            # what says nothing is refused where it is read
            task = _known(task_in(read_note(file)) or "classify")
    kind = task_named(task)
    model, note = restore(file, kind.name, kind.build)
    with naming(file):
        opened = kind.opened(model.eval().to(where), note, recipe_beside(file.parent))
        check_opened(kind, opened)
    opened = replace(opened, made={"note": note | ({} if opened.data is None else {"data": opened.data})})
    data, data_dir = (place_of_data(file.parent, place) for place in (opened.data, opened.data_dir))
    opened = replace(opened, data=data, data_dir=data_dir)
    return opened.image_network(img_size) if isinstance(opened, ImageNetwork) else opened


def _usable(device: torch.device | str) -> torch.device:
    """A device that is there."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise SubquadError(f"device '{device}' can't be used: {reason_of(error).partition('. ')[0]}") from None
    return torch.device(device)


def _tell_of_pixels(opened: Trained) -> None:
    """Let a network, and the backbone in it, say what is asked of them where they go alone, as those of timm do."""
    # detectors say it themselves
    about = getattr(opened, "input", opened.model)
    seen = {name: getattr(about, name, None) for name in ("mean", "std")}
    if None in seen.values():
        # it takes no images, or normalises them itself
        return
    backbone = getattr(getattr(opened.model, "pyramid", None), "backbone", None)
    for network, classes in ((opened.model, opened.classes), (backbone, ())):
        if isinstance(network, nn.Module):
            before: Any = getattr(network, "pretrained_cfg", None) or {}
            said = {"label_names": classes, "num_classes": getattr(network, "num_classes", None)}
            told: Any = network
            told.pretrained_cfg = {**before, **seen, **said}


def made_again(made: Mapping[str, Any], state: Mapping[str, Tensor], *, task: str | None, device: torch.device) -> Any:
    """A network as `Trained.made` says, with weights that mean nothing; what it knows of its training is the same.

    Args:
        made: from a file, which a stranger may have written.
        state: the weights beside it in the file: a network that is far larger than these is not made.
        task: what it must be for; anything if None.
        device: where it goes.

    Raises:
        SubquadError: nothing can be made of it, or it is for another task.
    """
    note = made.get("note")
    makers = {library: made[library] for library in MAKERS if library in made}
    if not isinstance(note, dict) or not all(isinstance(name, str) for name in makers.values()):
        raise SubquadError("its note does not say how the network was made")
    # what is in it is checked like any note
    note = parse_note(json_text(note))
    kind = task_named(task or _known(task_in(note) or "classify"))
    build = next((partial(MAKERS[library], name) for library, name in makers.items()), kind.build)
    opened = kind.opened(made_beside(state, note, kind.name, build).eval().to(device), note, {})
    check_opened(kind, opened)
    return replace(opened, made=made)


def _for_task(opened: Trained, source: Path | str, task: str | None) -> Trained:
    if task not in (None, opened.task):
        whose = next(WHOSE[library] for library in MAKERS if library in opened.made)
        raise SubquadError(f"{source}, a network of {whose}, is for the task {opened.task}, not for {task}")
    return opened


def _known(task: str) -> str:
    if task not in TASKS:
        raise SubquadError(f"it is for the task '{one_line(task, 40)}', which is not here: install what adds it")
    return task
