"""`subquad export`."""

import argparse
from typing import Any

from subquad.cli.parser import Commands
from subquad.flags import file_to_write, pixels, positive


def add_commands(commands: Commands) -> None:
    """The command `export`."""
    sub = commands.add("export", run_export)
    sub.add_argument("source", metavar="MODEL|RUN", help="a network's name, or a run, a conversion, a weight file")
    sub.add_argument("--pretrained", action="store_true", help="MODEL with the authors' weights, not random ones")
    sub.add_argument("--format", default="onnx", metavar="FORMAT", help="onnx, openvino, pt2 or aoti")
    sub.add_argument("--img-size", nargs="+", type=pixels, metavar="PX", help="448, or height and width")
    sub.add_argument("--batch-size", type=positive, default=1, metavar="N", help="images at a time, if not any number")
    sub.add_argument("--dynamic", default="", metavar="WHAT", help="what may change: batch, size, or batch,size")
    sub.add_argument("--dtype", default="fp32", metavar="DTYPE", help="fp32, bf16 or fp16")
    sub.add_argument(
        "--int8", metavar="WHAT", help="products of matrices in int8: weights, or dynamic (activations too)"
    )
    sub.add_argument("--answer", metavar="NAME", help="which answer is written, of networks that give several by name")
    sub.add_argument("--output", type=file_to_write, metavar="FILE", help="the file; NAME.SUFFIX here if left out")


def one_or_two(given: list[int | tuple[int, int]] | None) -> Any:
    """Pixels in one word or in two."""
    return given[0] if given and len(given) == 1 else given


def run_export(arguments: argparse.Namespace) -> None:
    """Write, and say what was written and how far it is off."""
    from subquad import api

    written = api.export(
        f"pretrained/{arguments.source}" if arguments.pretrained else arguments.source,
        arguments.output,
        format=arguments.format,
        img_size=one_or_two(arguments.img_size),
        batch=arguments.batch_size,
        dynamic=arguments.dynamic,
        dtype=arguments.dtype,
        int8=arguments.int8,
        answer=arguments.answer,
        log=print,
    )
    sizes = " and ".join("×".join(map(str, shape)) for shape in written.shapes)
    print(f"{written.path}: {written.format}, off by {written.difference:.1e} at most (images × px: {sizes})")
    if written.least is not None:
        multiples = f", multiples of {written.step}" if written.step > 1 else ""
        print(f"it takes images whose sides are {written.least} px or more{multiples}")
