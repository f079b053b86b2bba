"""Train one network on images whose rows several processes share; time it; and what it would cost on many GPUs.

    torchrun --nproc-per-node 4 scripts/tokens_over_processes.py train --folder runs/bands --updates 20
    python scripts/tokens_over_processes.py time --processes 1 2
    python scripts/tokens_over_processes.py bytes
    python scripts/tokens_over_processes.py model

`train` shows the whole of it: a mesh, `split_tokens`, DDP, bands of rows, what is saved, and going on from there after
one of the processes was killed. Images are made up, the same in every process.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import subquad
from subquad.large.bands import split_over
from subquad.large.exchanging import BandExchange
from subquad.large.processes import lost_in_one_line
from subquad.writing import replacing


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("train", "time"):
        command = commands.add_parser(name)
        command.add_argument("--model", default="deit_tiny")
        command.add_argument("--attention", default="linear")
        command.add_argument("--size", type=int, nargs=2, default=(512, 512), help="height and width in pixels")
        command.add_argument("--images", type=int, default=1, help="images of an update, for each mesh row")
        command.add_argument("--updates", type=int, default=10)
        command.add_argument("--over-images", type=int, default=1, help="rows of the mesh: processes for other images")
        command.add_argument("--checkpointing", action="store_true", help="compute blocks again in the backward pass")
    commands.choices["train"].add_argument("--folder", type=Path, required=True)
    commands.choices["time"].add_argument("--processes", type=int, nargs="+", default=[1, 2])
    commands.add_parser("bytes")
    commands.add_parser("model")
    return parser.parse_args()


def made_up(args: argparse.Namespace, update: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The images of an update and their classes, of a row of the mesh; every process can make them."""
    generator = torch.Generator().manual_seed(1000 * update + row)
    images = torch.randn(args.images, 3, *args.size, generator=generator)
    return images, torch.randint(10, (args.images,), generator=generator)


def train(args: argparse.Namespace) -> Iterator[tuple[int, float, float]]:
    """Updates from where the folder is: their number, the loss of all processes and seconds."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    shape = args.over_images, dist.get_world_size() // args.over_images
    mesh = init_device_mesh(device, shape, mesh_dim_names=("images", "tokens"))

    torch.manual_seed(0)
    settings = {"num_classes": 10, "img_size": 224, "drop_path_rate": 0}
    model = subquad.create_model(args.model, attention=args.attention, **settings).to(device).train()
    model.set_grad_checkpointing(args.checkpointing)
    rows = slice(None)
    if mesh["tokens"].size() > 1:
        model = subquad.split_tokens(model, mesh["tokens"])
        rows = subquad.band_rows(model, args.size[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    folder, done = getattr(args, "folder", None), 0
    if folder is not None and (folder / "state.pt").is_file():
        state = torch.load(folder / "state.pt", map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]
    over_all = DistributedDataParallel(model)
    with lost_in_one_line(dist.get_rank(), dist.get_world_size()):
        for update in range(done, args.updates):
            start = time.perf_counter()
            images, labels = made_up(args, update, mesh.get_local_rank("images"))
            logits = over_all(images[:, :, rows].to(device))
            loss = torch.nn.functional.cross_entropy(logits, labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = loss.detach()
            dist.all_reduce(loss)
            if folder is not None and dist.get_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": update + 1}
                with replacing(folder / "state.pt") as aside:
                    torch.save(state, aside)
            yield update, loss.item() / dist.get_world_size(), time.perf_counter() - start
    dist.destroy_process_group()


def started(arguments: list[str], count: int) -> list[subprocess.Popen[str]]:
    """As many processes of this script as torchrun would start, without it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    env["OMP_NUM_THREADS"] = "1"
    return [
        subprocess.Popen(
            [sys.executable, __file__, *arguments],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def measure(args: argparse.Namespace) -> None:
    """Seconds of an update by how many processes share its images: the median of all but the first."""
    rest = ["--model", args.model, "--attention", args.attention, "--images", str(args.images)]
    rest += ["--size", *map(str, args.size), "--updates", str(args.updates)] + ["--checkpointing"] * args.checkpointing
    for count in args.processes:
        processes = started(["time", "--processes", "0", *rest], count)
        told = [process.communicate()[0] for process in processes]
        seconds = sorted(float(line.split()[2]) for line in told[0].splitlines()[1:])
        print(
            f"{count} processes: {seconds[len(seconds) // 2]:.3f} s an update, {min(seconds):.3f} at best", flush=True
        )


class NobodyThere:
    """A channel in the middle of three processes, of which the others say nothing."""

    index, count = 1, 3

    def add(self, x: torch.Tensor) -> None:
        """Leave it."""

    largest = add

    def gather(self, numbers: Sequence[int], like: torch.Tensor) -> list[list[int]]:
        """As if all were alike."""
        return [list(numbers)] * self.count

    def swap(self, up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Nothing comes back."""
        return torch.zeros_like(down), torch.zeros_like(up)


def bytes_sent() -> None:
    """What one process hands over for a layer of DeiT-Tiny in a forward and a backward pass, of one image."""
    print("| mechanism | messages | bytes | borders | bytes, on a map of 32 columns | of 2,048 |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, mechanism in subquad.ATTENTION.items():
        if not mechanism.traits.spreads:
            continue
        counts = []
        for depth in (1, 2):
            settings = {"depths": (depth,), "class_token": False, "global_pool": "avg", "num_classes": 2}
            model = subquad.create_model("deit_tiny", attention=name, img_size=512, drop_path_rate=0, **settings)
            exchange = BandExchange(NobodyThere())
            split_over(model, exchange)(torch.randn(1, 3, 176, 512)).sum().backward()
            counts.append(exchange.traffic)
        one, two = counts
        sums, borders = two.sums - one.sums, two.borders - one.borders
        sum_bytes, border_bytes = two.sum_bytes - one.sum_bytes, two.border_bytes - one.border_bytes
        print(f"| {name} | {sums} | {sum_bytes:,} | {borders} | {border_bytes:,} | {64 * border_bytes:,} |")


# what the model of costs takes for granted

WIDTH, HEADS, LAYERS, PATCH, MLP = 768, 12, 12, 16, 4
PARAMETERS = 86e6
SPEED = 400e12
"""Products of matrices on one GPU, FLOP/s in bf16: 40 % of what an H100 can at best."""
OF_NODE, LINK, WIRE = 8, 300e9, 50e9
"""GPUs of a node; bytes/s from one to another in it (NVLink), and from a node to another for each GPU (400 Gbit/s)."""
LATENCY, NODE_LATENCY = 10e-6, 25e-6
"""Seconds that a message takes, however short, in a node and between two."""


def sum_seconds(count: int, size: float) -> float:
    """An all-reduce of `size` bytes: in nodes first, then between them, log₂ steps each way."""
    steps, node_steps = min(count, OF_NODE).bit_length() - 1, max(count // OF_NODE, 1).bit_length() - 1
    in_node = 2 * steps * LATENCY + 2 * size / LINK * (min(count, OF_NODE) > 1)
    return in_node + 2 * node_steps * NODE_LATENCY + 2 * size / WIRE * (count > OF_NODE)


def model_of_cost() -> None:
    """A training update of one image, ViT-B with linear attention and a 3×3 convolution of the values in each block."""
    print("| image | tokens | GPUs | compute s | sums s | borders s | gradients s | whole s | efficiency |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    head_dim = WIDTH // HEADS
    for side in (8192, 32768, 131072):
        tokens, row = (side // PATCH) ** 2, side // PATCH
        flops = 3 * tokens * LAYERS * (2 * WIDTH**2 * (4 + 2 * MLP) + 4 * WIDTH * head_dim)
        for count in (8, 64, 256, 1024):
            if row < count:
                continue
            compute = flops / count / SPEED
            state = 4 * (HEADS * (head_dim**2 + head_dim) + 1)
            sums = 2 * LAYERS * sum_seconds(count, state)
            borders = 2 * LAYERS * (NODE_LATENCY + 2 * row * WIDTH * 2 / WIRE)
            gradients = sum_seconds(count, 4 * PARAMETERS)
            whole = compute + sums + borders + gradients
            cells = (f"{x:.3g}" for x in (compute, sums, borders, gradients, whole))
            print(f"| {side:,}² | {tokens:,} | {count} | {' | '.join(cells)} | {compute / whole:.0%} |")


def main() -> int:
    """Do what the command line says."""
    args = parse()
    if args.command == "model":
        model_of_cost()
    elif args.command == "bytes":
        bytes_sent()
    elif args.command == "time" and args.processes != [0]:
        measure(args)
    else:
        torch.set_num_threads(1)
        # of class tokens of a single image, which lie in memory as rows of all tokens do
        warnings.filterwarnings("ignore", message="Grad strides")
        try:
            for update, loss, seconds in train(args):
                if dist.get_rank() == 0:
                    print(update, f"{loss:.9f}", f"{seconds:.4f}", flush=True)
        except subquad.SubquadError as error:
            print(error, file=sys.stderr, flush=True)
            # not what tidies up after processes that are there no more
            os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
