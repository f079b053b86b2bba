"""`subquad segment train`, `compare`, `eval` and `predict`."""

import argparse
from pathlib import Path
from typing import Any

from subquad.cli.parser import Commands, file_to_write, folder_to_write, to_read
from subquad.cli.recipes import add_training


def add_commands(commands: Commands) -> None:
    """The commands of `segment`."""
    from subquad.training import SegmentRecipe

    parts = commands.group("segment", "Semantic segmentation: train, compare, evaluate, predict.")
    add_training(parts, SegmentRecipe, "segmenter")

    sub = parts.add("eval", run_eval, "Mean and per-class IoU and pixel accuracy of trained weights.")
    sub.add_argument("checkpoint", type=to_read, help="run folder, or a weight file of one")
    sub.add_argument("--data", help="folder or archive in ADE20K's layout; the one trained on if left out")
    sub.add_argument("--split", choices=("validation", "test", "train"), default="validation", help="which part of it")
    add_view(sub)
    sub.add_argument("--output", type=file_to_write, help="write the confusion matrix here, as .csv and .png")

    sub = parts.add("predict", run_predict, "Label maps and colour overlays of images.")
    sub.add_argument("images", nargs="+", type=to_read, metavar="IMAGE", help="image files, or folders of them")
    sub.add_argument("--checkpoint", type=to_read, required=True, help="run folder or weight file")
    add_view(sub)
    sub.add_argument("--output", type=folder_to_write, default=Path("segmented"), help="folder for the pictures")


def add_view(parser: Any) -> None:
    """How images are looked at, and what happens to broken ones."""
    text = "through windows that overlap by a third; as in training if left out"
    parser.add_argument("--slide", action=argparse.BooleanOptionalAction, help=text)
    parser.add_argument("--strict", action="store_true", help="stop at a broken image instead of skipping it")


def run_eval(arguments: argparse.Namespace) -> None:
    """Evaluate and print."""
    from subquad.evaluation import iou_text, judge_segmenter, load_segmenter, save_confusion

    trained = load_segmenter(arguments.checkpoint)
    found = judge_segmenter(
        trained, data=arguments.data, split=arguments.split, slide=arguments.slide, strict=arguments.strict
    )
    result = found.result
    print(
        f"{found.count} images: mIoU {result.miou:.2f} %, pixel accuracy {result.accuracy:.2f} %, "
        f"class accuracy {result.class_accuracy:.2f} %"
    )
    if found.broken:
        print(f"{len(found.broken)} broken images were skipped, the first is {found.broken[0]}")
    print(f"{found.images_per_second:.1f} images/s on {trained.device}\n\n{iou_text(result, trained.classes)}")
    if arguments.output is not None:
        files = save_confusion(result.confusion, trained.classes, arguments.output)
        print(f"\nthe confusion matrix is in {' and '.join(map(str, files))}")


def run_predict(arguments: argparse.Namespace) -> None:
    """Predict, and write the pictures."""
    from subquad.evaluation import load_segmenter, predict_scenes

    trained = load_segmenter(arguments.checkpoint)
    for scene in predict_scenes(
        trained, arguments.images, arguments.output, slide=arguments.slide, strict=arguments.strict, log=print
    ):
        shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in scene.shares[:4])
        print(f"{scene.path}: {shares}")
    print(f"label maps and overlays are in {arguments.output}")
