"""Train a plain ViT of timm's on a small data set, as a teacher for `subquad convert`, and save it as timm does.

python scripts/timm_teacher.py --data-dir cifar10.tar.xz --output FOLDER [--epochs 8]

The network is timm's own class, made and saved by timm (`save_for_hf`), so that FOLDER is what anybody has who trains
with timm: `subquad convert FOLDER`. Broken off, the same command goes on from the last whole epoch.
"""

import argparse
import math
import time
from pathlib import Path

import timm
import torch
from timm.models import save_for_hf
from torch import nn

from subquad.conversion.drawn_images import views
from subquad.data import InputConfig, create_loader, eval_transform, load_dataset
from subquad.optimizers import optimizer_of
from subquad.training.order import seed_all
from subquad.writing import write_text

ARCHITECTURE = "vit_tiny_patch16_224"
SIZES = {"img_size": 32, "patch_size": 4, "embed_dim": 128, "depth": 6, "num_heads": 4}
INPUT = InputConfig(
    img_size=(32, 32), mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.2435, 0.2616), crop_pct=1.0, crop_mode="squash"
)
SPLITS = ("train", "validation")
WARMUP = 100
"""Updates in which the rate rises."""


def main() -> None:
    """Train what is left of the epochs, and save the network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=4e-3, help="of Muon")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    # PyTorch's fused attention is slow in bf16 backward at few tokens
    torch.backends.cuda.enable_flash_sdp(False)
    sets = {split: load_dataset(arguments.data, split=split, data_dir=arguments.data_dir) for split in SPLITS}
    sets["train"].transform, sets["validation"].transform = views(INPUT, crop_padding=4), eval_transform(INPUT)
    seed_all(arguments.seed)
    classes = list(sets["train"].classes)
    model = timm.create_model(ARCHITECTURE, num_classes=len(classes), **SIZES)
    train(model, sets, arguments)
    shown = {"mean": INPUT.mean, "std": INPUT.std, "crop_pct": INPUT.crop_pct, "crop_mode": INPUT.crop_mode}
    save_for_hf(
        model,
        arguments.output,
        model_config={"label_names": classes},
        model_args=SIZES,
        data_config={"input_size": (3, 32, 32), "interpolation": INPUT.interpolation, **shown},
        safe_serialization=True,
    )
    # what scripts/convert_evidence.py asks of a teacher
    known = {"data": arguments.data, "epochs": arguments.epochs, "batch_size": arguments.batch_size, "crop_padding": 4}
    write_text(arguments.output / "recipe.yaml", "".join(f"{key}: {value}\n" for key, value in known.items()))
    (arguments.output / "state.pt").unlink(missing_ok=True)
    top1 = accuracy(model, sets["validation"])
    print(f"{arguments.output}: top-1 {top1:.2%} of {len(sets['validation'])} held-out images")


def train(model: nn.Module, sets: dict, arguments: argparse.Namespace) -> None:
    """Epochs of updates by cross-entropy, those that are not done yet."""
    arguments.output.mkdir(parents=True, exist_ok=True)
    file = arguments.output / "state.pt"
    optimizer = optimizer_of(model, "muon", lr=arguments.lr, weight_decay=0.05)
    first = 0
    if file.exists():
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epochs"]
    in_epoch = len(sets["train"]) // arguments.batch_size
    compiled = torch.compile(model)
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(first, arguments.epochs):
        seed_all(arguments.seed, epoch)
        began = time.monotonic()
        model.train()
        loader = create_loader(sets["train"], batch_size=arguments.batch_size, shuffle=True, drop_last=True)
        for place, (images, labels) in enumerate(loader):
            rate = rate_at(epoch * in_epoch + place, arguments.epochs * in_epoch, arguments.lr)
            for group in optimizer.param_groups:
                group["lr"] = rate
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(compiled(images).float(), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        seen = f"loss {loss.item():.3f}, top-1 {accuracy(model, sets['validation']):.2%}"
        print(f"epoch {epoch + 1}: {seen}, {time.monotonic() - began:.0f} s", flush=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}
        torch.save(state, file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)


def rate_at(update: int, updates: int, peak: float) -> float:
    """The rate of an update: it rises, then falls as a cosine."""
    if update < WARMUP:
        return peak * (update + 1) / WARMUP
    return 0.5 * peak * (1 + math.cos(math.pi * (update - WARMUP) / max(updates - WARMUP, 1)))


@torch.no_grad()
def accuracy(model: nn.Module, images: object) -> float:
    """The share of images that a network tells."""
    model.eval()
    right = count = 0
    for batch, labels in create_loader(images, batch_size=200):
        right += int((model(batch).argmax(1) == labels).sum())
        count += len(labels)
    return right / count


if __name__ == "__main__":
    main()
