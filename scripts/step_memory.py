"""What a training step holds at most, by mechanism and side of the image, without computing it.

    python scripts/step_memory.py --sides 2048
    python scripts/step_memory.py --sides 8192 --extrapolate    # minutes instead of hours

Tensors are fake: shapes go through the network, forward and backward, and every storage is counted for as long as it
lives (`subquad.benchmarks.memory`). Beside the step as it is stand steps with blocks computed again in the backward
pass, with MLPs in chunks as well, and with whole blocks in chunks (a dash where these can't be). What a kernel takes
and gives back inside itself is not seen. Each block beyond the second holds as much as the third: `--extrapolate`
looks at networks of two and three, and adds up.
"""

import argparse

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import subquad
from subquad.benchmarks.memory import peak_memory_mb

WAYS = {"": "as it is", "again": "blocks again", "mlps": "and MLPs in chunks", "blocks": "blocks in chunks"}


def peak_gb(name: str, side: int, args: argparse.Namespace, way: str) -> float | None:
    """Of a step on one image, fp32, in 2^30 bytes; parameters and their gradients are a part of none."""
    if not args.extrapolate:
        return peak_of(name, side, args.model, args.depth, way)
    two, three = (peak_of(name, side, args.model, depth, way) for depth in (2, 3))
    return None if two is None or three is None else two + (args.depth - 2) * (three - two)


def peak_of(name: str, side: int, size: str, depth: int, way: str) -> float | None:
    """The peak with so many blocks; None where these can't be computed this way."""
    prefix = "prefix" in subquad.ATTENTION[name].traits.refuses
    settings = {"class_token": False, "global_pool": "avg"} if prefix else {}
    settings |= {"num_classes": 2, "drop_path_rate": 0, "depths": (depth,)}
    model = subquad.create_model(size, attention=name, **settings).train()
    model.set_grad_checkpointing(way in ("again", "mlps"))
    if way == "mlps":
        subquad.chunk_mlps(model)
    if way == "blocks":
        try:
            subquad.chunk_blocks(model)
        except subquad.SubquadError:
            return None
    mode = FakeTensorMode()
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            setattr(module, key, torch.nn.Parameter(mode.from_tensor(parameter.detach())))
    with mode, subquad.use_backend("eager"):
        image = torch.empty(1, 3, side, side)
        return peak_memory_mb(lambda: model(image).sum().backward(), torch.device("cpu")) / 1024


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_tiny")
    parser.add_argument("--depth", type=int, default=12, help="blocks")
    parser.add_argument("--extrapolate", action="store_true")
    parser.add_argument("--sides", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--attention", nargs="+", default=list(subquad.ATTENTION))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS.values()), default=list(WAYS.values()))
    args = parser.parse_args()
    ways = [way for way, title in WAYS.items() if title in args.ways]
    titles = [f"{side:,}², {WAYS[way]}" for side in args.sides for way in ways]
    print(f"| mechanism | {' | '.join(titles)} |")
    print("|---|" + "---:|" * len(titles))
    for name in args.attention:
        peaks = [peak_gb(name, side, args, way) for side in args.sides for way in ways]
        print(f"| {name} | {' | '.join('—' if peak is None else f'{peak:.2f}' for peak in peaks)} |", flush=True)


if __name__ == "__main__":
    main()
