"""`subquad list`, `subquad convert-checkpoint` and `subquad report`."""

import argparse
from pathlib import Path

from subquad.cli.parser import Commands
from subquad.errors import SubquadError
from subquad.flags import file_to_write, pixels, to_read


def add_commands(commands: Commands) -> None:
    """The commands `convert-checkpoint`, `list` and `report`."""
    sub = commands.add("convert-checkpoint", run_convert)
    sub.add_argument("source", type=to_read, metavar="IN", help="the authors' file; no code in it is run")
    sub.add_argument("target", type=file_to_write, metavar="OUT", help="the .safetensors file to write")
    sub.add_argument(
        "--model", help="the network, with its head if it has one; found out if left out, where only one fits"
    )
    sub.add_argument("--img-size", type=pixels, metavar="PX", help="resample its tables for 448 or 384,640")

    sub = commands.add("list", run_list)
    sub.add_argument("what", nargs="?", help="mechanisms, hosts, models, backends or operations; all if left out")
    sub.add_argument(
        "--backends", action="store_true", help="only backends, why one does not work here, and what has kernels"
    )
    sub.add_argument("--pretrained", action="store_true", help="only networks with released weights, and their top-1")
    sub.add_argument("--filter", default="*", metavar="PATTERN", help="names to show, as the shell matches files")

    sub = commands.add("report", run_report)
    sub.add_argument(
        "runs", nargs="+", type=to_read, metavar="RUN", help="run folders, or folders of them; or one of convert"
    )
    sub.add_argument("--output", type=file_to_write, default=Path("report.html"), help="the page to write")
    sub.add_argument("--no-scaling", action="store_true", help="leave out latency and memory against length")


def run_convert(arguments: argparse.Namespace) -> None:
    """Convert and say what was done."""
    from subquad.models import convert_checkpoint
    from subquad.models.pretrained import convert_dense

    size = {} if arguments.img_size is None else {"img_size": arguments.img_size}
    if "/" in (arguments.model or ""):
        if size:
            raise SubquadError(f"--img-size is of classifiers: {arguments.model} takes images of any size")
        name, adapted = convert_dense(arguments.source, arguments.target, arguments.model)
    else:
        name, adapted = convert_checkpoint(arguments.source, arguments.target, name=arguments.model, **size)
    layout = f"the released {adapted.family} layout" if adapted.family else "our layout"
    resized = f", {len(adapted.resized)} tables resampled" if adapted.resized else ""
    print(f"{name}: {len(adapted.state)} entries from {layout}{resized}; in {arguments.target}")


def run_list(arguments: argparse.Namespace) -> None:
    """Print one listing or all of them."""
    from subquad.models.listing import LISTINGS, listing

    wanted = LISTINGS if arguments.what is None else [arguments.what]
    wanted = ["backends", "operations"] if arguments.backends else wanted
    if arguments.pretrained:
        if arguments.backends or arguments.what not in (None, "models"):
            raise SubquadError("--pretrained lists models: say `subquad list models --pretrained`")
        wanted = ["pretrained", "pretrained heads"]
    tables = [table for what in wanted if (table := listing(what, arguments.filter))]
    if not tables:
        raise SubquadError(f"no name matches '{arguments.filter}': see subquad list")
    print("\n\n".join(tables))


def run_report(arguments: argparse.Namespace) -> None:
    """Measure what the page needs, and write it."""
    from subquad import api

    api.report(arguments.runs, arguments.output, scaling=not arguments.no_scaling, log=print)
    print(f"the report is in {arguments.output}")
