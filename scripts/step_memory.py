"""What a training step holds at most, by mechanism and side of the image, without computing it.

    python scripts/step_memory.py --sides 2048 8192

Tensors are fake: shapes go through the network, forward and backward, and every storage is counted for as long as it
lives (`subquad.benchmarks.memory`). Beside the step as it is stand steps with blocks computed again in the backward
pass, and with MLPs in chunks as well. What a kernel takes and gives back inside itself is not seen.
"""

import argparse

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import subquad
from subquad.benchmarks.memory import peak_memory_mb


def peak_gb(name: str, side: int, args: argparse.Namespace, *, checkpointing: bool, chunks: bool) -> float:
    """Of a step on one image, fp32, in 2^30 bytes; parameters and their gradients are a part of none."""
    prefix = "prefix" in subquad.ATTENTION[name].traits.refuses
    settings = {"class_token": False, "global_pool": "avg"} if prefix else {}
    model = subquad.create_model(args.model, attention=name, num_classes=2, drop_path_rate=0, **settings).train()
    model.set_grad_checkpointing(checkpointing)
    if chunks:
        subquad.chunk_mlps(model)
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
    parser.add_argument("--sides", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--attention", nargs="+", default=list(subquad.ATTENTION))
    args = parser.parse_args()
    titles = [f"{side:,}²{kind}" for side in args.sides for kind in ("", ", blocks again", ", and chunks")]
    print(f"| mechanism | {' | '.join(titles)} |")
    print("|---|" + "---:|" * len(titles))
    for name in args.attention:
        peaks = [
            peak_gb(name, side, args, checkpointing=checkpointing, chunks=chunks)
            for side in args.sides
            for checkpointing, chunks in ((False, False), (True, False), (True, True))
        ]
        print(f"| {name} | {' | '.join(f'{peak:.2f}' for peak in peaks)} |", flush=True)


if __name__ == "__main__":
    main()
