"""`subquad convert` and `subquad advise`."""

import argparse
import dataclasses

from subquad.cli.parser import Commands
from subquad.flags import Number, folder_to_write, not_negative, pixels, positive, share, whole
from subquad.starting import command_line

USUAL = {
    "attention": "agent",
    "align_updates": 500,
    "distil_updates": 500,
    "align_lr": 0.001,
    "distil_lr": 0.0003,
    "opt": "adamw",
    "train": "all",
    "batch_size": 64,
    "scale": 0.5,
}
"""What `subquad.conversion.Plan`, which takes seconds to import, has by default."""

TRAINED = ("all", "attention", "new", "lora")
"""That of `subquad.conversion.distilling`."""


def add_commands(commands: Commands) -> None:
    """The commands `convert` and `advise`."""
    sub = commands.add("convert", run_convert)
    sub.add_argument("source", metavar="MODEL", help="run, weight file, folder of timm or transformers, timm/NAME")
    sub.add_argument("--attention", default=USUAL["attention"], help="mechanism; name:setting=value,… for settings")
    sub.add_argument("--images", required=True, help="data set, folder or archive of images; labels are not used")
    sub.add_argument("--data-dir", metavar="DIR", help="folder or archive of a named data set")
    sub.add_argument("--weights", metavar="FILE", help="weights of timm/NAME")
    sub.add_argument("--output", type=folder_to_write, required=True, help="folder of the converted network")
    which = sub.add_argument_group("which blocks", "all if left out")
    which.add_argument("--blocks", type=Number(int), nargs="+", metavar="N", help="numbers of blocks, from 0")
    which.add_argument("--keep", type=whole, metavar="COUNT", help="keep so many as they were, those that cost most")
    which.add_argument("--tolerance", type=not_negative, help="error of the last features that is allowed, as 0.01")
    which.add_argument("--speedup", type=Number(float, above=1), help="as few as make it so many times as fast")
    which.add_argument("--at", type=positive, metavar="PX", help="side of the image that --speedup is measured on")
    fit = sub.add_argument_group("how it is fitted")
    fit.add_argument("--updates", type=Number(int, at_least=2), metavar="N", help="of both fits, half of them each")
    fit.add_argument("--epochs", type=Number(float, above=0), metavar="E", help="the same, as passes over the images")
    for name, what in (("align_updates", "of layers, each alone"), ("distil_updates", "of the whole network")):
        # what was not given is not among the arguments
        flag, text = f"--{name.replace('_', '-')}", f"{what} (default: {USUAL[name]})"
        fit.add_argument(flag, type=whole, default=argparse.SUPPRESS, help=text)
    budget = "that both take at most"
    fit.add_argument("--time-budget", type=Number(float, above=0), metavar="MINUTES", help=budget)
    fit.add_argument("--align-lr", type=Number(float, above=0), default=USUAL["align_lr"], help="rate of the first")
    fit.add_argument("--distil-lr", type=Number(float, above=0), default=USUAL["distil_lr"], help="and of the second")
    fit.add_argument("--opt", default=USUAL["opt"], help="optimizer of timm for both, as muon")
    fit.add_argument("--train", choices=TRAINED, default=USUAL["train"], help="what distillation trains")
    fit.add_argument("--batch-size", type=positive, default=USUAL["batch_size"], help="images of an update")
    fit.add_argument("--img-size", type=pixels, metavar="PX", help="448 or 384,640; as trained if left out")
    fit.add_argument("--scale", type=share, default=USUAL["scale"], help="least share of an image that is taken")
    fit.add_argument("--crop-padding", type=whole, default=0, metavar="PX", help="shift images instead")
    fit.add_argument("--amp", action="store_true", help="compute in bf16 where it can be")
    fit.add_argument("--seed", type=whole, default=0, help="of the order of the images")
    judge = sub.add_argument_group("what is measured")
    judge.add_argument("--max-judged", type=positive, default=2000, help="images to compare on, held-out ones if any")
    untrained = "rows for landmarks and agents without any training"
    judge.add_argument("--baseline", action="store_true", help=untrained)
    judge.add_argument("--curve", action="store_true", help="what each block costs, though none is kept for it")
    sizes = "time both at these sizes, each 448 or 384,640"
    judge.add_argument("--sizes", type=pixels, nargs="+", default=[], metavar="PX", help=sizes)
    judge.add_argument("--labelled", metavar="DATA", help="judge features by nearest neighbours and a linear probe")
    judge.add_argument("--labelled-dir", metavar="DIR", help="folder or archive of these data")

    sub = commands.add("advise", run_advise)
    sub.add_argument("source", metavar="MODEL", help="a network of ours by name, timm/NAME, or a run folder")
    sizes = "of images, each 448 or 384,640"
    sub.add_argument("--img-size", type=pixels, nargs="+", default=[512, 1024], metavar="PX", help=sizes)
    sub.add_argument("--attention", nargs="+", help="mechanisms; all that are not quadratic if left out")
    sub.add_argument("--blocks", type=Number(int), nargs="+", metavar="N", help="numbers of blocks, from 0")
    sub.add_argument(
        "--engines",
        nargs="*",
        metavar="FORMAT",
        help="of `subquad export`, to time; installed ones if left out, no engine if no FORMAT follows",
    )
    sub.add_argument("--repeats", type=positive, default=5, help="passes of each, in turn")
    sub.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of weights and images")


def run_convert(arguments: argparse.Namespace) -> None:
    """Convert, print what became of it, and write its page."""
    from subquad import api
    from subquad.conversion import Plan, convert_run
    from subquad.conversion.conversion_plan import PLAN
    from subquad.conversion.conversion_run import is_kept
    from subquad.errors import InterruptedRunError, SubquadError

    _check_data(arguments)
    given = vars(arguments)
    source = str(arguments.source)
    if arguments.weights is not None:
        if not source.startswith("timm/") or "=" in source:
            raise SubquadError("--weights are of a network of timm: name it as timm/NAME")
        source = f"{source}={arguments.weights}"
    lengths = {name: given[name] for name in ("align_updates", "distil_updates") if name in given}
    if sum((arguments.updates is not None, arguments.epochs is not None, bool(lengths))) > 1:
        raise SubquadError(
            "--updates and --epochs are of both fits together, --align-updates and --distil-updates of each alone: "
            "give one kind of them"
        )
    names = {field.name for field in dataclasses.fields(Plan)} - {"source", "blocks", "align_updates", "distil_updates"}
    blocks = None if arguments.blocks is None else tuple(arguments.blocks)
    plan = Plan(source=source, blocks=blocks, **lengths, **{name: given[name] for name in names})
    if arguments.updates is not None:
        plan = plan.lasting(arguments.updates)
    settings = {name: given[name] for name in ("max_judged", "baseline", "curve", "labelled", "labelled_dir")}
    settings |= {"sizes": tuple(arguments.sizes), "epochs": arguments.epochs}
    output, page = arguments.output, arguments.output / "conversion.html"
    try:
        if not page.exists() and is_kept(output, plan, by_epochs=arguments.epochs is not None):
            print(f"{output} holds the converted network already, and not its page: it was broken off there")
        else:
            # both networks are let go of before the page opens them again; what was measured is kept by then
            print(convert_run(plan, output, command=command_line(), log=print, **settings).text)
        api.report(output, page, log=print)
    except KeyboardInterrupt as stop:
        if not (output / PLAN).is_file():
            raise
        raise InterruptedRunError(
            f"interrupted: what was done is kept in {output}, the same command goes on", stop
        ) from None
    print(f"conversion.html, .json, delta.safetensors and student.safetensors are in {output}")


def _check_data(arguments: argparse.Namespace) -> None:
    """Raise for images that are not there, before a network is opened that may have to be fetched."""
    from subquad.data.opening import check_words, is_named

    for data, folder in ((arguments.images, arguments.data_dir), (arguments.labelled, arguments.labelled_dir)):
        # a run says itself where a named data set lies
        if folder is not None or not is_named(data or "digits"):
            check_words(data, folder)


def run_advise(arguments: argparse.Namespace) -> None:
    """Measure, and print the table."""
    from subquad.advice import advise
    from subquad.benchmarks.blocks import dtype_of

    given = {name: getattr(arguments, name) for name in ("img_size", "attention", "blocks", "engines", "repeats")}
    advised = advise(arguments.source, **given, dtype=dtype_of(arguments.dtype), log=print)
    print(advised.text)
