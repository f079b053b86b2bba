"""`subquad detect train`, `compare`, `eval` and `predict`."""

import argparse
from pathlib import Path

from subquad.cli.parser import Commands, folder_to_write, share, to_read
from subquad.cli.recipes import add_training


def add_commands(commands: Commands) -> None:
    """The commands of `detect`."""
    from subquad.training import DetectRecipe

    parts = commands.group("detect", "Detection and instance segmentation: train, compare, evaluate, predict.")
    add_training(parts, DetectRecipe, "detector")

    sub = parts.add("eval", run_eval, "Average precision of trained weights, as COCO has it.")
    sub.add_argument("checkpoint", type=to_read, help="run folder, or a weight file of one")
    sub.add_argument("--data", help="folder or archive in COCO's layout; the one trained on if left out")
    sub.add_argument("--split", choices=("validation", "test", "train"), default="validation", help="which part of it")
    sub.add_argument("--strict", action="store_true", help="stop at a broken image or an empty box")

    sub = parts.add("predict", run_predict, "Objects of images, drawn with their boxes and masks.")
    sub.add_argument("images", nargs="+", type=to_read, metavar="IMAGE", help="image files, or folders of them")
    sub.add_argument("--checkpoint", type=to_read, required=True, help="run folder or weight file")
    sub.add_argument("--threshold", type=share, default=0.5, help="show what has at least this score")
    sub.add_argument("--strict", action="store_true", help="stop at a broken image instead of skipping it")
    sub.add_argument("--output", type=folder_to_write, default=Path("detected"), help="folder for the pictures")


def run_eval(arguments: argparse.Namespace) -> None:
    """Evaluate and print."""
    from subquad.evaluation import judge_detector, load_detector, precision_text

    trained = load_detector(arguments.checkpoint)
    found = judge_detector(trained, data=arguments.data, split=arguments.split, strict=arguments.strict)
    print(f"{found.count} images, {found.images_per_second:.1f} images/s on {trained.device}; average precision in %")
    if found.broken:
        print(f"{len(found.broken)} broken images were skipped, the first is {found.broken[0]}")
    print(f"\n{precision_text(found.result, trained.classes)}")


def run_predict(arguments: argparse.Namespace) -> None:
    """Predict, and write the pictures."""
    from subquad.evaluation import load_detector, predict_objects

    trained = load_detector(arguments.checkpoint)
    for image in predict_objects(
        trained,
        arguments.images,
        arguments.output,
        threshold=arguments.threshold,
        strict=arguments.strict,
        log=print,
    ):
        names = ", ".join(f"{name} {score:.2f}" for name, score, *_ in image.objects[:5])
        print(f"{image.path}: {len(image.objects)} objects{': ' if names else ''}{names}")
    print(f"the pictures are in {arguments.output}")
