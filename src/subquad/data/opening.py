"""From what a user calls data to the data: names, folders, archives."""

from pathlib import Path

from subquad.data.archives import not_there
from subquad.data.dataset import ImageDataset, Source
from subquad.data.folders import LAYOUT, SPLITS, read_folder
from subquad.data.named_sets import read_digits, read_hub, read_torch
from subquad.data.sampling import thin_out
from subquad.data.synthetic.long_distances import DRAWN, read_drawn
from subquad.data.walking import find_path
from subquad.errors import SubquadError, unknown_name

NAMES = {
    "digits": "1,797 handwritten digits of 8×8 pixels, which come with scikit-learn",
    "cifar10": "60,000 photographs of 32×32 pixels in 10 classes, from data_dir or downloaded",
    "imagenet": f"a folder data_dir with {LAYOUT}",
    "folder": "any folder of images data_dir, or an archive of one",
    "pathfinder:<settings>": "drawn: are two discs joined by a path? size=32,contour_length=14,count=20000",
    "same_different:<settings>": "drawn: are two patterns equal? size=32,distance=12,cells=2,count=20000",
    "needles:<settings>": "drawn: do two marks point the same way? size=64,distance=32, on photographs of data_dir",
    "torch/<name>": "a data set of torchvision",
    "hfds/<name>": "a data set of the Hugging Face hub",
}
"""What data may be called, besides the path of a folder or archive, and what it is."""


def is_named(data: str) -> bool:
    """Whether data are called by a name of `NAMES`, and not by a path."""
    kind, slash, _ = data.partition("/")
    return data in NAMES or data.partition(":")[0] in DRAWN or (bool(slash) and kind in ("torch", "hfds"))


def load_dataset(
    name: str, *, split: str, data_dir: Path | str | None = None, strict: bool = False, max_images: int | None = None
) -> ImageDataset:
    """The images of a data set, without a transform.

    Args:
        name: one of `NAMES`, or the path of a folder or archive of images.
        split: "train" or "validation".
        data_dir: where the images of a named data set are; or those of a folder or archive that was at `name` before.
        strict: raise at a broken image instead of skipping it.
        max_images: keep so many at most, the classes in proportion; of images that are drawn, from the first ones.
    """
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
    source = _find(name, split, find_path(data_dir) if data_dir else None, max_images)
    if max_images is not None:
        source = source.part(thin_out(source.labels, max_images))
    return ImageDataset(source, name, strict=strict)


def check_words(data: str | None, data_dir: Path | str | None) -> None:
    """Raise for what a user calls data where it can be seen to be wrong before anything is opened or fetched.

    Raises:
        SubquadError: there are no such data, or both words are folders or archives, of which one would be passed over.
    """
    if data is None or not str(data).strip():
        return
    if is_named(data):
        if data in ("imagenet", "folder") and not data_dir:
            raise _needs_folder(data)
        # where those of the hub are kept is a folder that is made
        if data_dir and not data.startswith("hfds/"):
            check_places(data_dir)
    elif not data_dir and not _is_path(data):
        raise _unknown(data)
    else:
        check_places(data, data_dir)


def check_places(data: Path | str | None, data_dir: Path | str | None = None) -> None:
    """Raise where data that no name stands for are not there, or are in two places, as `check_words` does."""
    place = find_path(data_dir or data or "")
    if not place.exists():
        raise SubquadError(not_there("folder or archive", place))
    if data and data_dir and find_path(data).exists():
        raise SubquadError(
            f"data {data} and data_dir {data_dir} are two places, and the second would be read: leave out one of them"
        )


def _find(name: str, split: str, data_dir: Path | None, max_images: int | None) -> Source:
    kind, _, rest = name.partition("/")
    drawn, _, settings = name.partition(":")
    if drawn in DRAWN:
        return read_drawn(drawn, split, settings, data_dir, most=max_images)
    if name == "digits":
        if data_dir:
            raise SubquadError(f"digits come with scikit-learn and are not read from {data_dir}: ask for data 'folder'")
        return read_digits(split)
    if name == "cifar10":
        return _cifar10(split, data_dir)
    if name in ("imagenet", "folder"):
        if data_dir is None:
            raise _needs_folder(name)
        return read_folder(data_dir, split)
    if kind == "torch" and rest:
        return read_torch(rest, split, _existing(data_dir))
    if kind == "hfds" and rest:
        return read_hub(rest, split, data_dir)
    if not _is_path(name):
        raise _unknown(name)
    # they may have moved since they were called so
    return read_folder(data_dir or find_path(name), split)


def _is_path(name: str) -> bool:
    """Whether there is something of this name, or it looks like a path: a missing folder is called so then."""
    path = find_path(name)
    return path.exists() or len(path.parts) > 1 or bool(path.suffix)


def _unknown(name: str) -> SubquadError:
    error = unknown_name("data, folder or archive", name, NAMES)
    return SubquadError(f"{error}; there is no folder {name} in {Path.cwd()}")


def _needs_folder(name: str) -> SubquadError:
    return SubquadError(f"data '{name}' needs data_dir, a folder with {LAYOUT}")


def _cifar10(split: str, data_dir: Path | None) -> Source:
    """A folder tree or an archive where there is one, else torchvision's files."""
    if data_dir is None or (data_dir / "cifar-10-batches-py").is_dir():
        return read_torch("cifar10", split, data_dir)
    return read_folder(data_dir, split)


def _existing(folder: Path | None) -> Path | None:
    if folder and not folder.is_dir():
        raise SubquadError(not_there("folder", folder))
    return folder
