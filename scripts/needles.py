"""Two marks in a large image: networks that see all of it against tiles with attention pooling, at 1, 4 and 16 times.

    python scripts/needles.py --output FOLDER --photographs camvid.tar [--attention linear agent …] [--seeds 0 1 2]
    python scripts/needles.py --output FOLDER --status

Every network is trained (recipe `reach`) on `needles` of 16 px, then of 32, then of 64, as at 64 alone it guesses for
longer than anyone waits, and is judged on those of 64, 256 and 1,024 px. Marks are half a side apart at least. *tiles*
is what is done with slides: the same network on tiles of 32 px and gated attention pooling over them (Ilse et al. 2018,
arXiv 1802.04712, eq. 9), trained together, as long, on tiles of half a side. Its head has a hidden layer: on a linear
one pooling is additive, and no sum over marks tells two alike from two that differ. Softmax is judged up to 256 px. A
cell is a JSON in FOLDER, and is not made again.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import subquad
from subquad.attention import ATTENTION, traits_of
from subquad.data.synthetic.needles import load_needles
from subquad.errors import unknown_name
from subquad.tasks.backbone_arguments import arguments_of
from subquad.tasks.classification import Recipe
from subquad.tasks.recipe_files import load_recipe
from subquad.text import columns
from subquad.training import train
from subquad.writing import write_json

LESSONS = (16, 32, 64)
"""Sizes that are trained on, one after the other."""

SIZES = (64, 256, 1024)
TILE = 32
TILES = "tiles"


def main() -> None:
    """Make the cells that are missing, and print the table of all that are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--photographs", type=Path, help="folder or archive of what lies behind the marks")
    parser.add_argument("--attention", nargs="+", default=["softmax", "linear", "inline", "agent", "pola", TILES])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", nargs=3, type=int, default=[3, 3, 3], help="at 16, at 32 and at 64 px")
    parser.add_argument("--count", type=int, default=20_000, help="images of each, of which 80 %% are trained on")
    parser.add_argument("--amp", choices=["", "bf16"], default="bf16", help="what networks are trained in; '' is fp32")
    parser.add_argument("--judged", type=int, default=500, help="images of each other size")
    parser.add_argument("--status", action="store_true", help="only print what is there")
    arguments = parser.parse_args()
    for name in arguments.attention:
        # a wrong one would be found when those in front of it are trained
        if name.partition(":")[0] not in (*ATTENTION, TILES):
            parser.error(str(unknown_name("attention", name, [*ATTENTION, TILES])))
    arguments.output.mkdir(parents=True, exist_ok=True)
    # PyTorch's fused attention is slow in bf16 backward at few tokens
    torch.backends.cuda.enable_flash_sdp(False)
    for seed in arguments.seeds if not arguments.status else ():
        for name in arguments.attention:
            make(name, seed, arguments)
            print(table(arguments), flush=True)
    print(table(arguments))


def make(name: str, seed: int, arguments: argparse.Namespace) -> None:
    """One cell: a trained network and how often it is right at each size, in percent."""
    file = arguments.output / f"{name}-s{seed}.json"
    if file.exists():
        return
    recipes = [
        recipe_of(name, seed, size, epochs, arguments) for size, epochs in zip(LESSONS, arguments.epochs, strict=True)
    ]
    judged = tiles_by_size(recipes, arguments) if name == TILES else network_by_size(recipes, file, arguments)
    write_json(file, judged)


def recipe_of(name: str, seed: int, size: int, epochs: int, arguments: argparse.Namespace) -> Recipe:
    """How networks are trained at a size; that on tiles is one with softmax."""
    return load_recipe("reach", Recipe).replace(
        attention="softmax" if name == TILES else name,
        seed=seed,
        data=needles(size, arguments.count),
        data_dir=None if arguments.photographs is None else str(arguments.photographs),
        img_size=size,
        epochs=epochs,
        batch_size=64,
        warmup_epochs=0,
        warmup_updates=50,
        amp=arguments.amp,
    )


def needles(size: int, count: int) -> str:
    """The data of a size."""
    return f"needles:size={size},distance={size // 2},count={count}"


def network_by_size(recipes: list[Recipe], file: Path, arguments: argparse.Namespace) -> dict[int, float]:
    """Train a network on whole images, and judge it."""
    folder: Path | None = None

    def said(line: str) -> None:
        print(f"{file.stem}: {line}", flush=True)

    for recipe in recipes:
        start = {} if folder is None else {"initial_checkpoint": str(folder)}
        folder = file.with_name(f"{file.stem}-{recipe.img_size[0]}px")
        resume = (folder / "recipe.yaml").is_file()
        train(recipe.replace(**start), folder, resume=resume, log=said)
    quadratic = traits_of(ATTENTION[recipe.attention.partition(":")[0]]).quadratic
    judged = {}
    for size in SIZES[:-1] if quadratic else SIZES:
        # the validation part is a tenth
        count = arguments.count if size == SIZES[0] else 10 * arguments.judged
        more = {} if arguments.photographs is None else {"data_dir": str(arguments.photographs)}
        batch = max(1, 2**16 // size**2)
        found = subquad.evaluate(folder, data=needles(size, count), img_size=size, batch_size=batch, **more)
        judged[size] = found.result.top1
    return judged


class PooledTiles(nn.Module):
    """Tiles of an image through a network, each alone, and the gated attention pooling of what it makes of them."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.network = subquad.create_model(**arguments_of(recipe.replace(img_size=TILE)), num_classes=0)
        width = self.network.num_features
        self.value, self.gate = nn.Linear(width, width), nn.Linear(width, width)
        self.score = nn.Linear(width, 1)
        self.head = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, 2))

    def forward(self, images: Tensor) -> Tensor:
        """Images (b, 3, y, x) of whole tiles to logits (b, 2)."""
        side = min(TILE, images.shape[-1] // 2)
        tiles = images.unfold(2, side, side).unfold(3, side, side).permute(0, 2, 3, 1, 4, 5)
        features = self.network(tiles.flatten(0, 2)).unflatten(0, (len(images), -1))
        scores = self.score(torch.tanh(self.value(features)) * torch.sigmoid(self.gate(features)))
        return self.head((scores.softmax(dim=1) * features).sum(dim=1))


def tiles_by_size(recipes: list[Recipe], arguments: argparse.Namespace) -> dict[int, float]:
    """Train tiles with attention pooling as the recipes have it, and judge them."""
    torch.manual_seed(recipes[0].seed)
    model = PooledTiles(recipes[0])
    for recipe in recipes:
        train_tiles(model, recipe, arguments)
    return {size: right(model.eval(), size, arguments) for size in SIZES}


def train_tiles(model: PooledTiles, recipe: Recipe, arguments: argparse.Namespace) -> None:
    """The epochs of a recipe."""
    size = recipe.img_size[0]
    images, labels = tensors(size, arguments.count, "train", arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    updates = len(images) // recipe.batch_size
    warm = recipe.warmup_updates
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, total_iters=warm),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(updates * recipe.epochs - warm, 1)),
        ],
        [warm],
    )
    for epoch in range(recipe.epochs):
        total = 0.0
        for chosen in torch.randperm(len(images))[: updates * recipe.batch_size].split(recipe.batch_size):
            batch = as_input(images[chosen])
            with torch.autocast("cpu", torch.bfloat16, enabled=recipe.amp == "bf16"):
                logits = model(batch.flip(-1) if torch.rand(()) < 0.5 else batch)
            loss = F.cross_entropy(logits.float(), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_grad)
            optimizer.step()
            schedule.step()
            total += loss.item()
        at = f"{TILES}-s{recipe.seed}: {size} px, epoch {epoch + 1}/{recipe.epochs}"
        print(f"{at}  loss {total / updates:.3f}", flush=True)


@torch.no_grad()
def right(model: nn.Module, size: int, arguments: argparse.Namespace) -> float:
    """How often a network is right on images of a size, in percent."""
    count = arguments.count if size == SIZES[0] else 10 * arguments.judged
    images, labels = tensors(size, count, "validation", arguments)
    answers = [model(as_input(batch)).argmax(dim=1) for batch in images.split(max(1, 2**18 // size**2))]
    return 100 * (torch.cat(answers) == labels).float().mean().item()


def tensors(size: int, count: int, split: str, arguments: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Images (n, y, x) and labels (n,) of a split."""
    images, labels = load_needles(split, count=count, size=size, distance=size // 2, photographs=arguments.photographs)
    return torch.from_numpy(images), torch.from_numpy(labels)


def as_input(images: Tensor) -> Tensor:
    """Grey images (b, y, x) as networks take them."""
    return ((images.float() / 255 - 0.5) / 0.5)[:, None].expand(-1, 3, -1, -1)


def table(arguments: argparse.Namespace) -> str:
    """Means and deviations of what is there, and of how many seeds."""
    lines = [("", *(f"{size} px" for size in SIZES), "seeds")]
    for name in arguments.attention:
        found = [json.loads(file.read_text()) for file in sorted(arguments.output.glob(f"{name}-s[0-9]*.json"))]
        cells = []
        for size in SIZES:
            values = [cell[str(size)] for cell in found if str(size) in cell]
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            cells.append(f"{statistics.fmean(values):.1f}{spread}" if values else "")
        lines.append((name, *cells, str(len(found))))
    return columns(lines)


if __name__ == "__main__":
    main()
