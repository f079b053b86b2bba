"""A gigapixel image through a ViT-Tiny of linear attention: time, peak memory, the picture, the line against softmax.

    python scripts/gigapixel.py camvid.tar --output gigapixel          # 32,768², fp32 and bf16, some 15 minutes
    python scripts/gigapixel.py camvid.tar --output try --side 4096 --largest-softmax 4096

The image is tiled from CamVid's photographs. The network's numbers are drawn, and only its head is trained, by least
squares on what CamVid says of each patch: the heat is of a class that it tells apart by colour, texture and, through
attention, by all other patches. In the folder: image.npy, network.safetensors, heat and labels, picture.png, lines.svg,
gigapixel.json with all figures.
"""

import argparse
import json
import math
import platform
import resource
import subprocess
import sys
import tarfile
import time
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from numpy.lib.format import open_memmap
from PIL import Image

import subquad

PATCH = 16
WIDTH, HEADS, DEPTH = 192, 3, 12
FEWEST = 4**5
"""Tokens that times are measured from."""
SHOWN = 1024
"""Pixels of a side of the picture."""


def photographs(archive: Path, count: int) -> tuple[list[np.ndarray], list[np.ndarray], list[str]]:
    """Photographs of CamVid's training set, their class numbers, and the classes' names."""
    images, labels, names = [], [], []
    with tarfile.open(archive) as tar:
        members = {member.name: member for member in tar.getmembers()}
        about = next(name for name in members if name.endswith("objectInfo.txt"))
        names = [
            "unlabelled",
            *(line.split("\t")[1] for line in tar.extractfile(members[about]).read().decode().splitlines() if line),
        ]
        of_images = sorted(name for name in members if "/images/training/" in name)
        for name in of_images[:: max(1, len(of_images) // count)][:count]:
            other = name.replace("/images/", "/annotations/").rsplit(".", 1)[0] + ".png"
            images.append(np.asarray(Image.open(BytesIO(tar.extractfile(members[name]).read())).convert("RGB")))
            labels.append(np.asarray(Image.open(BytesIO(tar.extractfile(members[other]).read()))))
    return images, labels, names


def tiled(images: list[np.ndarray], side: int, path: Path) -> None:
    """Write an image of side² pixels: photographs beside each other, half of them mirrored."""
    random = np.random.default_rng(0)
    height, width = images[0].shape[:2]
    whole = open_memmap(path, mode="w+", dtype=np.uint8, shape=(side, side, 3))
    for top in range(0, side, height):
        for left in range(0, side, width):
            photograph = images[random.integers(len(images))][:, :: random.choice([1, -1])]
            place = whole[top : top + height, left : left + width]
            place[:] = photograph[: place.shape[0], : place.shape[1]]
        whole.flush()


def normalised(image: np.ndarray) -> torch.Tensor:
    """A photograph as the network takes it, (3, y, x)."""
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return ((torch.from_numpy(image.copy()) / 255 - mean) / std).permute(2, 0, 1)


@torch.inference_mode()
def network(images: list[np.ndarray], labels: list[np.ndarray], names: list[str], path: Path) -> None:
    """Write a network of drawn numbers whose head is fitted to the labels of patches."""
    model = subquad.create_model("deit_tiny", attention="linear", class_token=False, num_classes=len(names))
    features, wanted = [], []
    for image, label in zip(images, labels, strict=True):
        tokens = model.eval().forward_features(normalised(image)[None])[0]
        middles = label[PATCH // 2 :: PATCH, PATCH // 2 :: PATCH][: tokens.shape[0], : tokens.shape[1]]
        features.append(tokens[: middles.shape[0], : middles.shape[1]].flatten(0, 1).double())
        wanted.append(torch.from_numpy(middles.copy()).flatten().long())
    x = torch.cat(features)
    x = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    y = torch.nn.functional.one_hot(torch.cat(wanted), len(names)).double()
    solved = torch.linalg.solve(x.T @ x + 1e-3 * len(x) * torch.eye(x.shape[1]), x.T @ y)
    model.head.weight.copy_(solved[:-1].T)
    model.head.bias.copy_(solved[-1])
    agreement = ((x @ solved).argmax(1) == y.argmax(1)).double().mean()
    print(f"the head agrees with {agreement:.1%} of the patches that it is fitted to")
    subquad.save_weights(model, path, {"classes": names, "input": {}})


def streamed(folder: Path, dtype: str, shown: str) -> dict:
    """Run `subquad stream` in a process of its own: seconds and peak memory."""
    command = [
        sys.executable,
        "-m",
        "subquad",
        "stream",
        str(folder / "network.safetensors"),
        str(folder / "image.npy"),
    ]
    command += ["--heat", str(folder / f"heat-{dtype}.npy"), "--labels", str(folder / f"labels-{dtype}.png")]
    start = time.perf_counter()
    subprocess.run([*command, "--class", shown, "--dtype", dtype], check=True)
    seconds = time.perf_counter() - start
    # the largest of all processes so far; each is larger than what there was before it, or is bf16 behind fp32
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    return {"dtype": dtype, "seconds": round(seconds, 1), "peak_gib_at_most": round(peak, 2)}


@torch.inference_mode()
def layer_seconds(attention: str, tokens: int) -> float:
    """Seconds of one block on a square of tokens, the best of some."""
    side = math.isqrt(tokens)
    grid = subquad.TokenGrid(side, side)
    model = subquad.create_model("deit_tiny", attention=attention, class_token=False, depths=(1,), num_classes=0)
    block = subquad.optimize(model).stages[0].blocks[0]
    x = torch.randn(1, grid.num_tokens, WIDTH)
    times = []
    while len(times) < 2 or (sum(times) < 2 and len(times) < 10):
        start = time.perf_counter()
        block(x, grid=grid)
        times.append(time.perf_counter() - start)
    return min(times)


def lines(found: dict[str, list[tuple[int, float]]], beyond: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Draw seconds against tokens, both logarithmic: what was measured as lines, what was extrapolated as dots."""
    points = [point for series in (*found.values(), *beyond.values()) for point in series]
    bounds = [(math.log10(min(p[k] for p in points)), math.log10(max(p[k] for p in points))) for k in (0, 1)]

    def place(point: tuple[int, float]) -> tuple[float, float]:
        x, y = ((math.log10(point[k]) - bounds[k][0]) / (bounds[k][1] - bounds[k][0]) for k in (0, 1))
        return 70 + 480 * x, 350 - 320 * y

    colours = {"linear": "#0072b2", "softmax": "#667080"}
    parts = ['<rect width="660" height="400" fill="white"/>']
    for power in range(math.ceil(bounds[1][0]), math.floor(bounds[1][1]) + 1):
        _, y = place((points[0][0], 10.0**power))
        parts.append(
            f'<path d="M70 {y:.0f}H550" stroke="#e2e3de"/>'
            f'<text x="62" y="{y + 4:.0f}" text-anchor="end">{10.0**power:g}</text>'
        )
    for tokens in sorted({point[0] for point in points}):
        x, _ = place((tokens, points[0][1]))
        if math.log2(tokens) % 4 == 0:
            parts.append(f'<text x="{x:.0f}" y="370" text-anchor="middle">{tokens:,}</text>')
    for name, series in found.items():
        path_of = " L".join("{:.1f} {:.1f}".format(*place(point)) for point in series)
        parts.append(f'<path d="M{path_of}" fill="none" stroke="{colours[name]}" stroke-width="2"/>')
        further = " L".join("{:.1f} {:.1f}".format(*place(point)) for point in [series[-1], *beyond.get(name, [])])
        parts.append(
            f'<path d="M{further}" fill="none" stroke="{colours[name]}" stroke-width="2" stroke-dasharray="1 5"/>'
        )
        x, y = place([*series, *beyond.get(name, [])][-1])
        parts.append(f'<text x="{x + 8:.0f}" y="{y + 4:.0f}" fill="{colours[name]}">{name}</text>')
    parts.append('<text x="310" y="392" text-anchor="middle">tokens</text><text x="70" y="20">seconds</text>')
    body = "\n".join(parts)
    path.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 660 400" font-family="sans-serif" font-size="12">\n'
        f"{body}\n</svg>\n"
    )


def picture(folder: Path, dtype: str) -> None:
    """Draw the image small, and beside it the heat in colours."""
    whole = np.load(folder / "image.npy", mmap_mode="r")
    step = max(1, whole.shape[0] // SHOWN)
    small = np.asarray(whole[::step, ::step])[:SHOWN, :SHOWN]
    heat = np.load(folder / f"heat-{dtype}.npy")
    low, high = np.quantile(heat, [0.02, 0.98])
    share = np.clip((heat - low) / max(high - low, 1e-9), 0, 1)
    coloured = np.stack([255 * np.clip(3 * share - k, 0, 1) for k in range(3)], axis=-1).astype(np.uint8)
    beside = Image.fromarray(coloured).resize(small.shape[1::-1], Image.Resampling.BOX)
    both = Image.new("RGB", (2 * small.shape[1], small.shape[0]))
    both.paste(Image.fromarray(small), (0, 0))
    both.paste(beside, (small.shape[1], 0))
    both.save(folder / "picture.png")


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse what would end in a trace behind minutes of work."""
    if not arguments.camvid.is_file() or not tarfile.is_tarfile(arguments.camvid):
        parser.error(f"{arguments.camvid} is no tar of photographs")
    if arguments.side // PATCH < 2 * math.isqrt(FEWEST):
        parser.error(f"lines are of two numbers of tokens at least: --side of {2 * PATCH * math.isqrt(FEWEST)} or more")
    if arguments.largest_softmax < FEWEST:
        parser.error(f"times are of {FEWEST} tokens and more: --largest-softmax of {FEWEST} or more")
    if unknown := set(arguments.dtypes) - {"bf16", "fp32"}:
        parser.error(f"--dtypes are bf16 and fp32, not {' and '.join(sorted(unknown))}")


def main() -> None:
    """Make the image and the network, stream, measure and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("camvid", type=Path, help="camvid.tar")
    parser.add_argument("--output", type=Path, required=True, help="a folder; 3.3 GB for the image at full size")
    parser.add_argument("--side", type=int, default=32_768, help="pixels")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--class", dest="shown", default="road", help="the class whose heat is drawn")
    parser.add_argument("--largest-softmax", type=int, default=65_536, help="tokens up to which softmax is measured")
    arguments = parser.parse_args()
    check(parser, arguments)
    folder = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    images, labels, names = photographs(arguments.camvid, 40)
    if arguments.shown not in names:
        parser.error(f"--class {arguments.shown} is none of {', '.join(names)}")
    network(images, labels, names, folder / "network.safetensors")
    tiled(images, arguments.side, folder / "image.npy")
    tokens = (arguments.side // PATCH) ** 2
    runs = [streamed(folder, dtype, arguments.shown) for dtype in arguments.dtypes]
    picture(folder, arguments.dtypes[0])
    sizes = [4**k for k in range(5, 12) if FEWEST <= 4**k <= min(tokens, 2**18)]
    found = {
        "linear": [(size, DEPTH * layer_seconds("linear", size)) for size in sizes],
        "softmax": [
            (size, DEPTH * layer_seconds("softmax", size)) for size in sizes if size <= arguments.largest_softmax
        ],
    }
    # n² of the last measured size, which is nearly all of it there, and what was streamed in fp32
    last, seconds = found["softmax"][-1]
    beyond = {
        "softmax": [
            (size, seconds * (size / last) ** 2) for size in (4**k for k in range(5, 12)) if last < size <= tokens
        ]
    }
    of_fp32 = next((run["seconds"] for run in runs if run["dtype"] == "fp32"), None)
    if of_fp32 and tokens > found["linear"][-1][0]:
        found["linear"].append((tokens, of_fp32))
    lines(found, beyond, folder / "lines.svg")
    about = {"side": arguments.side, "tokens": tokens, "threads": torch.get_num_threads(), "torch": torch.__version__}
    about |= {
        "machine": platform.processor() or platform.machine(),
        "runs": runs,
        "measured": found,
        "extrapolated": beyond,
    }
    (folder / "gigapixel.json").write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
