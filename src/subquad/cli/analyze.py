"""`subquad analyze`."""

import argparse
from pathlib import Path

from subquad.cli.parser import Commands
from subquad.cli.released_weights import add_network, sources_of
from subquad.flags import folder_to_write, pixels, positive, to_read, whole
from subquad.starting import command_line

MEASURES = (
    "entropy",
    "negative",
    "local",
    "distance",
    "rank",
    "numerical",
    "diagonal",
    "symmetry",
    "features",
    "global",
    "directions",
    "gates",
    "power",
    "inverse",
    "kernel",
    "similarity",
)
"""The names of `subquad.analysis.ALL_MEASURES`, which take seconds to import."""


def add_commands(commands: Commands) -> None:
    """The command `analyze`."""
    sub = commands.add("analyze", run_analyze)
    what = "run folders or weight files, of segmenters and detectors too; timm/NAME or timm/NAME=FILE for timm's"
    sub.add_argument("checkpoint", nargs="*", help=what)
    add_network(sub, several=True)
    measures = f"of {', '.join(MEASURES)}; all if left out"
    sub.add_argument("--images", nargs="+", type=to_read, help="image files, or folders of them; else held-out ones")
    sub.add_argument("--measures", nargs="+", choices=MEASURES, metavar="NAME", help=measures)
    sub.add_argument("--max-images", type=positive, default=64, help="look at so many, evenly chosen")
    sub.add_argument("--shown", type=whole, default=4, help="of them can be clicked on the page; 0 for none")
    sub.add_argument("--img-size", type=pixels, metavar="PX", help="of other images than in training: 448 or 384,640")
    sub.add_argument("--batch-size", type=positive, default=4, help="images at a time; a map is held for each")
    sub.add_argument(
        "--output", type=folder_to_write, default=Path("analysis"), help="folder of analysis.html, .csv, .json"
    )
    part = sub.add_argument_group("over all held-out images", "kept as it goes: the same command goes on with it")
    part.add_argument("--removed", action="store_true", help="accuracy without the keys around each query")
    part.add_argument("--no-branches", action="store_true", help="there: local branches switched off as well")
    part.add_argument("--confusion", action="store_true", help="count queries that have the weights of another one")
    part.add_argument("--data", help="data set; the one trained on if left out")
    part.add_argument("--data-dir", help="its folder")
    part.add_argument("--max-held-out", type=positive, help="so many of them only, evenly chosen")


def run_analyze(arguments: argparse.Namespace) -> None:
    """Measure and write."""
    from subquad import api

    settings = {name: value for name, value in vars(arguments).items() if name in _SETTINGS}
    settings["branches"] = not arguments.no_branches
    command = command_line()
    api.analyze(sources_of(arguments), arguments.output, command=command, log=print, **settings)
    print(f"analysis.html, analysis.csv and analysis.json are in {arguments.output}")


_SETTINGS = frozenset(
    {
        "batch_size",
        "confusion",
        "data",
        "data_dir",
        "images",
        "img_size",
        "max_held_out",
        "max_images",
        "measures",
        "removed",
        "shown",
    }
)
"""Flags that are settings of `Study`."""
