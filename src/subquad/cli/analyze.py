"""`subquad analyze`."""

import argparse
import shlex
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from subquad.cli.parser import Commands
from subquad.cli.released_weights import add_network, sources_of
from subquad.errors import SubquadError
from subquad.flags import folder_to_write, positive, to_read, whole
from subquad.holding import holding


def add_commands(commands: Commands) -> None:
    """The command `analyze`."""
    from subquad.analysis import ALL_MEASURES

    text = "Measure what the layers of trained networks attend to, and write a page, a table and JSON."
    sub = commands.add("analyze", run_analyze, text)
    what = "run folders or weight files, of segmenters and detectors too; timm/NAME or timm/NAME=FILE for timm's"
    sub.add_argument("checkpoint", nargs="*", help=what)
    add_network(sub, several=True)
    measures = f"of {', '.join(ALL_MEASURES)}; all if left out"
    sub.add_argument("--images", nargs="+", type=to_read, help="image files, or folders of them; else held-out ones")
    sub.add_argument("--measures", nargs="+", choices=ALL_MEASURES, metavar="NAME", help=measures)
    sub.add_argument("--max-images", type=positive, default=64, help="look at so many, evenly chosen")
    sub.add_argument("--shown", type=whole, default=4, help="of them can be clicked on the page; 0 for none")
    sub.add_argument("--img-size", type=positive, metavar="PX", help="look at images of another size than in training")
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
    with holding(arguments.output):
        _analyze(arguments)


def _analyze(arguments: argparse.Namespace) -> None:
    import torch

    from subquad.analysis import check_removal
    from subquad.benchmarks import save_rows
    from subquad.pages import Findings, write_analysis
    from subquad.runs import open_trained

    found = Findings()
    notes: list[str] = []
    for source in sources_of(arguments):
        trained = open_trained(source, img_size=arguments.img_size).image_network(arguments.img_size)
        name = _name_of(source)
        if name in found.names:
            raise SubquadError(f"two networks are called {name}: rename a folder")
        if arguments.removed and not getattr(trained.model, "num_classes", 0):
            raise SubquadError(f"--removed counts a classifier's answers, and {name} gives none: leave it out")
        if arguments.removed:
            check_removal(trained.model)
        notes.append(_measure(arguments, trained, name, found))
        _count(arguments, trained, name, found)
    note = f"{notes[0]}, torch {torch.__version__}; means over heads and images"
    every = [row for rows in found.rows.values() for row in rows]
    counted = {"removed": found.hits, "confused": found.confusions}
    for ending in (".csv", ".json"):
        about: dict[str, Any] = {"about": note} | (counted if ending == ".json" else {})
        save_rows(every, arguments.output / f"analysis{ending}", about)
    write_analysis(arguments.output / "analysis.html", found, command=shlex.join(sys.argv), note=note)
    print(f"analysis.html, analysis.csv and analysis.json are in {arguments.output}")


def _name_of(source: str) -> str:
    if source.startswith("timm/"):
        return source.removeprefix("timm/").partition("=")[0]
    path = Path(source)
    return path.name if path.is_dir() else path.stem


def _measure(arguments: argparse.Namespace, trained: Any, name: str, found: Any) -> str:
    """The measures of one network; on what."""
    import torch
    from tqdm import tqdm

    from subquad.analysis import ALL_MEASURES, measure_network
    from subquad.analysis.small_maps import looking

    pictures, inputs = _pictures(arguments, trained)
    batches = torch.stack(inputs).split(arguments.batch_size)
    measures = arguments.measures or list(ALL_MEASURES)
    bar = tqdm(batches, desc=f"measuring {name}", unit="batch", leave=False, disable=None)
    moved = (batch.to(trained.device) for batch in bar)
    rows = found.rows[name] = measure_network(trained.model, moved, measures, network=name)
    if shown := min(arguments.shown, len(pictures)):
        chosen = [k * len(pictures) // shown for k in range(shown)]
        looks = (looking(trained.model, inputs[k][None].to(trained.device)) for k in chosen)
        found.looks[name] = [layers for (layers,) in looks]
        found.pictures[:] = [pictures[k] for k in chosen]
    print(f"{name}: {max(row.layer for row in rows)} layers, {len(inputs)} images")
    return f"{len(inputs)} images"


def _pictures(arguments: argparse.Namespace, trained: Any) -> tuple[list[Any], list[Any]]:
    """Images as they are and as the network takes them: of the folders, else held-out ones."""
    from subquad.data import eval_transform, read_image
    from subquad.tasks.classification import images_of
    from subquad.tasks.image_files import image_files, readable_images

    if arguments.images is None:
        if not (arguments.data or trained.data):
            raise SubquadError(
                "nothing says what was held out: name photographs with --images, or a data set with --data"
            )
        images = images_of(trained, data=arguments.data, data_dir=arguments.data_dir)
        places = range(0, len(images), max(1, len(images) // arguments.max_images))
        pairs = ((k, images[k]) for k in places)
        whole = list(islice(((k, pair[0]) for k, pair in pairs if pair is not None), arguments.max_images))
        if not whole:
            raise SubquadError(f"none of {len(images)} held-out images can be read, the first is {images.path(0)}")
        return [images.picture(k) for k, _ in whole], [image for _, image in whole]
    files = image_files(arguments.images)
    chosen = files[:: max(1, len(files) // arguments.max_images)][: arguments.max_images]
    readable = list(readable_images(chosen, eval_transform(trained.input), strict=False, log=print))
    if not readable:
        raise SubquadError(f"none of {len(chosen)} images can be read, the first is {chosen[0]}")
    return [read_image(path) for path, _ in readable], [image for _, image in readable]


def _count(arguments: argparse.Namespace, trained: Any, name: str, found: Any) -> None:
    """What is counted over all held-out images."""
    from torch.utils.data import Subset

    from subquad.analysis import NoQueriesError, count_confusions, count_hits, survey
    from subquad.pages import confusion_words, removal_shares
    from subquad.tasks.classification import images_of

    if not (arguments.removed or arguments.confusion):
        return
    images: Any = images_of(trained, data=arguments.data, data_dir=arguments.data_dir)
    if arguments.max_held_out and arguments.max_held_out < len(images):
        step = len(images) / arguments.max_held_out
        images = Subset(images, [int(k * step) for k in range(arguments.max_held_out)])
    given: dict[str, Any] = {"batch_size": 32, "device": trained.device}
    about = {"network": name, "data": trained.data, "size": trained.input.img_size, "weights": trained.fingerprint}
    if arguments.removed:
        branches = not arguments.no_branches
        found.hits[name] = survey(
            images,
            count_hits(trained.model, branches=branches),
            about=about | {"branches": branches},
            file=arguments.output / f"removed-{name}.json",
            title=f"{name}, removed keys",
            **given,
        )
        shares = removal_shares(found.hits[name])
        print(f"{name}, top-1 % without keys: " + ", ".join(f"{key} {value:.1f}" for key, value in shares.items()))
    if arguments.confusion:
        try:
            found.confusions[name] = survey(
                images,
                count_confusions(trained.model),
                about=about,
                file=arguments.output / f"confused-{name}.json",
                title=f"{name}, confusion",
                **given,
            )
            print(f"{name}: {confusion_words(found.confusions[name])}")
        except NoQueriesError as error:
            # the other networks are still to be counted
            print(f"{name}: {error}")
