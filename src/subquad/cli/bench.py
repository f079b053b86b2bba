"""`subquad bench`."""

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

from subquad.cli.parser import Commands, flags_of
from subquad.errors import SubquadError, check_suffix
from subquad.flags import file_to_write, positive, share, whole

_TIMED = {"backward": False, "compile": False, "graphs": False, "picture": None}
_USUAL: dict[str, dict[str, Any]] = {
    "layers": {
        "mechanisms": None,
        "tokens": [196, 784, 3136],
        "dim": 192,
        "num_heads": 3,
        "ops": False,
        **_TIMED,
    },
    "networks": {"head": None, "img_size": [224, 448], **_TIMED},
    "U-Nets": {"img_size": [224, 448], "ratio": [0.4], "agents": None, "reuse": 0},
}
"""What can be measured, and what its own flags are where they are left out."""


def add_commands(commands: Commands) -> None:
    """The command `bench`."""
    sub = commands.add("bench", run_bench)
    sub.add_argument("--model", nargs="+", metavar="NAME", help="networks, against the same hosts with softmax")
    sub.add_argument("--head", metavar="NAME", help="networks as backbones under it: fpn, upernet, mask_rcnn, …")
    sub.add_argument("--unet", metavar="NAME", help="a step of a diffusion U-Net instead: sd15, sd21, sdxl")
    sub.add_argument("--ratio", nargs="+", type=share, help="shares of tokens that are merged there; 0.4 if left out")
    sub.add_argument("--agents", type=positive, help="there: also with this fixed number of agents")
    sub.add_argument("--reuse", type=whole, help="there: 1 matches once for all blocks of a level")
    text = "of networks; 224 448 if left out"
    sub.add_argument("--img-size", nargs="+", type=positive, metavar="PX", help=text)
    named = "with settings, as inline:local=false, or without; all of them if left out"
    sub.add_argument("--attention", dest="mechanisms", nargs="+", metavar="NAME", help=named)
    sub.add_argument("--tokens", nargs="+", type=positive, help="square numbers; 196 784 3136 if left out")
    sub.add_argument("--dim", type=positive, help="channels; 192 if left out")
    sub.add_argument("--num-heads", type=positive, help="heads; 3 if left out")
    sub.add_argument("--ops", action="store_true", help="without projections and local branch: the operations alone")
    sub.add_argument("--batch-size", nargs="+", type=positive, default=[1], metavar="N", help="images at a time")
    dtypes = ("fp32", "bf16", "fp16")
    sub.add_argument("--dtype", nargs="+", choices=dtypes, default=["fp32"], help="of parameters and tokens")
    sub.add_argument("--device", default="cpu", help="cpu, cuda, …")
    sub.add_argument("--backward", action="store_true", help="time forward and backward together")
    sub.add_argument("--compile", action="store_true", help="time what torch.compile makes of it")
    sub.add_argument("--graphs", action="store_true", help="on CUDA: time replays of CUDA graphs, without Python")
    sub.add_argument("--repeats", type=positive, default=15, help="of each pass, in turn; medians are printed")
    sub.add_argument("--output", type=file_to_write, help="write the rows here, as .csv or .json")
    sub.add_argument(
        "--picture", type=file_to_write, help="draw milliseconds against length or size here: .svg, .png, .pdf"
    )


def run_bench(arguments: argparse.Namespace) -> None:
    """Measure and print."""
    import torch

    from subquad.benchmarks import MEASUREMENTS, describe_device, save_rows
    from subquad.pages import bench_picture, check_picture

    if arguments.output is not None:
        check_suffix(arguments.output, *MEASUREMENTS)
    if arguments.picture is not None:
        check_picture(arguments.picture)
    if arguments.model and arguments.unet:
        raise SubquadError("--model names networks and --unet a U-Net: measure them apart")
    kind = "U-Nets" if arguments.unet else "networks" if arguments.model else "layers"
    own = flags_of(arguments, kind, _USUAL)
    if arguments.compile and arguments.graphs:
        raise SubquadError("--compile records CUDA graphs of networks by itself: leave out --graphs")
    keys = ["dim", "num_heads", "ops", "backward", "compile", "graphs"] + (["head"] if arguments.head else [])
    settings = {"repeats": arguments.repeats} | {key: own[key] for key in keys if key in own}
    device = describe_device(arguments.device)
    several = itertools.product(arguments.batch_size, arguments.dtype)
    each = [settings | {"batch_size": batch_size, "dtype": dtype} for batch_size, dtype in several]
    measure = _unets if arguments.unet else _networks if arguments.model else _blocks
    rows, table = measure(arguments, own, each)
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


def _blocks(
    arguments: argparse.Namespace, own: dict[str, Any], each: list[dict[str, Any]]
) -> tuple[Sequence[Any], str]:
    from subquad.attention import ATTENTION
    from subquad.benchmarks import blocks_table, growth_text, measure_blocks

    names, lengths = own["mechanisms"] or list(ATTENTION.usable_names(print)), own["tokens"]
    rows = [
        row
        for settings in each
        for row in measure_blocks(names, lengths, device=arguments.device, log=print, **settings)
    ]
    return rows, f"{blocks_table(rows)}\n\n{growth_text(rows)}".rstrip()


def _networks(
    arguments: argparse.Namespace, own: dict[str, Any], each: list[dict[str, Any]]
) -> tuple[Sequence[Any], str]:
    from subquad.benchmarks import measure_networks, networks_table

    names, sizes = arguments.model, own["img_size"]
    rows = [
        row
        for settings in each
        for row in measure_networks(names, sizes, device=arguments.device, log=print, **settings)
    ]
    return rows, f"{networks_table(rows)}\nsoftmax ÷: how many times faster than the same host with softmax."


def _unets(arguments: argparse.Namespace, own: dict[str, Any], each: list[dict[str, Any]]) -> tuple[Sequence[Any], str]:
    from subquad.benchmarks import measure_unet, unets_table

    name, sizes, ratios = arguments.unet, own["img_size"], own["ratio"]
    way = {"agents": own["agents"], "reuse": own["reuse"]}
    rows = [
        row
        for settings in each
        for row in measure_unet(name, sizes, ratios, device=arguments.device, log=print, **way, **settings)
    ]
    return rows, unets_table(rows)
