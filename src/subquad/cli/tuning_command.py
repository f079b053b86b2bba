"""`subquad tune`."""

import argparse

from subquad.cli.parser import Commands
from subquad.errors import SubquadError
from subquad.flags import Number, positive


def add_commands(commands: Commands) -> None:
    """The command `tune`."""
    sub = commands.add("tune", run_tune)
    sub.add_argument("--attention", dest="mechanisms", nargs="+", metavar="NAME", help="all of them if left out")
    sub.add_argument("--tokens", nargs="+", type=positive, default=[1024, 4096], help="of layers: square numbers")
    sub.add_argument("--dim", type=positive, default=192, help="channels of layers")
    sub.add_argument("--num-heads", type=positive, default=3, help="heads of layers")
    sub.add_argument("--model", nargs="+", metavar="NAME", help="networks instead of layers")
    sub.add_argument("--img-size", nargs="+", type=positive, default=[224], metavar="PX", help="of networks")
    sub.add_argument("--batch-size", type=positive, default=1, metavar="N", help="images at a time")
    sub.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="bf16", help="of parameters and tokens")
    sub.add_argument("--device", default="cuda", help="cuda, cuda:1, …")
    sub.add_argument("--backward", action="store_true", help="kernels of gradients as well")
    sub.add_argument("--again", action="store_true", help="also what was chosen before")
    sub.add_argument("--minutes", type=Number(float, above=0), help="that it may take; the next call goes on")


def run_tune(arguments: argparse.Namespace) -> None:
    """Choose, and print what it gained."""
    from subquad import api
    from subquad.benchmarks import describe_device, tiles_table

    if arguments.model and arguments.mechanisms:
        raise SubquadError("--attention names layers and --model networks: tune them apart")
    keys = ["batch_size", "dtype", "device", "backward", "again", "minutes"]
    keys += [] if arguments.model else ["dim", "num_heads"]
    names = arguments.model or arguments.mechanisms
    sizes = arguments.img_size if arguments.model else arguments.tokens
    found = api.tune(names, sizes, log=print, **{key: getattr(arguments, key) for key in keys})
    if not found:
        print("nothing is left to choose: --again chooses anew")
        return
    print(f"\n{tiles_table(found)}\n\n{describe_device(arguments.device)}")
