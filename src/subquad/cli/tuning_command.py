"""`subquad tune`."""

import argparse
from typing import Any

from subquad.cli.parser import Commands, flags_of
from subquad.errors import SubquadError
from subquad.flags import Number, positive

_USUAL: dict[str, dict[str, Any]] = {
    "layers": {"mechanisms": None, "tokens": [1024, 4096], "dim": 192, "num_heads": 3},
    "networks": {"img_size": [224]},
}
"""What kernels can be of, and what its own flags are where they are left out."""


def add_commands(commands: Commands) -> None:
    """The command `tune`."""
    sub = commands.add("tune", run_tune)
    named = "with settings, as inline:local=false, or without; all of them if left out"
    sub.add_argument("--attention", dest="mechanisms", nargs="+", metavar="NAME", help=named)
    sub.add_argument("--tokens", nargs="+", type=positive, help="of layers: square numbers; 1024 4096 if left out")
    sub.add_argument("--dim", type=positive, help="channels of layers; 192 if left out")
    sub.add_argument("--num-heads", type=positive, help="heads of layers; 3 if left out")
    sub.add_argument("--model", nargs="+", metavar="NAME", help="networks instead of layers")
    sub.add_argument("--img-size", nargs="+", type=positive, metavar="PX", help="of networks; 224 if left out")
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
    own = flags_of(arguments, "networks" if arguments.model else "layers", _USUAL)
    keys = ["batch_size", "dtype", "device", "backward", "again", "minutes"]
    settings = {key: getattr(arguments, key) for key in keys}
    settings |= {key: own[key] for key in ("dim", "num_heads") if key in own}
    names, sizes = (arguments.model, "img_size") if arguments.model else (arguments.mechanisms, "tokens")
    found = api.tune(names, own[sizes], log=print, **settings)
    if not found:
        print("nothing is left to choose: --again chooses anew")
        return
    print(f"\n{tiles_table(found)}\n\n{describe_device(arguments.device)}")
