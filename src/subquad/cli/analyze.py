"""`subquad analyze`."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from subquad.cli.parser import Commands, positive
from subquad.errors import SubquadError


def add_commands(commands: Commands) -> None:
    """The command `analyze`."""
    from subquad.analysis import ALL_MEASURES

    text = "Measure what the layers of trained networks attend to, and write a page, a table and JSON."
    sub = commands.add("analyze", run_analyze, text)
    sub.add_argument("checkpoint", nargs="+", type=Path, help="run folders or weight files of classifiers")
    sub.add_argument("--images", nargs="+", type=Path, required=True, help="image files, or folders of them")
    sub.add_argument("--measures", nargs="+", metavar="NAME", help=f"of {', '.join(ALL_MEASURES)}; all if left out")
    sub.add_argument("--max-images", type=positive, default=64, help="look at so many, evenly chosen")
    sub.add_argument("--batch-size", type=positive, default=4, help="images at a time; a map is held for each")
    sub.add_argument("--output", type=Path, default=Path("analysis"), help="folder for analysis.html, .csv and .json")


def run_analyze(arguments: argparse.Namespace) -> None:
    """Measure and write."""
    import torch

    from subquad.analysis import ALL_MEASURES, measure_network
    from subquad.bench import save_rows
    from subquad.data import eval_transform
    from subquad.evaluation import load_trained
    from subquad.evaluation.predict import image_files, readable_images
    from subquad.report import write_analysis

    measures = arguments.measures or list(ALL_MEASURES)
    files = image_files(arguments.images)
    chosen = files[:: max(1, len(files) // arguments.max_images)][: arguments.max_images]
    rows: dict[str, list[Any]] = {}
    for path in arguments.checkpoint:
        trained = load_trained(path)
        transform = eval_transform(trained.input)
        inputs = [image for _, image in readable_images(chosen, transform, strict=False, log=print)]
        if not inputs:
            raise SubquadError(f"none of {len(chosen)} images can be read, the first is {chosen[0]}")
        batches = torch.stack(inputs).split(arguments.batch_size)
        name = path.name if path.is_dir() else path.stem
        if name in rows:
            raise SubquadError(f"two networks are called {name}: rename a folder")
        moved = (batch.to(trained.device) for batch in batches)
        rows[name] = measure_network(trained.model, moved, measures, network=name)
        print(f"{name}: {max(row.layer for row in rows[name])} layers, {len(inputs)} images")
    note = f"{len(chosen)} images, torch {torch.__version__}; means over heads and images"
    every = [row for found in rows.values() for row in found]
    for ending in (".csv", ".json"):
        save_rows(every, arguments.output / f"analysis{ending}", {"about": note})
    write_analysis(arguments.output / "analysis.html", rows, command=shlex.join(sys.argv), note=note)
    print(f"analysis.html, analysis.csv and analysis.json are in {arguments.output}")
