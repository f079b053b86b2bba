"""What agents and token merging do to denoising networks that were trained without them, and after a short fine-tuning.

    python scripts/agentsd_evidence.py train --data cifar10.tar.xz --network unet     # then: --network dit
    python scripts/agentsd_evidence.py tune --data cifar10.tar.xz --network unet --attention inline
    python scripts/agentsd_evidence.py measure --data cifar10.tar.xz --network unet --classifier RUN
    python scripts/agentsd_evidence.py page                    # docs/agentsd.md from docs/agentsd.json
    python scripts/agentsd_evidence.py cost                    # operations of all of it, counted

Every command goes on where it was (Ctrl-C and SIGTERM end it), runs at the lowest priority and on a GPU where there is
one (`--device cuda`). Weights lie in `--output`. `measure` compares on test images, all methods on the same noise: the
error of the predicted noise at ten noise levels, image by image; then images that are made of the same noises, by their
Fréchet distance from real ones in the features of a classifier of ours (`--classifier`, a run of `subquad train`), and
a picture. `--toy` is a test of all this: tiny networks, few images.
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from agentsd_page import page, read_results, summary
from low_priority import give_way
from PIL import Image, ImageDraw
from small_denoisers import BATCH, NETWORKS, SIDE, Denoiser, Training, as_input, converted, load_images, schedule
from torch import Tensor, nn

from subquad.analysis.noise_errors import noise_errors, noise_of
from subquad.diffusion import EARLY, SWITCH, apply_agent_attention, apply_token_merging, remove_agent_attention
from subquad.errors import SubquadError
from subquad.holding import holding
from subquad.writing import replacing, write_json, write_text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "agentsd.json"
STEPS, CHUNK, SHOWN = 50, 100, 10
"""Of sampling; images that are made before they are kept; images of each method in the picture."""

Change = Callable[[nn.Module], Any]


def unchanged(network: nn.Module) -> None:
    """Softmax on all tokens."""
    remove_agent_attention(network)


def merging(ratio: float, side: int = 2) -> Change:
    """Token merging alone."""
    return partial(apply_token_merging, ratio=ratio, sx=side, sy=side)


def agents(**settings: Any) -> Change:
    """Agents as in the authors' early phase, at all levels."""
    early = {"sx": EARLY.sx, "sy": EARLY.sy, "ratio": EARLY.ratio, "agent_ratio": EARLY.agent_ratio}
    return partial(apply_agent_attention, **early | settings)


METHODS: dict[str, Change] = {
    "softmax": unchanged,
    **{f"merging {share} %": merging(share / 100) for share in (10, 20, 30, 40, 50, 75)},
    "merging 40 %, cells of 4×4": merging(0.4, 4),
    **{f"agents {share} %": agents(ratio=share / 100) for share in (10, 20, 30, 40, 50, 75)},
    "agents 40 %, without k_scale": agents(k_scale=1.0),
    "agents 40 %, without k_shortcut": agents(k_shortcut=0.0),
    "agents 40 %, without both": agents(k_scale=1.0, k_shortcut=0.0),
    **{f"agents 40 %, cells of {side}×{side}": agents(sx=side, sy=side, agent_ratio=1.0) for side in (2, 3, 8)},
    "agents 40 %, two levels": agents(max_downsample=2),
}
"""What is done to a network, by name, at every noise level."""

PHASES: dict[str, tuple[Change, Change]] = {
    "softmax": (unchanged, unchanged),
    "merging 40 %": (merging(0.4), merging(0.4)),
    "merging 40 %, early steps": (merging(0.4), unchanged),
    "merging 40 %, late steps": (unchanged, merging(0.4)),
    "agents 40 %": (agents(), agents()),
    "agents 40 %, early steps": (agents(), unchanged),
    "agents 40 %, late steps": (unchanged, agents()),
    "as published": (agents(), merging(0.4)),
}
"""What is done while images are made: from the noise level on at which the published schedule changes, and below it."""

LEVELS = tuple(range(50, 1000, 100))


def main() -> None:
    """Do what the command says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=list(COMMANDS))
    parser.add_argument("--data", type=Path, help="folder or archive of CIFAR-10")
    parser.add_argument("--network", choices=list(NETWORKS), default="unet")
    parser.add_argument("--attention", default="softmax", help="tune: the mechanism; softmax is trained on as it is")
    parser.add_argument("--classifier", type=Path, help="measure: a run of `subquad train` on CIFAR-10")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "agentsd", help="folder of the weights")
    parser.add_argument("--results", type=Path, default=RESULTS, help="measure and page: what was found, as JSON")
    parser.add_argument("--updates", type=int, default=10_000, help=f"train: of {BATCH} images")
    parser.add_argument("--tuning", type=int, default=1_000, help="tune: updates more")
    parser.add_argument("--images", type=int, default=2_000, help="measure: test images")
    parser.add_argument("--samples", type=int, default=1_000, help="measure: images made by each method")
    parser.add_argument("--amp", choices=("", "bf16"), default="bf16", help="train and tune: mixed precision")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--threads", type=int, default=1, help="on a CPU; a network a core is the most that two cores do"
    )
    parser.add_argument("--toy", action="store_true", help="tiny networks, and few of everything that is not said")
    arguments = parser.parse_args()
    if arguments.toy:
        small = {"updates": 3, "tuning": 2, "images": 8, "samples": 4}
        given = {name: getattr(arguments, name) for name in small}
        usual = {name: parser.get_default(name) for name in small}
        vars(arguments).update({name: value if value != usual[name] else small[name] for name, value in given.items()})
        arguments.output = arguments.output / "toy"
    give_way()
    torch.set_num_threads(arguments.threads)
    try:
        COMMANDS[arguments.command](arguments)
    except SubquadError as error:
        raise SystemExit(f"agentsd_evidence: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("agentsd_evidence: interrupted: what was measured is kept, the same command goes on") from None


def train(arguments: argparse.Namespace) -> None:
    """Train a network with softmax."""
    training = started(arguments)
    training.run(*load_images(data_of(arguments), "train", 200 if arguments.toy else None), arguments.updates)


def tune(arguments: argparse.Namespace) -> None:
    """Exchange a trained network's attention and train it a little longer."""
    teacher = trained(arguments)
    training = tuned(arguments, teacher, arguments.attention)
    training.run(*load_images(data_of(arguments), "train", 200 if arguments.toy else None), arguments.tuning)


def measure(arguments: argparse.Namespace) -> None:
    """Errors, images, their summary and the picture; what is there is not measured again."""
    teacher = trained(arguments)
    # a DiT has one level alone
    methods = {name: change for name, change in METHODS.items() if arguments.network != "dit" or "levels" not in name}
    denoisers = {name: (teacher.averaged, change) for name, change in methods.items()}
    denoisers |= {f"{name}, tuned": (training.averaged, unchanged) for name, training in tunings(arguments, teacher)}
    pictures, labels = load_images(data_of(arguments), "validation", arguments.images)
    folder = arguments.output / arguments.network
    with holding(folder / "measured"):
        kept = folder / "measured" / f"{teacher.updates}-updates"
        errors = measured_errors(denoisers, as_input(pictures), labels, teacher.kept, kept / "errors", arguments)
        made = {name: images_of(name, pair, kept, arguments) for name, pair in sampled(denoisers).items()}
        features = features_of({**made, "": pictures}, arguments)
        found = summary(errors, made, features, round(SWITCH * 1000))
        found |= {"updates": teacher.updates, "test_images": len(pictures), "made_images": len(made["softmax"])}
        found |= {"hours": round(teacher.seconds / 3600, 2), "torch": torch.__version__, "toy": arguments.toy}
    results = read_results(arguments.results)
    write_json(arguments.results, {**results, arguments.network: found}, indent=1)
    picture = arguments.results.with_name(f"agentsd-{arguments.network}.png")
    save_picture(made, picture)
    print(f"{arguments.results}, {picture}")


def write_page(arguments: argparse.Namespace) -> None:
    """Write docs/agentsd.md, or a page beside `--results`."""
    write_text(arguments.results.with_suffix(".md"), page(read_results(arguments.results)))
    print(arguments.results.with_suffix(".md"))


def cost(arguments: argparse.Namespace) -> None:
    """Print the operations of each command."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    for name, make in NETWORKS.items():
        image, label = torch.zeros(1, 3, SIDE, SIDE), torch.zeros(1, dtype=torch.long)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            make(toy=arguments.toy).predict(image, 500, label)
        one = counter.get_total_flops() / 1e15
        parts = {
            "train": 3 * one * BATCH * arguments.updates,
            "tune, each mechanism": 3 * one * BATCH * arguments.tuning,
            "errors": one * arguments.images * len(LEVELS) * len(METHODS),
            "images": one * arguments.samples * STEPS * len(PHASES),
        }
        print(f"{name}: " + ", ".join(f"{part} {value:.2f} PFLOP" for part, value in parts.items()))


COMMANDS = {"train": train, "tune": tune, "measure": measure, "page": write_page, "cost": cost}


def data_of(arguments: argparse.Namespace) -> Path:
    """Where CIFAR-10 is."""
    if arguments.data is None:
        raise SubquadError(f"{arguments.command} needs --data: the folder or archive of CIFAR-10")
    return arguments.data


def started(arguments: argparse.Namespace) -> Training:
    """The network with softmax as far as it was trained."""
    torch.manual_seed(0)
    file = arguments.output / arguments.network / "state.pt"
    denoiser = NETWORKS[arguments.network](toy=arguments.toy)
    return Training(denoiser, file, amp=arguments.amp, device=arguments.device)


def trained(arguments: argparse.Namespace) -> Training:
    """The network with softmax; raises where it was not trained at all."""
    training = started(arguments)
    if not training.updates:
        raise SubquadError(f"{training.file} is not there: run the command train with --network {arguments.network}")
    return training


def tuned(arguments: argparse.Namespace, teacher: Training, name: str) -> Training:
    """A fine-tuned network as far as it is, begun from the teacher as it is now."""
    folder = arguments.output / arguments.network / f"tuned-{teacher.updates}-{name.replace(':', '~')}"
    torch.manual_seed(0)
    denoiser = converted(teacher.averaged, name).requires_grad_(True)
    return Training(denoiser, folder / "state.pt", seed=1, amp=arguments.amp, device=arguments.device)


def tunings(arguments: argparse.Namespace, teacher: Training) -> list[tuple[str, Training]]:
    """All that were fine-tuned from this teacher, by mechanism."""
    folders = sorted((arguments.output / arguments.network).glob(f"tuned-{teacher.updates}-*/state.pt"))
    names = [file.parent.name.split("-", 2)[2].replace("~", ":") for file in folders]
    return [(name, tuned(arguments, teacher, name)) for name in names]


def measured_errors(
    denoisers: Mapping[str, tuple[Denoiser, Change]],
    images: Tensor,
    labels: Tensor,
    kept: Tensor,
    folder: Path,
    arguments: argparse.Namespace,
) -> dict[str, dict[int, Tensor]]:
    """The error of each image by method and level, each kept in a file once it is there."""
    images, labels = images.to(arguments.device), labels.to(arguments.device)
    errors: dict[str, dict[int, Tensor]] = {}
    for name, (denoiser, change) in denoisers.items():
        for level in LEVELS:
            file = folder / file_name(name) / f"{level}-{len(images)}.npy"
            if not file.exists():
                change(denoiser.network)
                found = noise_errors(denoiser.predict, images, labels, level, float(kept[level]))
                remove_agent_attention(denoiser.network)
                save_array(file, found.numpy())
                print(f"{name}, noise level {level}: {found.mean():.5f}", flush=True)
            errors.setdefault(name, {})[level] = torch.from_numpy(np.load(file))
    return errors


def sampled(denoisers: Mapping[str, tuple[Denoiser, Change]]) -> dict[str, tuple[Denoiser, tuple[Change, Change]]]:
    """What images are made with: the phases, and the fine-tuned networks."""
    teacher = denoisers["softmax"][0]
    phases = {name: (teacher, changes) for name, changes in PHASES.items()}
    return phases | {name: (one, (unchanged, unchanged)) for name, (one, _) in denoisers.items() if one is not teacher}


def images_of(
    name: str, pair: tuple[Denoiser, tuple[Change, Change]], folder: Path, arguments: argparse.Namespace
) -> Tensor:
    """Images (n, 3, y, x) in bytes, made of the noises 0 to n − 1."""
    parts = []
    for numbers in torch.arange(arguments.samples).split(CHUNK):
        file = folder / "images" / file_name(name) / f"{int(numbers[0])}-{len(numbers)}.npy"
        if not file.exists():
            save_array(file, sample(*pair, numbers, arguments.device).numpy())
            print(f"{name}: {int(numbers[-1]) + 1} of {arguments.samples} images", flush=True)
        parts.append(torch.from_numpy(np.load(file)))
    return torch.cat(parts)


@torch.no_grad()
def sample(denoiser: Denoiser, changes: tuple[Change, Change], numbers: Tensor, device: str) -> Tensor:
    """Images of the noises of these numbers, in bytes, with one change in the early steps and another in the late."""
    sampler = schedule()
    sampler.set_timesteps(STEPS)
    images, labels = noise_of(numbers, (3, SIDE, SIDE), seed=1).to(device), (numbers % 10).to(device)
    early, late = changes
    early(denoiser.network)
    is_early = True
    for level in sampler.timesteps.tolist():
        if is_early and level < SWITCH * 1000:
            is_early = False
            remove_agent_attention(denoiser.network)
            late(denoiser.network)
        images = sampler.step(denoiser.predict(images, level, labels), level, images).prev_sample
    remove_agent_attention(denoiser.network)
    return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu()


@torch.no_grad()
def features_of(sets: Mapping[str, Tensor], arguments: argparse.Namespace) -> dict[str, Tensor]:
    """What a classifier makes of images in bytes before its last layer, by name; nothing without a classifier."""
    if arguments.classifier is None:
        return {}
    from subquad.runs import open_trained

    opened = open_trained(arguments.classifier, task="classify").image_network()
    mean, std = (torch.tensor(value)[:, None, None] for value in (opened.input.mean, opened.input.std))

    def features(pictures: Tensor) -> Tensor:
        x = (pictures.float() / 255 - mean) / std
        if opened.input.img_size != (SIDE, SIDE):
            x = F.interpolate(x, opened.input.img_size, mode="bicubic", antialias=True)
        return opened.model.forward_head(opened.model.forward_features(x.to(opened.device)), pre_logits=True).cpu()

    return {name: torch.cat([features(part) for part in sets[name].split(BATCH)]) for name in sets}


def save_picture(made: Mapping[str, Tensor], path: Path, zoom: int = 2) -> None:
    """Images of the same noises side by side, a row for each method."""
    left, side = 190, SIDE * zoom
    columns = min(SHOWN, len(next(iter(made.values()))))
    canvas = Image.new("RGB", (left + columns * (side + 2), len(made) * (side + 2)), "white")
    draw = ImageDraw.Draw(canvas)
    for row, (name, pictures) in enumerate(made.items()):
        top = row * (side + 2)
        draw.text((4, top + side // 2 - 6), name.replace("×", "x"), fill="black")
        for column, picture in enumerate(pictures[:columns]):
            tile = Image.fromarray(picture.permute(1, 2, 0).numpy()).resize((side, side), Image.Resampling.NEAREST)
            canvas.paste(tile, (left + column * (side + 2), top))
    with replacing(path) as aside:
        canvas.save(aside, "PNG")


def file_name(method: str) -> str:
    """A method as a folder is called."""
    return "".join(letter if letter.isalnum() else "-" for letter in method)


def save_array(file: Path, array: Any) -> None:
    """Write an array whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as aside, aside.open("wb") as stream:
        np.save(stream, array)


if __name__ == "__main__":
    main()
