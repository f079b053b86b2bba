"""Processes that train one network, each on a band of rows: started by test_band_processes.py."""

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from hosts import small
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import subquad

UPDATES = 10


def network(case):
    torch.manual_seed(0)
    model = small(case["host"], case["attention"], drop_path_rate=case.get("drop_path_rate", 0.0))
    model.set_grad_checkpointing(case.get("checkpointed", False))
    return model.train()


def batches(case):
    """The same in every process: images of the size of the case, and their classes."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(UPDATES):
        yield torch.randn(4, 3, *case["size"], generator=generator), torch.randint(5, (4,), generator=generator)


def train(model, case, band=lambda images, labels: (images, labels)):
    """Ten updates; the losses and the gradients of the first one, as this process has them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, first = [], {}
    torch.manual_seed(2)
    for images, labels in batches(case):
        images, labels = band(images, labels)
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        if not losses:
            first = {name.removeprefix("module."): whole(p.grad).clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), first


def whole(grad):
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def train_in_bands(case):
    """With the mesh of the case, (processes for images, processes for an image's tokens); losses are those of all."""
    for_images, for_tokens = case["mesh"]
    mesh = init_device_mesh("cpu", (for_images, for_tokens), mesh_dim_names=("images", "tokens"))
    model = subquad.split_tokens(network(case), mesh["tokens"])
    rows, own = subquad.band_rows(model, case["size"][0]), slice(mesh.get_local_rank("images"), None, for_images)
    if case.get("sharded"):
        for block in model.stages[0].blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        over_all = model
    else:
        over_all = DistributedDataParallel(model)
    losses, grads = train(over_all, case, lambda images, labels: (images[own, :, rows], labels[own]))
    dist.all_reduce(losses)
    return losses / dist.get_world_size(), grads


def take_part(folder, rank, count):
    """What one of the processes does."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count)
    for i, case in enumerate(json.loads((folder / "cases.json").read_text())):
        losses, grads = train_in_bands(case)
        if rank == 0:
            torch.save({"losses": losses, "grads": grads}, folder / f"{i}.pt")
    dist.destroy_process_group()


def main(folder, count):
    """Forks the processes, which takes no time, where importing all of this takes each of them seconds."""
    torch.set_num_threads(1)
    children = []
    for rank in range(count):
        child = os.fork()
        if not child:
            left = 1
            try:
                take_part(Path(folder), rank, count)
                left = 0
            except BaseException:
                traceback.print_exc()
            finally:
                # what is left of threads is nobody's business
                os._exit(left)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
