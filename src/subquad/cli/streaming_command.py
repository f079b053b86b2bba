"""`subquad stream`."""

import argparse
import time
from pathlib import Path

from subquad.cli.parser import Commands
from subquad.flags import file_to_write, folder_to_write, positive, to_read


def add_commands(commands: Commands) -> None:
    """The command `stream`."""
    sub = commands.add("stream", run_stream)
    sub.add_argument("source", metavar="RUN", help="run folder, weight file or conversion, or pretrained/NAME")
    sub.add_argument("image", type=to_read, help="PNG, tiled TIFF, zarr, .npy, a slide; others are decoded at once")
    sub.add_argument("--features", type=map_to_write, metavar="FILE", help="write features (y, x, c): .npy .zarr .tif")
    sub.add_argument("--labels", type=map_to_write, metavar="FILE", help="write tokens' classes: .png .tif .npy .zarr")
    sub.add_argument(
        "--heat", type=map_to_write, metavar="FILE", help="write a class's logit for each token: .tif .npy .zarr"
    )
    sub.add_argument("--class", dest="heat_class", metavar="NAME", help="the class of --heat; the image's if left out")
    sub.add_argument("--dtype", default="fp32", metavar="DTYPE", help="fp32 or bf16, of parameters and products")
    sub.add_argument("--keep", metavar="DTYPE", help="fp32, bf16 or fp64, of tokens; --dtype if left out")
    sub.add_argument(
        "--tokens-in",
        type=folder_to_write,
        metavar="FOLDER",
        help="keep tokens in files there, not in memory; what was broken off goes on from there",
    )
    sub.add_argument("--most-tokens", type=positive, metavar="N", help="tokens at work at a time, not some thousands")


def map_to_write(text: str) -> Path:
    """A file to write, or a .zarr, which is a folder; that one is there already is said as of any map."""
    is_zarr = Path(text).suffix.lower() == ".zarr" and Path(text).is_dir()
    return folder_to_write(text) if is_zarr else file_to_write(text)


def run_stream(arguments: argparse.Namespace) -> None:
    """Stream, and say what the image is and what was written."""
    from subquad import api

    start = time.perf_counter()
    settings = {name: value for name, value in vars(arguments).items() if name in SETTINGS}
    streamed = api.stream(arguments.source, arguments.image, **settings, progress=True)
    seconds = time.perf_counter() - start
    print(f"{arguments.image}: {streamed.grid.num_tokens:,} tokens ({streamed.grid}) in {seconds:.1f} s")
    for name, share in streamed.most_likely(SHOWN):
        print(f"{share:7.1%}  {name}")
    for name, share in () if streamed.has_head else streamed.most_labels(SHOWN):
        print(f"{share:7.1%}  {name}, of the places")
    for kind, path in streamed.files.items():
        of = f" of {streamed.name_of(streamed.heat_class)}" if kind == "heat" else ""
        print(f"{kind}{of}: {path}")


SHOWN = 5
"""Classes that are printed."""
SETTINGS = ("features", "labels", "heat", "heat_class", "dtype", "keep", "tokens_in", "most_tokens")
