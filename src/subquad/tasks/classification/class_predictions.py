"""What a model sees in image files."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from subquad.data import InputConfig, eval_transform
from subquad.data.walking import find_path
from subquad.tasks.accuracy import check_finite, evaluating
from subquad.tasks.class_names import all_named
from subquad.tasks.classification.picture_grid import Prediction, save_picture_grid
from subquad.tasks.figures import check_picture
from subquad.tasks.image_files import check_no_image, readable_images, rooted_image_files
from subquad.tasks.trained import ImageNetwork

_BATCH = 64


def predict(
    model: nn.Module,
    paths: Path | str | Iterable[Path | str],
    *,
    classes: Sequence[str],
    input_config: InputConfig,
    top_k: int = 5,
    device: torch.device | str = "cpu",
    strict: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> list[Prediction]:
    """Classify images.

    Args:
        model: gives a logit a class.
        paths: image files, and folders in which all images are meant.
        classes: names of the classes.
        input_config: what the model was trained to see.
        top_k: how many classes to name.
        device: where `model` is.
        strict: raise at a broken image instead of skipping it.
        log: gets a line for each image that is skipped.

    Raises:
        SubquadError: no image can be read, or the model gives no numbers.
    """
    rooted = list(rooted_image_files(paths))
    files, folders = [file for _, file in rooted], {file: _class_folder(root, file, classes) for root, file in rooted}
    transform = eval_transform(input_config)
    predictions: list[Prediction] = []
    bar = tqdm(files, desc="predicting", leave=False, disable=None)
    inputs = readable_images(bar, transform, strict, log)
    with evaluating(model):
        while batch := list(islice(inputs, _BATCH)):
            logits = model(torch.stack([image for _, image in batch]).to(device))
            check_finite(logits, batch[0][0])
            names = all_named(classes, logits.shape[-1])
            best = logits.float().softmax(-1).cpu().topk(min(top_k, len(names)))
            for (path, _), values, places in zip(batch, best.values.tolist(), best.indices.tolist(), strict=True):
                named = [(names[place], value) for place, value in zip(places, values, strict=True)]
                predictions.append(Prediction(path, named, folders[path]))
    return predictions


def predicted_classes(
    trained: ImageNetwork,
    files: Sequence[Path],
    log: Callable[[str], None] = lambda line: None,
    *,
    top_k: int = 5,
    strict: bool = False,
    grid: Path | str | None = None,
) -> Iterator[Prediction]:
    """Classify images with a trained network; they are drawn to `grid`, for folders in any case.

    `log` hears how many are right, where folders tell, and where the picture is. Raises SubquadError, in front of all
    work, where the picture would be written over one of the images, or can't be drawn.
    """
    drawn = None if grid is None else Path(grid)
    if drawn is None and any(find_path(path).is_dir() for path in files):
        drawn = Path("predictions.png")
    if drawn is not None:
        check_no_image(drawn, files, "--grid")
        check_picture(drawn)
    predictions = predict(
        trained.model,
        files,
        classes=trained.classes,
        input_config=trained.input,
        top_k=top_k,
        device=trained.device,
        strict=strict,
        log=log,
    )
    yield from predictions
    known = [prediction for prediction in predictions if prediction.true is not None]
    if known:
        right = sum(not prediction.is_wrong for prediction in known)
        log(f"{right} of {len(known)} with a known class are right ({100 * right / len(known):.1f} %)")
    if drawn is not None:
        save_picture_grid(predictions, drawn)
        log(f"the picture grid is in {drawn}")


def _class_folder(root: Path | None, file: Path, classes: Sequence[str]) -> str | None:
    """The class whose folder an image lies in, as training finds it: at any depth, and where a link lies itself."""
    # of a folder that was named, the outermost folder in it; then that folder itself
    inside = () if root is None else file.parent.relative_to(root).parts
    around = (file.parent if root is None else root).absolute()
    # links of folders are followed only where their own names say nothing
    names = (*inside, around.name, around.resolve().name)
    return next((name for name in names if name in classes), None)
