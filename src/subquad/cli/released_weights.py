"""`subquad download` and `subquad upload`, and flags of other commands: the authors' weights by a network's name."""

import argparse

from subquad.cli.parser import Commands, Parser
from subquad.errors import SubquadError
from subquad.flags import to_read


def add_commands(commands: Commands) -> None:
    """The commands `download` and `upload`."""
    sub = commands.add("download", run_download)
    sub.add_argument("network", nargs="+", metavar="NAME", help="networks, see `subquad list models --pretrained`")

    sub = commands.add("upload", run_upload)
    sub.add_argument("checkpoint", type=to_read, metavar="RUN", help="folder of a run or conversion, or a file of it")
    sub.add_argument(
        "target",
        metavar="OWNER/NAME",
        help="the repository, or local-dir:FOLDER; there what an upload wrote is replaced, and nothing else",
    )
    sub.add_argument("--private", action="store_true", help="a new repository is shown to nobody else")


def run_upload(arguments: argparse.Namespace) -> None:
    """Write or upload, and say where it is."""
    from subquad.runs import save_for_hf, upload

    if arguments.target.startswith("local-dir:"):
        folder = arguments.target.removeprefix("local-dir:")
        if not folder:
            raise SubquadError("local-dir: names no folder: write local-dir:FOLDER, or local-dir:. for this one")
        place = str(save_for_hf(arguments.checkpoint, folder))
    else:
        place = upload(arguments.checkpoint, arguments.target, private=arguments.private)
    print(f"the weights and the model card are in {place}")


def run_download(arguments: argparse.Namespace) -> None:
    """Fetch and say where the files are."""
    from subquad.models.pretrained import figures_text, pretrained_file, published

    for name in arguments.network:
        file = pretrained_file(name)
        known = published(file)
        top1, figures = known.get("top1"), figures_text(known.get("figures"))
        said = f", published top-1 {top1} %" if top1 is not None else f", published {figures}" if figures else ""
        print(f"{name}: {file}{said}")


def add_network(parser: Parser, *, several: bool = False) -> None:
    """The flags that name the authors' weights instead of a file."""
    what = "networks" if several else "a network"
    parser.add_argument("--model", metavar="NAME", nargs="+" if several else None, help=f"{what}, for --pretrained")
    parser.add_argument("--pretrained", action="store_true", help="the authors' weights of --model instead of a file")


def add_whole_network(parser: Parser) -> None:
    """The flag that names the authors' weights of a network with a head instead of a file."""
    text = "the authors' weights instead of a file: network/head, see `subquad list models --pretrained`"
    parser.add_argument("--pretrained", metavar="NAME", help=text)
    parser.set_defaults(model=None)


def sources_of(arguments: argparse.Namespace) -> list[str]:
    """The files, or run folders, that a command names, those that stand for the authors' weights included.

    Raises:
        SubquadError: it names none, or a network without --pretrained.
    """
    from subquad.models.pretrained import PREFIX

    files, networks = _listed(arguments.checkpoint), _listed(arguments.model)
    if isinstance(arguments.pretrained, str):
        networks = [arguments.pretrained]
    if networks and not arguments.pretrained:
        raise SubquadError(f"--model {networks[0]} alone has no weights: add --pretrained, or name a file instead")
    if arguments.pretrained and not networks:
        raise SubquadError("--pretrained is of a network: name it with --model, see `subquad list --pretrained`")
    if not files and not networks:
        named = "--pretrained NAME" if arguments.pretrained is None else "--model NAME --pretrained"
        file = "a run folder or a weight file"
        # a command that is given images has a flag for it
        given = f"--checkpoint with {file}" if "images" in vars(arguments) else file
        raise SubquadError(f"no weights are named: give {given}, or {named}")
    return [*map(str, files), *(f"{PREFIX}{network}" for network in networks)]


def source_of_one(arguments: argparse.Namespace) -> str:
    """The one file, or network, that a command names.

    Raises:
        SubquadError: as `sources_of`, and for a file and a network both.
    """
    source, *others = sources_of(arguments)
    if others:
        raise SubquadError(f"both {source} and {others[0]} are named: give a file, or the authors' weights")
    return source


def _listed(value: object) -> list[str]:
    if value is None:
        return []
    return [str(entry) for entry in value] if isinstance(value, list) else [str(value)]
