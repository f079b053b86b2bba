"""`subquad eval` and `subquad predict`."""

import argparse
from pathlib import Path

from subquad.cli.parser import Commands, file_to_write, positive, to_read, whole
from subquad.cli.pretrained import add_network, source_of_one


def add_commands(commands: Commands) -> None:
    """The commands `eval` and `predict`."""
    sub = commands.add("eval", run_eval, "Accuracy, confusion matrix and throughput of trained weights.")
    sub.add_argument("checkpoint", nargs="?", type=to_read, help="run folder, or a weight file of one")
    add_network(sub)
    sub.add_argument("--data", help="data set; the one trained on if left out")
    sub.add_argument("--data-dir", help="its folder")
    sub.add_argument("--split", choices=("validation", "train"), default="validation", help="which part of it")
    sub.add_argument("--img-size", type=positive, metavar="PX", help="look at images of another size than in training")
    sub.add_argument("--batch-size", type=positive, default=64, help="images at a time")
    sub.add_argument("--workers", type=whole, default=0, help="processes that load images")
    sub.add_argument("--strict", action="store_true", help="stop at a broken image instead of skipping it")
    sub.add_argument("--output", type=file_to_write, help="write the confusion matrix here, as .csv and .png")

    sub = commands.add("predict", run_predict, "Class names and probabilities for images; a picture grid for a folder.")
    sub.add_argument("images", nargs="+", type=to_read, metavar="IMAGE", help="image files, or folders of them")
    sub.add_argument("--checkpoint", type=to_read, help="run folder or weight file")
    add_network(sub)
    sub.add_argument("--top-k", type=positive, default=5, help="classes to name")
    sub.add_argument("--strict", action="store_true", help="stop at a broken image instead of skipping it")
    sub.add_argument("--grid", type=file_to_write, help="write the picture grid here; predictions.png for a folder")


def run_eval(arguments: argparse.Namespace) -> None:
    """Evaluate and print accuracy, confusion and throughput."""
    from subquad.evaluation import confusion_text, judge, load_trained, save_confusion
    from subquad.evaluation.published import published_text

    source = source_of_one(arguments)
    found = judge(
        load_trained(source, img_size=arguments.img_size),
        data=arguments.data,
        data_dir=arguments.data_dir,
        split=arguments.split,
        batch_size=arguments.batch_size,
        workers=arguments.workers,
        strict=arguments.strict,
    )
    result = found.result
    print(f"{result.count} images: top-1 {result.top1:.2f} %, top-5 {result.top5:.2f} %, loss {result.loss:.4f}")
    if published := published_text(source, result):
        print(published)
    if found.broken:
        print(f"{len(found.broken)} broken images were skipped, the first is {found.broken[0]}")
    print(f"throughput {found.images_per_second:.0f} images/s on {found.device}, batch {arguments.batch_size}\n")
    print(confusion_text(result.confusion, found.classes))
    if arguments.output is not None:
        files = save_confusion(result.confusion, found.classes, arguments.output)
        print(f"\nthe confusion matrix is in {' and '.join(map(str, files))}")


def run_predict(arguments: argparse.Namespace) -> None:
    """Predict and print, and draw the grid."""
    from subquad.evaluation import load_trained, predict, save_picture_grid

    trained = load_trained(source_of_one(arguments))
    predictions = predict(
        trained.model,
        arguments.images,
        classes=trained.classes,
        input_config=trained.input,
        top_k=arguments.top_k,
        device=trained.device,
        strict=arguments.strict,
        log=print,
    )
    for prediction in predictions:
        best = ", ".join(f"{name} {100 * share:.1f} %" for name, share in prediction.probabilities)
        true = f"  (true: {prediction.true})" if prediction.true is not None else ""
        print(f"{prediction.path}: {best}{true}")
    known = [prediction for prediction in predictions if prediction.true is not None]
    if known:
        right = sum(not prediction.is_wrong for prediction in known)
        print(f"{right} of {len(known)} with a known class are right ({100 * right / len(known):.1f} %)")
    grid = arguments.grid or (Path("predictions.png") if any(path.is_dir() for path in arguments.images) else None)
    if grid is not None:
        save_picture_grid(predictions, grid)
        print(f"the picture grid is in {grid}")
