"""The commands as functions: arguments and a result. The command line parses its arguments and calls these.

import subquad

subquad.train("digits", "runs/mine", attention="agent", epochs=3)
print(subquad.evaluate("runs/mine").text)
for prediction in subquad.predict("runs/mine", ["photos"]):
    print(prediction.path, prediction.probabilities[0])
subquad.report(["runs/mine"], "report.html")
"""

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from torch import nn

from subquad.analysis import Findings, Study, query_maps
from subquad.attention import ATTENTION
from subquad.benchmarks import (
    describe_scaling,
    is_mechanism,
    measure_blocks,
    measure_networks,
    measure_scaling,
    save_rows,
    tune_tiles,
)
from subquad.conversion.conversion_record import REPORT as RECORD
from subquad.conversion.conversion_record import Record, read_record
from subquad.conversion.paired_maps import PairedMaps, maps_of_folder
from subquad.copying import copied
from subquad.data import InputConfig
from subquad.errors import SubquadError, UnknownSettingError, network_within, shown, unknown_name
from subquad.exports import DTYPES, Exported, exporter_named, in_engine, notes_of
from subquad.exports import export as export_network
from subquad.exports.engines import check_file
from subquad.flags import Flag, Number
from subquad.holding import holding
from subquad.inference import optimize
from subquad.large import Outputs, Streamed, check_kept, host_of, identity_of, rows_of, stream_network
from subquad.models import NETWORKS, VARIANTS, create_model, names_in
from subquad.models.stated_inputs import stated_size
from subquad.pages import check_page, measure_of, write_analysis, write_conversion, write_report
from subquad.ranges import Pixels, Positive, checks_arguments, describe, fits, height_and_width
from subquad.runs import open_trained
from subquad.runs.run_records import Group, find_runs, group_runs
from subquad.tasks import CommonRecipe, Gallery, Judgement, Trained, task_named
from subquad.tasks.image_files import check_there
from subquad.tasks.task import Predicted
from subquad.training import compare as compare_mechanisms
from subquad.training import fitting_mechanisms, released_mechanisms
from subquad.training import train as train_run
from subquad.weights.files import within_wrappers

Log = Callable[[str], None]

SHOWN_IN_GALLERY = 4
"""Held-out images on the page of a report."""

STREAMED_IN = ("fp32", "bf16")
"""What `stream` makes a network of that it opens itself, names of `DTYPES`."""


def silent(line: str) -> None:
    """Say nothing."""


def recipe_for(recipe: CommonRecipe | str | Path | None = None, *, task: str = "classify", **fields: Any) -> Any:
    """A recipe with some fields changed.

    Args:
        recipe: one that is there already, the name of one that comes with the task, a YAML file, or None for what the
            task takes for such fields.
        task: what for, a name of `subquad.tasks.TASKS`, where `recipe` does not say.
        fields: of the recipe; `attention="agent"`, `epochs=3`.

    Raises:
        SubquadError: a name or a value is wrong, in one line.
    """
    if isinstance(recipe, CommonRecipe):
        task_named(recipe.task).check_given_data(fields)
        return recipe.replace(**fields)
    return task_named(task).recipe_of(fields, None if recipe is None else str(recipe))


@checks_arguments
def train(
    recipe: CommonRecipe | str | Path | None,
    output: Path | str,
    *,
    task: str = "classify",
    resume: bool = False,
    log: Log = silent,
    **fields: Any,
) -> dict[str, Any]:
    """Train a network; returns the summary of the run: its best figure, its epochs, what it cost.

    Args:
        recipe: see `recipe_for`.
        output: the run's folder, which must not be there yet, with recipe, metrics, weights and summary afterwards.
        task: what for, where `recipe` does not say.
        resume: go on with the run in that folder instead.
        log: gets a line an epoch.
        fields: that replace the recipe's.

    Raises:
        SubquadError: see `subquad.training.train`.
    """
    return train_run(recipe_for(recipe, task=task, **fields), output, resume=resume, log=log)


@checks_arguments
def compare(
    recipe: CommonRecipe | str | Path | None,
    output: Path | str,
    *,
    mechanisms: Sequence[str] | None = None,
    seeds: Sequence[int] = (0,),
    task: str = "classify",
    pretrained: bool = False,
    log: Log = silent,
    **fields: Any,
) -> list[dict[str, Any]]:
    """Train one host with several mechanisms and seeds; returns a row for each mechanism.

    Args:
        recipe: see `recipe_for`.
        output: a folder; runs in it that have finished are kept, broken-off ones go on.
        mechanisms: by name, with settings if wanted: "linear:feature_map=elu"; if left out all but those that refuse
            what the network or the data have.
        seeds: a run for each.
        task: what for, where `recipe` does not say.
        pretrained: start from the authors' weights of each mechanism; those that have some in this host if no
            mechanisms are named.
        log: gets a line an epoch.
        fields: that replace the recipe's.

    Raises:
        SubquadError: in one line, before the first run where a name is wrong.
    """
    made = recipe_for(recipe, task=task, **fields)
    if mechanisms is None:
        mechanisms = released_mechanisms(made.model) if pretrained else fitting_mechanisms(made, log)
    return compare_mechanisms(made, mechanisms, seeds, Path(output), log=log, pretrained=pretrained)


@checks_arguments
def evaluate(
    source: Path | str, *, task: str | None = None, engine: Path | str | None = None, **settings: Any
) -> Judgement:
    """Judge a trained network on held-out data; the result has `text`, and the figures of its task.

    Args:
        source: what `subquad.open_trained` takes: a run folder or a weight file.
        task: what it must be for; anything if left out.
        engine: a file that `subquad.export` wrote of it: its engine answers, in the place of PyTorch.
        settings: the flags of `subquad eval` or of the task's own command: `split="train"`, `data=…`, `batch_size=…`.

    Raises:
        SubquadError: it can't be opened or judged, in one line.
    """
    words = settings.get("data"), settings.get("data_dir")
    if task is not None:
        # weights may have to be fetched
        task_named(task).check_data(*words)
    if engine is not None:
        check_file(engine)
    # networks that look at images of one size are made for it
    trained = open_trained(source, task=task, img_size=settings.get("img_size"))
    kind = task_named(trained.task)
    # its command writes the file, which is no part of judging
    _check_flags("evaluate", settings, [flag for flag in kind.evaluation_flags if flag.key != "output"])
    kind.check_data(*words)
    if engine is not None:
        trained = in_engine(trained, engine)
    return kind.evaluate(trained, **settings)


@checks_arguments
def predict(
    source: Path | str,
    files: Path | str | Iterable[Path | str],
    *,
    task: str | None = None,
    log: Log = silent,
    **settings: Any,
) -> list[Predicted]:
    """What a trained network makes of files: a result for each, with `path`, `text` and what its task gives.

    Args:
        source: what `subquad.open_trained` takes.
        files: image files, and folders in which all images are meant.
        task: what it must be for; anything if left out.
        log: gets a line for each file that is skipped.
        settings: the flags of `subquad predict` or of the task's own command: `top_k=3`, `output=…`, `threshold=…`;
            those left out are as the command has them, the folder that pictures are written to included.

    Raises:
        SubquadError: it can't be opened, or none of the files can be read, in one line.
    """
    paths = [Path(files)] if isinstance(files, str | Path) else [Path(file) for file in files]
    check_there(paths)
    trained = open_trained(source, task=task)
    kind = task_named(trained.task)
    _check_flags("predict", settings, kind.prediction_flags)
    usual = {flag.key: flag.settings["default"] for flag in kind.prediction_flags if "default" in flag.settings}
    return list(kind.predict(trained, paths, log, **usual | settings))


def _check_known(function: str, settings: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise for a setting that a function of this file does not know."""
    for name in settings:
        if name not in known:
            raise unknown_name(f"setting of {function}", name, known, UnknownSettingError)


def _keywords_of(function: Callable[..., Any]) -> list[str]:
    """What a function takes by its name alone, but for who hears of it."""
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name != "log"]


def _check_flags(function: str, settings: Mapping[str, Any], flags: Sequence[Flag]) -> None:
    """Raise for a setting, or a number, that the command line would not take either.

    What a task without a command of its own takes is its own affair.
    """
    if flags:
        _check_known(function, settings, [flag.key for flag in flags])
    for flag in flags:
        number, value = flag.settings.get("type"), settings.get(flag.key)
        if value is None or not isinstance(number, Number):
            continue
        kind: Any = Annotated[number.kind, number.range]
        if not fits(value, kind):
            raise SubquadError(f"{flag.key} must be {describe(kind)}, got {shown(value)}")


@checks_arguments
def stream(
    source: nn.Module | Trained | Path | str,
    image: Any,
    *,
    features: Path | str | None = None,
    labels: Path | str | None = None,
    heat: Path | str | None = None,
    heat_class: int | str | None = None,
    dtype: str | None = None,
    keep: str | None = None,
    tokens_in: Path | str | None = None,
    most_tokens: Positive | None = None,
    progress: bool = False,
) -> Streamed:
    """What a network makes of one image of any size, exactly, with no more in memory than its tokens.

    Args:
        source: a plain host of a mechanism with a state, in evaluation mode; or what `subquad.open_trained` takes or
            gives. Pixels are normalised as in its training where that opened it, or where its `pretrained_cfg` says
            how, as those of timm do; with ImageNet's mean and deviation where nothing says it.
        image: a file (docs/large-images.md says which are read by rows), an array (y, x, channels) of pixels, or a
            tensor (channels, height, width) as the network takes it.
        features: a file to write, .npy or .zarr, or .tif (all of it lies in memory first), of the tokens behind the
            last norm (y, x, c).
        labels: a file to write, .npy, .png, .tif or .zarr, of the class of each token (y, x).
        heat: a file to write, .npy, .tif or .zarr, of the logit of one class for each token (y, x).
        heat_class: the class that heat is of, by name or number; the image's own if left out.
        dtype: fp32 or bf16, of parameters and products, for a network that is opened here; as it is if left out.
        keep: what tokens are kept in between layers: fp32, bf16 or fp64; what the network computes in if left out.
        tokens_in: a folder that tokens are kept in instead of memory; a walk that was broken off goes on from there.
        most_tokens: at work at a time; some thousands if left out.
        progress: whether a bar shows on a terminal how far it is.

    Raises:
        SubquadError: the network can't be streamed, the image can't be read, or a file can't be written, in one line.
    """
    outputs, folder = Outputs(_path(features), _path(labels), _path(heat)), _path(tokens_in)
    read = {"image": Path(image)} if isinstance(image, str | Path) else {}
    outputs.check_files(read if folder is None else read | {"folder of tokens": folder})
    check_kept(keep)
    if isinstance(image, str | Path):
        # weights may have to be fetched
        check_there([image])
    model, about, classes = _to_stream(source, dtype)
    host = host_of(model)
    if elsewhere := {p.device.type for p in model.parameters()} - {"cpu"}:
        raise SubquadError(
            f"networks are streamed on the CPU, and this one is on {' and '.join(elsewhere)}: model.cpu()"
        )
    rows = rows_of(image, about.mean, about.std, host)
    identity = "" if folder is None else identity_of(model, image, about.mean, about.std)
    return stream_network(
        host,
        rows,
        replace(outputs, heat_class=_class_number(heat_class, classes)),
        classes,
        most_tokens=most_tokens,
        keep=keep,
        tokens_in=folder,
        identity=identity,
        progress=progress,
    )


def _path(path: Path | str | None) -> Path | None:
    if path == "":
        raise SubquadError("the name of a file or folder to write is empty: leave it out, or name one")
    return None if path is None else Path(path)


def _to_stream(
    source: nn.Module | Trained | Path | str, dtype: str | None
) -> tuple[nn.Module, InputConfig, Sequence[str]]:
    """A network with how images are brought to it and its classes; opened ones are made ready for inference."""
    usual = InputConfig((224, 224))
    if dtype is not None and isinstance(source, nn.Module | Trained):
        raise SubquadError("dtype is of networks that are opened here: call subquad.optimize(model, dtype) first")
    if isinstance(source, Trained):
        return source.model, getattr(source, "input", usual), source.classes
    if isinstance(source, nn.Module):
        config = getattr(source, "pretrained_cfg", None) or {}
        mean, std = (tuple(config.get(name) or getattr(usual, name)) for name in ("mean", "std"))
        # a head that was replaced has no names
        is_whole = config.get("num_classes") == getattr(source, "num_classes", None)
        names = config.get("label_names") if is_whole else None
        return source, replace(usual, mean=mean, std=std), tuple(names) if isinstance(names, list | tuple) else ()
    if dtype is not None and dtype not in STREAMED_IN:
        raise unknown_name("dtype", dtype, STREAMED_IN)
    trained = open_trained(source, device="cpu")
    return optimize(trained.model, DTYPES[dtype or "fp32"]), getattr(trained, "input", usual), trained.classes


def _class_number(wanted: int | str | None, classes: Sequence[str]) -> int | None:
    if wanted is None or isinstance(wanted, int):
        return wanted
    if wanted in classes:
        return list(classes).index(wanted)
    if wanted.isdecimal():
        return int(wanted)
    if not classes:
        raise SubquadError(f"unknown class {shown(wanted)}: this network has no names of classes, give a number")
    raise unknown_name("class", wanted, classes)


@checks_arguments
def analyze(
    sources: Path | str | Iterable[Path | str],
    output: Path | str | None = None,
    *,
    command: str = "",
    log: Log = silent,
    **settings: Any,
) -> Findings:
    """Measure what the layers of trained networks attend to.

    Args:
        sources: run folders, weight files, or timm's networks as "timm/NAME" or "timm/NAME=FILE".
        output: a folder that gets analysis.html, .csv and .json, and keeps counts as they go; nothing is written if
            left out.
        command: what the page says that it was made by.
        log: gets a line for each network.
        settings: fields of `subquad.analysis.Study`: `images=[…]`, `measures=["entropy"]`, `removed=True`.

    Raises:
        SubquadError: in one line, where a network can't be opened or looked into.
    """
    named = [sources] if isinstance(sources, str | Path) else list(sources)
    if not named:
        raise SubquadError("no networks to analyze: name run folders, weight files, or timm's networks")
    _check_known("analyze", settings, inspect.signature(Study).parameters.keys() - {"log", "output"})
    if output is None:
        return Study(log=log, **settings).of(named)
    folder = Path(output)
    with holding(folder):
        findings = Study(log=log, output=folder, **settings).of(named)
        _write_findings(findings, folder, command)
    return findings


def _write_findings(findings: Findings, folder: Path, command: str) -> None:
    import torch

    every = [row for rows in findings.rows.values() for row in rows]
    note = f"{findings.looked_at}, torch {torch.__version__}; means over heads and images"
    counted = {"removed": findings.hits, "confused": findings.confusions}
    for ending in (".csv", ".json"):
        about: dict[str, Any] = {"about": note} | (counted if ending == ".json" else {})
        save_rows(every, folder / f"analysis{ending}", about)
    write_analysis(folder / "analysis.html", findings, command=command, note=note)


def bench(
    names: Sequence[str] | None = None, sizes: Sequence[int] | None = None, *, log: Log = silent, **settings: Any
) -> list[Any]:
    """Time attention layers, or whole networks, beside softmax; a row for each name and size.

    Args:
        names: mechanisms, with settings as "inline:local=false" or without, or networks, one or several; all mechanisms
            if left out.
        sizes: of mechanisms numbers of tokens, of networks pixels of a side; (196, 784, 3136) and (224, 448) if left
            out.
        log: hears what is measured.
        settings: of `subquad.benchmarks.measure_blocks` or `measure_networks`: `dim=64`, `backward=True`,
            `dtype="bf16"`.

    Raises:
        SubquadError: a name or a setting is wrong, in one line.
    """
    wanted = _names_to_time(names, sizes, log)
    layers = [name for name in wanted if is_mechanism(name)]
    if layers and len(layers) < len(wanted):
        raise SubquadError(f"{layers[0]} is a mechanism and not a network: measure mechanisms and networks apart")
    measure: Callable[..., list[Any]] = measure_blocks if layers else measure_networks
    usual = (196, 784, 3136) if layers else (224, 448)
    _check_known(f"bench for {'mechanisms' if layers else 'networks'}", settings, _keywords_of(measure))
    return list(measure(wanted, usual if sizes is None else sizes, log=log, **settings))


def _names_to_time(names: Sequence[str] | str | None, sizes: Sequence[int] | None, log: Log) -> list[str]:
    """What is timed: all mechanisms where nothing is named; `log` hears which can't be had.

    Raises:
        SubquadError: nothing is left to time, or the sizes are none.
    """
    if sizes is not None and not (fits(sizes, Sequence[Positive]) and sizes):
        raise SubquadError(f"sizes are {describe(Sequence[Positive])}, one at least, got {shown(sizes)}")
    wanted = list(ATTENTION.usable_names(log)) if names is None else [names] if isinstance(names, str) else list(names)
    if not wanted:
        raise SubquadError("nothing to time: name mechanisms or networks")
    return wanted


def tune(
    names: Sequence[str] | None = None, sizes: Sequence[int] | None = None, *, log: Log = silent, **settings: Any
) -> list[Any]:
    """Choose the tiles of Triton's kernels by time on this GPU, and keep them in $SUBQUAD_HOME for all that runs on it.

    Args:
        names: mechanisms, whose layers are timed, or networks; all mechanisms if left out.
        sizes: of mechanisms numbers of tokens, of networks pixels of a side; (1024, 4096) and (224,) if left out.
        log: hears a line for each kernel.
        settings: of `subquad.benchmarks.tune_tiles`: `batch_size=8`, `backward=True`, `dtype="bf16"`, `minutes=5`.

    Returns:
        For each kernel and shape that was not in the table yet, its choice and what that gained.

    Raises:
        SubquadError: there is no CUDA device, or a name or a setting is wrong, in one line.
    """
    wanted = _names_to_time(names, sizes, log)
    usual = (1024, 4096) if all(is_mechanism(name) for name in wanted) else (224,)
    _check_known("tune", settings, _keywords_of(tune_tiles))
    return list(tune_tiles(wanted, usual if sizes is None else sizes, log=log, **settings))


def export(
    source: nn.Module | Path | str,
    path: Path | str | None = None,
    *,
    format: str = "onnx",
    img_size: Pixels | None = None,
    batch: int = 1,
    dynamic: str | Sequence[str] = (),
    dtype: str = "fp32",
    int8: str | None = None,
    given: Mapping[str, Any] | None = None,
    takes: Sequence[str] = (),
    answer: str | None = None,
    log: Log = silent,
) -> Exported:
    """Write a network for another engine; the file is there whole and found to be right, or not at all.

    Args:
        source: a network; or the name of one, with random weights; or what `subquad.open_trained` takes.
        path: the file to write; named as the network, in this folder, if left out.
        format: a name of `subquad.exports.EXPORTERS`: "onnx", "openvino", "pt2" or "aoti".
        img_size: pixels, one number or (height, width); what the network was made or trained for if left out.
        batch: images at a time, where their number may not change.
        dynamic: what may change from call to call: "batch", "size", or both, "batch,size".
        dtype: fp32, bf16 or fp16, of parameters and images; a network of another dtype is copied.
        int8: what of its products of matrices becomes int8: "weights", or "dynamic" for activations as well.
        given: of a network that takes more than images, the arguments of a call by name, as a processor of
            transformers makes them: the file takes the first tensor of floats, and the rest are constants of it. What
            U-Nets of diffusers are called with is known: their files take all of it.
        takes: which of these the file takes, by name, in this order, where it is more than that one.
        answer: which of several answers is written, by name; if left out the first beside `given`, else the logits, or
            the only one.
        log: hears what the weights are.

    Raises:
        SubquadError: a name is wrong, a package is missing, or the network can't be written as that, in one line.
    """
    exporter = exporter_named(format)
    size = None if img_size is None else height_and_width(img_size)
    notes: dict[str, Any] = {}
    if not isinstance(source, nn.Module | str | Path):
        named = f"what is exported is a network, a run folder or a name, got {shown(source)}"
        raise SubquadError(f"{named}{network_within(source)}")
    if isinstance(source, nn.Module):
        model, name = source, type(within_wrappers(source)).__name__.lower()
    elif str(source) in NETWORKS.keys() | VARIANTS.keys() and not Path(source).exists():
        log(f"{source} has random weights: name a run, or say pretrained")
        model, name = create_model(str(source), img_size=size), str(source)
    elif re.fullmatch(r"\w+", str(source)) and not Path(source).exists():
        raise unknown_name("network or run", str(source), NETWORKS.keys() | VARIANTS.keys())
    else:
        trained = open_trained(source, img_size=size, device="cpu")
        model, name = trained.model, Path(source).name
        if not name.strip("."):
            # "." and ".." are folders with names
            name = Path(source).resolve().name
        if getattr(model, "takes_lists", False) is True:
            raise SubquadError(
                f"{source} is of `subquad {trained.task}`, whose networks give lists of what they find, and what is "
                "written gives one tensor"
            )
        size = size or getattr(getattr(trained, "input", None), "img_size", None)
        if size is None and stated_size(model) is None:
            # a network that reads no images says so here
            size = trained.image_network().input.img_size
        notes = notes_of(trained, size)
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    if any(parameter.dtype != DTYPES[dtype] for parameter in model.parameters()):
        model = copied(model).to(DTYPES[dtype])
    target = Path(f"{name}{exporter.suffix}") if path is None else path
    settings: dict[str, Any] = {"format": format, "img_size": size, "batch": batch, "dynamic": dynamic}
    of_arguments: dict[str, Any] = {"given": given, "takes": takes, "answer": answer}
    return export_network(model, target, **settings, **of_arguments, dtype=dtype, int8=int8, notes=notes)


@checks_arguments
def report(
    runs: Path | str | Iterable[Path | str], output: Path | str, *, scaling: bool = True, log: Log = silent
) -> Path:
    """Write one HTML page about runs, which opens anywhere without a network; returns where it is.

    Args:
        runs: run folders, or folders of them; runs that differ by their seed are taken together. Or the folder of one
            conversion, `subquad convert`.
        output: the page to write.
        scaling: measure latency and memory of the runs' mechanisms against the number of tokens.
        log: hears what is measured, and what could not be shown.

    Raises:
        SubquadError: there are no runs, or they can't be compared, in one line.
    """
    paths = [Path(runs)] if isinstance(runs, str | Path) else [Path(run) for run in runs]
    if not paths:
        raise SubquadError("no runs to report: name run folders, or folders of them")
    path = Path(output)
    # before anything is measured for it
    check_page(path)
    if len(paths) == 1 and (paths[0] / RECORD).is_file():
        record = read_record(paths[0])
        write_conversion(record, path, maps=_paired_maps(paths[0], record, log))
        return path
    groups = group_runs(find_runs(paths, log))
    # runs that can't be compared are refused in front of all measuring
    measure_of(groups)
    rows, note = [], ""
    if scaling and (mechanisms := _mechanisms_of(groups)):
        log(f"measuring {', '.join(mechanisms)} against sequence length")
        rows, note = measure_scaling(mechanisms, log=log), describe_scaling()
    shown = _gallery(groups, log)
    maps = [] if shown else query_maps([(group.label, group.first.path) for group in groups], log)
    write_report(groups, path, scaling=rows, scaling_note=note, gallery=shown, maps=maps)
    return path


def _paired_maps(folder: Path, record: Record, log: Log) -> PairedMaps:
    """Maps of a conversion's two networks, or why there are none."""
    try:
        return maps_of_folder(folder, record)
    except SubquadError as error:
        log(f"no attention maps: {error}")
        return PairedMaps(without=f"The networks could not be opened: {error}.")


def _mechanisms_of(groups: Sequence[Group]) -> list[str]:
    """The first mechanism of each run that is one of the table: LaViT has attention of its own."""
    names = (names_in(run.attention)[0] for group in groups for run in group.runs)
    return [name for name in dict.fromkeys(names) if name in ATTENTION]


def _gallery(groups: Sequence[Group], log: Log) -> Gallery | None:
    """What the groups' networks make of held-out images, where their task has pictures of that."""
    task = task_named(groups[0].first.task)
    if not task.has_gallery:
        return None
    networks: list[tuple[str, Any]] = []
    for group in groups:
        try:
            networks.append((group.label, open_trained(group.first.path, task=task.name)))
        except SubquadError as error:
            log(f"no pictures of {group.label}: {error}")
    try:
        return task.gallery(networks, SHOWN_IN_GALLERY) if networks else None
    except SubquadError as error:
        log(f"no pictures: {error}")
        return None
