"""The commands of `subquad`: each parses its arguments, calls the library and prints what comes back."""

import argparse
import contextlib
import difflib
import itertools
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from subquad.errors import SubquadError, check_suffix

RUNS = Path("runs")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a user's mistake is one line on stderr and exit status 2, an interruption status 130."""
    try:
        arguments = make_parser().parse(list(sys.argv[1:] if argv is None else argv))
        with first_process_speaks():
            arguments.run(arguments)
    except SubquadError as error:
        print(f"subquad: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("subquad: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # whoever read the output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


@contextlib.contextmanager
def first_process_speaks() -> Iterator[None]:
    """Of several processes only the first one prints its results; errors are for all of them to say."""
    if os.environ.get("RANK", "0") == "0":
        yield
    else:
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are one line, with the nearest flag suggested."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **settings)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        arguments, unknown = self.parse_known_args(argv)
        if unknown:
            known = [flag for action in arguments.parser._actions for flag in action.option_strings]
            near = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see {arguments.parser.prog} --help"
            raise SubquadError(f"unknown argument '{unknown[0]}': {hint}")
        return arguments

    def error(self, message: str) -> NoReturn:
        raise SubquadError(f"{message}: see {self.prog} --help")


def make_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(prog="subquad", description="Sub-quadratic attention for vision: train, compare, look inside.")
    parser.add_argument("--version", action="version", version=f"subquad {version('subquad')}")
    commands = parser.add_subparsers(required=True, metavar="command", parser_class=Parser)

    def command(name: str, run: Callable[[argparse.Namespace], None], text: str) -> Parser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run, parser=sub)
        return sub

    sub = command("train", run_train, "Train a model with a recipe; flags override the recipe.")
    sub.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this folder")
    add_recipe_flags(sub)

    sub = command("compare", run_compare, "Train one host with several mechanisms and seeds, and print one table.")
    sub.add_argument(
        "--attention", dest="mechanisms", nargs="+", metavar="NAME", help="mechanisms; all of them if left out"
    )
    sub.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED", help="a run for each")
    add_recipe_flags(sub, without=("attention", "seed"))

    sub = command("eval", run_eval, "Accuracy, confusion matrix and throughput of trained weights.")
    add_checkpoint(sub)
    sub.add_argument("--data", help="data set; the one trained on if left out")
    sub.add_argument("--data-dir", help="its folder")
    sub.add_argument("--split", choices=("validation", "train"), default="validation", help="which part of it")
    sub.add_argument("--batch-size", type=positive, default=64, help="images at a time")
    sub.add_argument("--workers", type=int, default=0, help="processes that load images")
    sub.add_argument("--strict", action="store_true", help="stop at a broken image instead of skipping it")
    sub.add_argument("--output", type=Path, help="write the confusion matrix here, as .csv and .png")

    sub = command("predict", run_predict, "Class names and probabilities for images; a picture grid for a folder.")
    sub.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="image files, or folders of them")
    sub.add_argument("--checkpoint", type=Path, required=True, help="run folder or weight file")
    sub.add_argument("--top-k", type=positive, default=5, help="classes to name")
    sub.add_argument("--strict", action="store_true", help="stop at a broken image instead of skipping it")
    sub.add_argument("--grid", type=Path, help="write the picture grid here; predictions.png for a folder")

    text = "Time attention layers, operations or whole networks against what they have to beat."
    sub = command("bench", run_bench, text)
    sub.add_argument("--model", nargs="+", metavar="NAME", help="networks, against the same hosts with softmax")
    sub.add_argument("--unet", metavar="NAME", help="a step of a diffusion U-Net instead: sd15 or sd21, random weights")
    sub.add_argument("--ratio", nargs="+", type=float, default=[0.4], help="shares of tokens that are merged there")
    sub.add_argument("--img-size", nargs="+", type=positive, default=[224, 448], metavar="PX", help="of networks")
    sub.add_argument("--attention", dest="mechanisms", nargs="+", metavar="NAME", help="all of them if left out")
    sub.add_argument("--tokens", nargs="+", type=positive, default=[196, 784, 3136], help="square numbers")
    sub.add_argument("--dim", type=positive, default=192, help="channels")
    sub.add_argument("--num-heads", type=positive, default=3, help="heads")
    sub.add_argument("--ops", action="store_true", help="without projections and local branch: the operations alone")
    sub.add_argument("--batch-size", nargs="+", type=positive, default=[1], metavar="N", help="images at a time")
    dtypes = ("fp32", "bf16", "fp16")
    sub.add_argument("--dtype", nargs="+", choices=dtypes, default=["fp32"], help="of parameters and tokens")
    sub.add_argument("--device", default="cpu", help="cpu, cuda, …")
    sub.add_argument("--backward", action="store_true", help="time forward and backward together")
    sub.add_argument("--compile", action="store_true", help="time what torch.compile makes of layers or operations")
    sub.add_argument("--repeats", type=positive, default=15, help="of each pass, in turn; medians are printed")
    sub.add_argument("--output", type=Path, help="write the rows here, as .csv or .json")
    sub.add_argument("--picture", type=Path, help="draw milliseconds against length or image size here, as .svg")

    sub = command("convert-checkpoint", run_convert, "Write the authors' weights as safetensors of ours.")
    sub.add_argument("source", type=Path, metavar="IN", help="the authors' file; no code in it is run")
    sub.add_argument("target", type=Path, metavar="OUT", help="the .safetensors file to write")
    sub.add_argument("--model", help="the network; found out from the file if left out, where only one fits")
    sub.add_argument("--img-size", type=positive, metavar="PX", help="resample its tables for images of this size")

    sub = command("list", run_list, "What there is: mechanisms, hosts, models, backends and what they compute.")
    sub.add_argument("what", nargs="?", help="mechanisms, hosts, models, backends or operations; all if left out")
    sub.add_argument(
        "--backends", action="store_true", help="only backends, why one does not work here, and what has kernels"
    )
    sub.add_argument("--filter", default="*", metavar="PATTERN", help="names to show, as the shell matches files")

    sub = command("report", run_report, "Write one HTML page about runs, which opens anywhere without a network.")
    sub.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or folders of them")
    sub.add_argument("--output", type=Path, default=Path("report.html"), help="the page to write")
    sub.add_argument("--no-scaling", action="store_true", help="leave out latency and memory against length")
    return parser


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def add_checkpoint(parser: Parser) -> None:
    """The argument that names trained weights."""
    parser.add_argument("checkpoint", type=Path, help="run folder, or a weight file of one")


def add_recipe_flags(parser: Parser, without: Sequence[str] = ()) -> None:
    """--config, where runs go, and a flag for every field of a recipe."""
    from subquad.training import Recipe, recipe_fields, recipe_names

    where = parser.add_argument_group("run")
    named = ", ".join(recipe_names())
    where.add_argument("--config", metavar="RECIPE", help=f"a YAML file, or one of {named}; by the data if left out")
    where.add_argument("--output", type=Path, default=RUNS, help="folder of runs")
    where.add_argument("--experiment", help="name of the run's folder; made of model, attention and data if left out")
    group = parser.add_argument_group("recipe", "each overrides the recipe's value")
    defaults = Recipe()
    for name, (kind, text) in recipe_fields().items():
        if name in without:
            continue
        flag = f"--{name.replace('_', '-')}"
        if is_switch(kind):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
            continue
        shown = getattr(defaults, name)
        text = text if shown in (None, "", {}) else f"{text} (default of a recipe that is silent: {shown})"
        metavar = name.rsplit("_", 1)[-1].upper()
        # several numbers may be written with commas or, as timm has it, with spaces
        count = "+" if "tuple" in str(kind) else None
        group.add_argument(flag, default=argparse.SUPPRESS, metavar=metavar, nargs=count, help=text.replace("%", "%%"))


def is_switch(kind: Any) -> bool:
    """Whether a field's type makes it an on-off flag."""
    return kind is bool or (isinstance(kind, types.UnionType) and bool in typing.get_args(kind))


def recipe_of(arguments: argparse.Namespace, base: Any = None) -> Any:
    """The recipe that the flags describe, on top of `base`, of --config or of what fits the data."""
    from subquad.training import load_recipe, recipe_fields

    given = {name: value for name, value in vars(arguments).items() if name in recipe_fields()}
    given = {name: ",".join(value) if isinstance(value, list) else value for name, value in given.items()}
    if base is None:
        base = load_recipe(arguments.config or default_recipe(given))
    return base.replace(**given)


def default_recipe(given: dict[str, Any]) -> str:
    """The recipe for flags without --config: by the data where they have one of their own, else by the model."""
    from subquad.models import VARIANTS

    by_data = {"digits": "digits", "cifar10": "cifar10_small"}
    data, model = given.get("data", "digits"), given.get("model")
    if data in by_data:
        return by_data[data]
    return VARIANTS[model].recipe if model in VARIANTS else "deit"


def run_train(arguments: argparse.Namespace) -> None:
    """Train, or go on with a run."""
    from subquad.training import load_recipe, train

    if arguments.resume is not None:
        file = arguments.resume / "recipe.yaml"
        if not file.is_file():
            raise SubquadError(f"no run in {arguments.resume} to resume: it has no recipe.yaml")
        recipe, folder = recipe_of(arguments, load_recipe(file)), arguments.resume
    else:
        recipe = recipe_of(arguments)
        name = arguments.experiment or "-".join(filter(None, [recipe.model, recipe.attention, Path(recipe.data).name]))
        folder = arguments.output / name.replace(":", "_").replace("/", "_")
    summary = train(recipe, folder, resume=arguments.resume is not None, log=print)
    best, epoch = summary["best_top1"], summary["best_epoch"] + 1
    print(f"best top-1 {best:.2f} % in epoch {epoch} of {summary['epochs']}; everything is in {folder}")


def run_compare(arguments: argparse.Namespace) -> None:
    """Train with several mechanisms and print the table."""
    from subquad.attention import ATTENTION
    from subquad.training import compare, comparison_table

    mechanisms, recipe = arguments.mechanisms or list(ATTENTION), recipe_of(arguments)
    folder = arguments.output / (arguments.experiment or f"compare-{recipe.model}-{Path(recipe.data).name}")
    rows = compare(recipe, mechanisms, arguments.seeds, folder, log=print)
    print(f"\n{comparison_table(rows)}\n\neverything is in {folder}; `subquad report {folder}` makes a page of it")


def run_eval(arguments: argparse.Namespace) -> None:
    """Evaluate and print accuracy, confusion and throughput."""
    from subquad.evaluation import confusion_text, judge, load_trained, save_confusion

    found = judge(
        load_trained(arguments.checkpoint),
        data=arguments.data,
        data_dir=arguments.data_dir,
        split=arguments.split,
        batch_size=arguments.batch_size,
        workers=arguments.workers,
        strict=arguments.strict,
    )
    result = found.result
    print(f"{result.count} images: top-1 {result.top1:.2f} %, top-5 {result.top5:.2f} %, loss {result.loss:.4f}")
    if found.broken:
        print(f"{len(found.broken)} broken images were skipped, the first is {found.broken[0]}")
    print(f"throughput {found.images_per_second:.0f} images/s on {found.device}, batch {arguments.batch_size}\n")
    print(confusion_text(result.confusion, found.classes))
    if arguments.output is not None:
        files = save_confusion(result.confusion, found.classes, arguments.output)
        print(f"\nthe confusion matrix is in {' and '.join(map(str, files))}")


def run_predict(arguments: argparse.Namespace) -> None:
    """Predict and print, and draw the grid."""
    from subquad.evaluation import load_trained, predict, save_picture_grid

    trained = load_trained(arguments.checkpoint)
    predictions = predict(
        trained.model,
        arguments.images,
        classes=trained.classes,
        input_config=trained.input,
        top_k=arguments.top_k,
        device=trained.device,
        strict=arguments.strict,
        log=print,
    )
    for prediction in predictions:
        best = ", ".join(f"{name} {100 * share:.1f} %" for name, share in prediction.probabilities)
        true = f"  (true: {prediction.true})" if prediction.true is not None else ""
        print(f"{prediction.path}: {best}{true}")
    known = [prediction for prediction in predictions if prediction.true is not None]
    if known:
        right = sum(not prediction.is_wrong for prediction in known)
        print(f"{right} of {len(known)} with a known class are right ({100 * right / len(known):.1f} %)")
    grid = arguments.grid or (Path("predictions.png") if any(path.is_dir() for path in arguments.images) else None)
    if grid is not None:
        save_picture_grid(predictions, grid)
        print(f"the picture grid is in {grid}")


def run_bench(arguments: argparse.Namespace) -> None:
    """Measure and print."""
    import torch

    from subquad.bench import MEASUREMENTS, describe_device, save_rows
    from subquad.report import PICTURES, bench_picture

    for path, kinds in ((arguments.output, MEASUREMENTS), (arguments.picture, PICTURES)):
        if path is not None:
            check_suffix(path, *kinds)
    if arguments.unet and arguments.picture:
        raise SubquadError("--picture draws layers and networks, not --unet")
    keys = ["repeats"] if arguments.unet else ["backward", "repeats"]
    keys += [] if arguments.model or arguments.unet else ["dim", "num_heads", "ops", "compile"]
    settings = {key: getattr(arguments, key) for key in keys}
    device = describe_device(arguments.device)
    several = itertools.product(arguments.batch_size, arguments.dtype)
    each = [settings | {"batch_size": batch_size, "dtype": dtype} for batch_size, dtype in several]
    measure = _unets if arguments.unet else _networks if arguments.model else _blocks
    rows, table = measure(arguments, each)
    said = settings | {"batch_size": arguments.batch_size, "dtype": arguments.dtype}
    what = ", ".join(f"{key.replace('_', ' ')} {_plainly(value)}" for key, value in said.items())
    print(f"\n{table}\n\n{device}, torch {torch.__version__};\n{what}")
    if arguments.output is not None:
        save_rows(rows, arguments.output, {"device": device, "torch": torch.__version__, **said})
        print(f"the rows are in {arguments.output}")
    if arguments.picture is not None:
        bench_picture(rows, arguments.picture)
        print(f"the picture is in {arguments.picture}")


def _plainly(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _blocks(arguments: argparse.Namespace, each: list[dict[str, Any]]) -> tuple[Sequence[Any], str]:
    from subquad.attention import ATTENTION
    from subquad.bench import blocks_table, measure_blocks

    names, lengths = arguments.mechanisms or list(ATTENTION), arguments.tokens
    rows = [
        row
        for settings in each
        for row in measure_blocks(names, lengths, device=arguments.device, log=print, **settings)
    ]
    return rows, blocks_table(rows)


def _networks(arguments: argparse.Namespace, each: list[dict[str, Any]]) -> tuple[Sequence[Any], str]:
    from subquad.bench import measure_networks, networks_table

    names, sizes = arguments.model, arguments.img_size
    rows = [
        row
        for settings in each
        for row in measure_networks(names, sizes, device=arguments.device, log=print, **settings)
    ]
    return rows, f"{networks_table(rows)}\nsoftmax ÷: how many times faster than the same host with softmax."


def _unets(arguments: argparse.Namespace, each: list[dict[str, Any]]) -> tuple[Sequence[Any], str]:
    from subquad.bench import measure_unet, unets_table

    name, sizes, ratios = arguments.unet, arguments.img_size, arguments.ratio
    rows = [
        row
        for settings in each
        for row in measure_unet(name, sizes, ratios, device=arguments.device, log=print, **settings)
    ]
    return rows, unets_table(rows)


def run_convert(arguments: argparse.Namespace) -> None:
    """Convert and say what was done."""
    from subquad.models import convert_checkpoint

    size = {} if arguments.img_size is None else {"img_size": arguments.img_size}
    name, adapted = convert_checkpoint(arguments.source, arguments.target, name=arguments.model, **size)
    layout = f"the released {adapted.family} layout" if adapted.family else "our layout"
    resized = f", {len(adapted.resized)} tables resampled" if adapted.resized else ""
    print(f"{name}: {len(adapted.state)} entries from {layout}{resized}; in {arguments.target}")


def run_list(arguments: argparse.Namespace) -> None:
    """Print one listing or all of them."""
    from subquad.models.catalogue import LISTINGS, listing

    wanted = LISTINGS if arguments.what is None else [arguments.what]
    wanted = ["backends", "operations"] if arguments.backends else wanted
    tables = [table for what in wanted if (table := listing(what, arguments.filter))]
    if not tables:
        raise SubquadError(f"no name matches '{arguments.filter}': see subquad list")
    print("\n\n".join(tables))


def run_report(arguments: argparse.Namespace) -> None:
    """Measure what the page needs, and write it."""
    from subquad.bench import describe_scaling, measure_scaling
    from subquad.report import find_runs, write_report

    found = find_runs(arguments.runs)
    rows, note = [], ""
    if not arguments.no_scaling:
        mechanisms = list(dict.fromkeys(run.attention.split(":")[0].split("+")[0] for run in found))
        print(f"measuring {', '.join(mechanisms)} against sequence length")
        rows, note = measure_scaling(mechanisms, log=print), describe_scaling()
    write_report(arguments.runs, arguments.output, scaling=rows, scaling_note=note, log=print)
    print(f"the report is in {arguments.output}")


if __name__ == "__main__":
    raise SystemExit(main())
