"""`subquad diffuse`."""

import argparse
from pathlib import Path
from typing import Any

from subquad.cli.parser import Commands
from subquad.errors import SubquadError, shown
from subquad.flags import folder_to_write, not_negative, number, positive, seed, share, whole
from subquad.starting import command_line


def downsample(text: str) -> int:
    """A factor between levels of a U-Net."""
    if text not in ("1", "2", "4", "8"):
        raise argparse.ArgumentTypeError(f"must be 1, 2, 4 or 8, got {shown(text)}")
    return int(text)


# what both methods are set to, and what is for agents only: flag, type, help
COMMON: tuple[tuple[str, Any, str], ...] = (
    ("ratio", share, "share of tokens that is merged away"),
    ("sx", positive, "columns of a cell, which has one destination"),
    ("sy", positive, "rows of a cell"),
    ("max-downsample", downsample, "patch levels up to this factor below the latent: 1, 2, 4 or 8"),
    ("reuse", whole, "steps that a matching holds for, in all blocks of a level; 0: matched in each block"),
)
AGENTS: tuple[tuple[str, Any, str], ...] = (
    ("agent-ratio", share, "share of tokens that is merged away for the agents"),
    ("agents", positive, "about this many agents whatever the image's size, in place of sx, sy and agent-ratio"),
    ("k-scale", number, "exponent of the second softmax's scale"),
    ("k-shortcut", number, "weight of the values that are added"),
)
SWITCHES = (
    ("random", "draw which token of a cell is its destination"),
    ("merge-mlp", "run MLPs on the merged tokens too"),
)


def add_commands(commands: Commands) -> None:
    """The command `diffuse`."""
    sub = commands.add("diffuse", run_diffuse)
    sub.add_argument("--model", required=True, metavar="ID_OR_DIR", help="a pipeline's name on the hub, or its folder")
    sub.add_argument("--prompt", nargs="+", required=True, metavar="TEXT", help="what to show; for DiT, classes")
    sub.add_argument("--agent", action="store_true", help="through agents on merged tokens (AgentSD)")
    sub.add_argument("--tome", action="store_true", help="on merged tokens (ToMe)")
    sub.add_argument("--compare", action="store_true", help="untouched as well, and a page with all; --agent if alone")
    sub.add_argument("--seed", nargs="+", type=seed, default=[0], help="of the noise: each makes an image a prompt")
    sub.add_argument("--steps", type=positive, help="of denoising; the pipeline's own if left out, as the next four")
    sub.add_argument("--guidance-scale", type=not_negative, help="how strongly the prompt is followed; 1: no guidance")
    sub.add_argument("--height", type=positive, help="in pixels")
    sub.add_argument("--width", type=positive, help="in pixels")
    sub.add_argument("--negative-prompt", metavar="TEXT", help="what is to be avoided")
    sub.add_argument("--device", help="cpu, cuda, …; the accelerator if there is one")
    sub.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="fp32 on a CPU, else fp16, if left out")
    sub.add_argument("--output", type=folder_to_write, default=Path("diffused"), help="folder; what is there stays")
    text = "each overrides the authors' value; sx, sy, agent-ratio and agents make one phase of their two"
    group = sub.add_argument_group("method", text)
    for name, kind, text in (*COMMON, *AGENTS):
        group.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=text)
    for name, text in SWITCHES:
        group.add_argument(f"--{name}", action="store_true", default=argparse.SUPPRESS, help=text)


def run_diffuse(arguments: argparse.Namespace) -> None:
    """Make images, and the page."""
    import torch

    from subquad.benchmarks import check_images, describe_device, dtype_of, images_table, make_images
    from subquad.diffusion.pipelines import Sampling, load_pipeline, weights_in

    methods = _methods(arguments)
    check_images(arguments.output, methods)
    found = torch.accelerator.current_accelerator(check_available=True)
    device = arguments.device or (str(found) if found is not None else "cpu")
    where = describe_device(device)
    dtype = arguments.dtype or ("fp32" if torch.device(device).type == "cpu" else "fp16")
    keys = ("steps", "guidance_scale", "height", "width", "negative_prompt")
    pipe = load_pipeline(arguments.model, dtype=dtype_of(dtype), device=device)
    about = {"model": arguments.model, "weights": weights_in(pipe)}
    about |= {"pipeline": type(pipe).__name__, "dtype": dtype, "device": where}
    rows, summary = make_images(
        pipe,
        arguments.prompt,
        arguments.output,
        methods=methods,
        sampling=Sampling(**{key: getattr(arguments, key) for key in keys}),
        seeds=arguments.seed,
        about=about,
        memory=arguments.compare,
        log=print,
    )
    count = f"{len(rows)} image{'' if len(rows) == 1 else 's'}"
    note = f"{about['pipeline']}, {dtype}, {where}, torch {torch.__version__}, {count}"
    print(f"\n{images_table(summary)}\n\n{note}; in {arguments.output}")
    if arguments.compare:
        from subquad.pages import write_images_page

        page = arguments.output / "compare.html"
        write_images_page(page, rows, summary, command=command_line(), note=note)
        print(f"the page is {page}")


def _methods(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The methods that are asked for, and what they are set to."""
    wanted = [name for name in ("agent", "tome") if getattr(arguments, name)]
    wanted = wanted or (["agent"] if arguments.compare else [])

    def given(flags: Any) -> dict[str, Any]:
        names = [flag[0].replace("-", "_") for flag in flags]
        return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}

    common, agents = given((*COMMON, *SWITCHES)), given(AGENTS)
    unused = [*(common if not wanted else ()), *(agents if "agent" not in wanted else ())]
    if unused:
        need = "--agent or --tome" if common and not wanted else "--agent"
        raise SubquadError(f"--{unused[0].replace('_', '-')} changes nothing without {need}")
    methods: dict[str, dict[str, Any]] = {"softmax": {}} if arguments.compare or not wanted else {}
    return {**methods, **{name: {**common, **(agents if name == "agent" else {})} for name in wanted}}
