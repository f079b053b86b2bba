"""Write a network for another engine: traced, written aside, checked, and moved into place."""

import importlib.util
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from subquad.diffusion.called_with import MOST_ALIKE, arguments_of
from subquad.errors import SubquadError, check_suffix, reason_of, shown, unknown_name
from subquad.exports.changing_axes import OF_IMAGES, Axes, check_dynamic, images_in
from subquad.exports.checking import (
    TOLERANCES,
    DoesNotRunError,
    answer_of,
    checked_shapes,
    largest_difference,
    other_sides,
    other_sides_of_maps,
    tried_images,
    tried_like,
)
from subquad.exports.file_notes import as_texts
from subquad.exports.formats import EXPORTERS, Exporter, Runner
from subquad.exports.known_arguments import WithArguments, check_alone, in_dtype, places_of_tensors
from subquad.exports.named_answers import with_one_answer
from subquad.exports.programs import (
    MOST_IMAGES,
    FewerImagesError,
    LargerSidesError,
    as_formulas,
    check_most,
    in_turn,
    program_of,
    sizes_without_guards,
)
from subquad.exports.quantizing import INT8, in_int8
from subquad.exports.side_steps import least_taken, step_of_sides
from subquad.inference import in_evaluation
from subquad.models.stated_inputs import possible_channels, stated_size
from subquad.ranges import Pixels, Positive, checks_arguments, height_and_width
from subquad.weights.files import within_wrappers
from subquad.writing import (
    WriteError,
    full_reason,
    little_room,
    naming_what_is_full,
    replacing_together,
    temporary_folder,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: the file.
        format: its name in EXPORTERS.
        shapes: the (images, height, width) at which it was compared with the network; of what is no image, all sizes.
        difference: how far it was off there at most, by the network's largest number.
        least: pixels of the shortest side that it takes, where the size may change.
        step: of pixels; sides are multiples of it, where the size may change.
        most: images at a time, where their number may change.
    """

    path: Path
    format: str
    shapes: tuple[tuple[int, ...], ...]
    difference: float
    least: int | None
    step: int = 1
    most: int | None = None


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Whoever trains calls in mixed precision, which would be written down as casts that no dtype here says."""
    with torch.autocast("cpu", enabled=False):
        yield


@checks_arguments
@in_turn
@_without_autocast()
def export(
    model: nn.Module,
    path: Path | str,
    *,
    format: str = "onnx",
    img_size: Pixels | None = None,
    batch: Positive = 1,
    dynamic: str | Sequence[str] = (),
    dtype: str = "fp32",
    int8: str | None = None,
    given: Mapping[str, Any] | None = None,
    takes: Sequence[str] = (),
    answer: str | None = None,
    notes: Mapping[str, Any] = MappingProxyType({}),
) -> Exported:
    """Write `model` to `path`; the file is there whole and found to be right, or not at all.

    Args:
        model: one of `create_model`, or any network of images that gives one tensor; it is not changed, but put into
            evaluation mode and back.
        path: the file to write.
        format: a name of EXPORTERS.
        img_size: pixels, one number or (height, width); what the network says it is made for if left out.
        batch: images at a time, where their number may not change.
        dynamic: what may change from call to call: "batch", "size", or both, "batch,size".
        dtype: fp32, bf16 or fp16, of parameters and images.
        int8: what of its products of matrices becomes int8: "weights", or "dynamic" for activations as well.
        given: of a network that takes more than images, the arguments of a call by name, as the tower of a network of
            language is handed patches and their numbers: see `WithArguments`.
        takes: which of these the file takes, by name, in this order; the first tensor of floats if left out.
        answer: which of several answers is written, by name; if left out the first beside `given`, else the logits, or
            the only one.
        notes: what the file says beside, by name, as JSON can hold it; formats without room for them leave them out.

    Raises:
        SubquadError: a name is wrong, a package is missing, or the network can't be written as that, in one line.
    """
    exporter, model = exporter_named(format), within_wrappers(model)
    check_int8(int8, format)
    check_dtype(dtype, format)
    path = Path(path)
    check_suffix(path, f"{format} is", exporter.suffix)
    dynamic = names_in(dynamic)
    check_dynamic(dynamic, OF_IMAGES)
    check_parameters(model, DTYPES[dtype])
    of_arguments = (given if given is None else in_dtype(given, DTYPES[dtype]), takes, answer)
    model, most = _as_called(model, *of_arguments, img_size, batch, dynamic)
    if isinstance(model, WithArguments):
        check_dynamic(dynamic, model.axes)
        (batch, size), least = images_in(model.examples, model.axes), least_pixels(model)
    else:
        size, least = _size_of_images(model, img_size, dynamic)
    check_most(dynamic, batch, size, most)
    wanted = _Wanted(format, size, batch, tuple(dynamic), DTYPES[dtype], int8, least, as_texts(notes), most=most)
    with in_evaluation(model):
        if not isinstance(model, WithArguments):
            tried = [torch.zeros(batch, count, *size, dtype=wanted.dtype) for count in possible_channels(model)]
            model = with_one_answer(model, tried, answer)
        return _written(model, path, exporter, wanted)


def _as_called(
    model: nn.Module,
    given: Mapping[str, Any] | None,
    takes: Sequence[str],
    answer: str | None,
    img_size: Pixels | None,
    batch: int,
    dynamic: Sequence[str],
) -> tuple[nn.Module, int]:
    """A network with what it is called with beside images, where that is given or known, and how many images it takes.

    Raises:
        SubquadError: what is said of it does not go together.
    """
    if given is not None:
        check_alone(img_size, batch)
        return WithArguments(model, given, takes, answer), MOST_IMAGES
    if takes:
        raise SubquadError("takes says what a file takes of what is given, which is not there")
    size = None if img_size is None else height_and_width(img_size)
    # one time is told of all images, which is seen where there are several
    if (known := arguments_of(model, size, 2 if "batch" in dynamic else batch)) is None:
        return model, MOST_IMAGES
    return WithArguments(model, known, list(places_of_tensors(known)), answer), MOST_ALIKE


def _size_of_images(model: nn.Module, img_size: Pixels | None, dynamic: Sequence[str]) -> tuple[tuple[int, int], int]:
    """Height and width of the images that are traced, and the shortest side that a program of any size takes."""
    pixels = img_size if img_size is not None else stated_size(model)
    if pixels is None:
        raise SubquadError("this network does not say what images it was made for: name their pixels, img_size=…")
    size, least = height_and_width(pixels), least_pixels(model)
    if "size" in dynamic:
        _check_least(size, least)
    return size, least


def _check_least(size: tuple[int, int], least: int) -> None:
    if min(size) < least:
        raise SubquadError(f"for images of any size this network takes at least {least} px, got {size[0]}×{size[1]}")


def names_in(dynamic: str | Sequence[str]) -> list[str]:
    """What may change, by name; as the command takes it, too: "batch,size"."""
    return [name.strip() for name in dynamic.split(",") if name.strip()] if isinstance(dynamic, str) else list(dynamic)


def exporter_named(name: str) -> Exporter:
    """A format that can be written here.

    Raises:
        SubquadError: nothing has that name, or a package that it needs is not installed.
    """
    if not isinstance(name, str):
        raise SubquadError(f"format is a name, one of {', '.join(sorted(EXPORTERS))}, got {shown(name)}")
    if name not in EXPORTERS:
        raise unknown_name("format", name, EXPORTERS)
    if missing := [package for package in EXPORTERS[name].needs if importlib.util.find_spec(package) is None]:
        raise SubquadError(f"{name} needs {' and '.join(missing)}: pip install 'subquad[export]'")
    return EXPORTERS[name]


def check_dtype(dtype: str, format: str) -> None:
    """Raise SubquadError where there is no such dtype, or the format's engine does not compute in it."""
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    if dtype not in (able := EXPORTERS[format].dtypes):
        formats = ", ".join(name for name in EXPORTERS.usable_names() if dtype in EXPORTERS[name].dtypes)
        raise SubquadError(f"{format} is not written in {dtype}, but in {', '.join(able)}: {formats} can be")


def check_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Raise SubquadError where parameters are of another dtype, or they or buffers are not on the CPU."""
    tensors = (*model.parameters(), *model.buffers())
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
    if device is not None and device.type == "meta":
        raise SubquadError(
            "this network is on meta, where no weights are: model.to_empty(device='cpu') and load them first"
        )
    if device is not None:
        raise SubquadError(f"networks are written from the CPU, and this one is on {device}: model.cpu() first")
    before = {parameter.dtype for parameter in model.parameters()}
    if before - {dtype}:
        raise SubquadError(
            f"the network is {' and '.join(sorted(map(str, before)))}: bring it to {dtype} first, model.to(…)"
        )


def check_int8(what: str | None, format: str) -> None:
    """Raise SubquadError where a format can't hold that in int8, or torchao is missing."""
    if what is None:
        return
    if what not in INT8:
        raise unknown_name("int8", what, INT8)
    if what in EXPORTERS[format].int8_files:
        return
    if what not in EXPORTERS[format].int8:
        all_of_it = ((name, EXPORTERS[name]) for name in EXPORTERS.usable_names())
        able = [name for name, one in all_of_it if what in (*one.int8, *one.int8_files)]
        raise SubquadError(f"{format} is not written with int8 {what}: {', '.join(able)} can be")
    if importlib.util.find_spec("torchao") is None:
        raise SubquadError(f"int8 in {format} needs torchao: pip install 'subquad[export]'")


def least_pixels(model: nn.Module) -> int:
    """The shortest side that a program for any size is to take: two patches of the coarsest map, and whole windows."""
    parts = list(model.modules())
    # said by what may be wrapped
    if info := next((said for part in parts if (said := getattr(part, "feature_info", None))), None):
        two = max(level["reduction"] for level in info) + 1
    else:
        # which leaves out what is not a whole patch
        cuts = (one for one in parts if isinstance(one, nn.Conv2d) and one.stride == one.kernel_size)
        two = max(2 * max((max(one.stride) for one in cuts), default=1), _reduction(parts) + 1)
    return max(two, *(getattr(part, "least_size", 1) for part in parts))


def _reduction(parts: Iterable[nn.Module]) -> int:
    """How many pixels lie between two places of the coarsest map that convolutions of overlapping patches lead to."""
    convolutions = (one for one in parts if isinstance(one, nn.Conv2d) and one.groups == 1)
    chain: list[nn.Conv2d] = []
    for one in (one for one in convolutions if 1 < one.stride[0] < one.kernel_size[0]):
        # others stand beside
        if not chain or one.in_channels == chain[-1].out_channels:
            chain.append(one)
    return prod(max(one.stride) for one in chain)


@dataclass(frozen=True)
class _Wanted:
    """The arguments of `export`, checked."""

    format: str
    size: tuple[int, int]
    batch: int
    dynamic: tuple[str, ...]
    dtype: torch.dtype
    int8: str | None
    least: int
    notes: Mapping[str, str]
    step: int = 1
    most: int = MOST_IMAGES


def _written(model: nn.Module, path: Path, exporter: Exporter, wanted: _Wanted) -> Exported:
    if isinstance(model, WithArguments):
        examples, axes = model.examples, model.axes
    else:
        images = torch.zeros(wanted.batch, _taken_channels(model, wanted), *wanted.size, dtype=wanted.dtype)
        examples, axes = (images,), OF_IMAGES
    wanted = _in_steps(model, examples, axes, wanted)
    other = _other_sides_of(model)(wanted.least, wanted.step)
    shapes = checked_shapes(wanted.size, wanted.batch, wanted.dynamic, other)
    if isinstance(model, WithArguments):
        tried = tried_like(examples, axes, shapes)
    else:
        tried = tried_images(shapes, images.shape[1], wanted.dtype)
    tolerance = TOLERANCES[torch.int8 if wanted.int8 else wanted.dtype]
    with warnings.catch_warnings(), temporary_folder("export") as folder:
        # of the libraries that translate, about themselves
        warnings.simplefilter("ignore")
        aside = folder / path.name
        try:
            run = _translated(model, aside, exporter, wanted, examples, axes)
        except LargerSidesError as error:
            _check_least(wanted.size, error.least)
            return _written(model, path, exporter, replace(wanted, least=error.least))
        except FewerImagesError as error:
            check_most(wanted.dynamic, wanted.batch, wanted.size, error.most)
            return _written(model, path, exporter, replace(wanted, most=error.most))
        try:
            difference = largest_difference(model, run, tried, wanted.dtype, tolerance)
        except DoesNotRunError as error:
            raise SubquadError(f"{error}{_hint(model, wanted)}") from error
        # what belongs to it has its name, and another suffix
        files = sorted(folder.iterdir(), key=lambda file: file.name == path.name)
        targets = [path.with_name(file.name) for file in files]
        with replacing_together(targets) as places:
            for file, target, place in zip(files, targets, places, strict=True):
                with naming_what_is_full(target):
                    shutil.copyfile(file, place)
    least = wanted.least if "size" in wanted.dynamic else None
    most = wanted.most if "batch" in wanted.dynamic else None
    compared: Sequence[tuple[int, ...]] = shapes
    if isinstance(model, WithArguments):
        compared = list(dict.fromkeys(tuple(one.shape) for _, tensors in tried for one in tensors))
    return Exported(path, wanted.format, tuple(compared), difference, least, wanted.step, most)


def _other_sides_of(model: nn.Module) -> Callable[[int, int], tuple[int, int]]:
    """At which sides a network is tried beside its own."""
    return other_sides_of_maps if isinstance(model, WithArguments) else other_sides


def _in_steps(model: nn.Module, examples: Sequence[Tensor], axes: Sequence[Axes], wanted: _Wanted) -> _Wanted:
    """What is wanted, with the number of which all sides are multiples that this network takes."""
    if "size" not in wanted.dynamic:
        return wanted

    def run(size: tuple[int, int]) -> None:
        answer_of(model, *(one.resized(example, 1, size) for example, one in zip(examples, axes, strict=True)))

    try:
        step, least = step_of_sides(model, run, wanted.least, _other_sides_of(model))
    except SubquadError as error:
        raise SubquadError(f"{error}{_hint(model, wanted)}") from error
    if isinstance(model, WithArguments):
        # what halves maps without a stride says nothing
        least = least_taken(run, least, step)
    return replace(wanted, step=step, least=least)


def _taken_channels(model: nn.Module, wanted: _Wanted) -> int:
    """The channels of the images that a network takes; raises what it says of the first ones that it may have.

    What a network can't do is said before minutes of tracing.
    """
    refusal = None
    for channels in possible_channels(model):
        try:
            answer_of(model, torch.zeros(wanted.batch, channels, *wanted.size, dtype=wanted.dtype))
        except SubquadError as error:
            refusal = refusal or error
        else:
            return channels
    assert refusal is not None
    raise refusal


def _translated(
    model: nn.Module,
    path: Path,
    exporter: Exporter,
    wanted: _Wanted,
    examples: Sequence[Tensor],
    axes: Sequence[Axes],
) -> Runner:
    """Write the network to `path` and open that in its engine."""
    try:
        traced = in_int8(model, wanted.int8) if wanted.int8 and wanted.int8 in exporter.int8 else model
        bounds = {"least": wanted.least, "step": wanted.step, "most": wanted.most}
        program = program_of(traced, examples, wanted.dynamic, axes, **bounds)
        with as_formulas(), sizes_without_guards():
            exporter.write(program, path)
        if wanted.int8 and (quantize := exporter.int8_files.get(wanted.int8)):
            quantize(path)
        if wanted.notes and exporter.describe is not None:
            exporter.describe(path, wanted.notes)
        return exporter.load(path)
    except SubquadError:
        raise
    except Exception as error:
        if (reason := full_reason(error)) is not None:
            place = f"there is no room for {path.name} among temporary files in {path.parent.parent}: {reason}"
            hint = _little_room(model, path.parent) or ": set TMPDIR to a folder that takes more"
            raise WriteError(f"it can't be written as {wanted.format}: {place}{hint}") from error
        reason = f"{type(error).__name__}: {reason_of(_first_cause(error))}"
        hint = _little_room(model, path.parent) or _hint(model, wanted, reason)
        raise SubquadError(f"it can't be written as {wanted.format}: {reason}{hint}") from error


def _first_cause(error: BaseException) -> BaseException:
    """What went wrong first: what torch.onnx itself raises says only which of its steps it was."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _little_room(model: nn.Module, folder: Path) -> str:
    """What to say where a network may not have fitted into its temporary folder, which not every engine says."""
    numbers = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    # what translates it writes it several times, and compilers what they compile
    return little_room(folder, 3 * numbers + 2**26)


def _hint(model: nn.Module, wanted: _Wanted, reason: str = "") -> str:
    """What to do about a program of any batch or size that can't be had, for this reason."""
    if isinstance(model, WithArguments):
        # of which anything may be the reason
        said = " and ".join(wanted.dynamic)
        return f"; if it takes one {said} alone, leave that out of what is dynamic" if said else ""
    if "batch" in wanted.dynamic and "Constraints violated (batch" in reason:
        return (
            "; the network's own code makes a number of the batch, as len(images) and int(…) do: write images.shape[0] "
            "there, or leave batch out of what is dynamic"
        )
    if "size" not in wanted.dynamic:
        return ""
    return (
        "; if it takes images of one size alone, leave size out of what is dynamic, or make it for any: one of timm "
        "with dynamic_img_size=True, dynamic_img_pad=True"
    )
