"""Archives of images: unpacked once into the data folder, safely, and found there afterwards."""

import lzma
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path

from filelock import FileLock
from tqdm import tqdm

from subquad.errors import SubquadError
from subquad.home import home

ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.xz")


def data_home() -> Path:
    """The folder for data in `home()`, made if it is not there."""
    folder = home() / "data"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SubquadError(
            f"can't make {folder} ({error.strerror}): set SUBQUAD_HOME to a folder to write to"
        ) from None
    return folder


def is_archive(path: Path) -> bool:
    """Whether `path` is a file with the name of an archive."""
    return path.is_file() and path.name.lower().endswith(ENDINGS)


def unpack(archive: Path) -> Path:
    """The folder with the content of `archive`; unpacked at the first call, and again when the file has changed."""
    status = archive.stat()
    stem = archive.name.split(".tar")[0].removesuffix(".tgz")
    folder = data_home() / f"{stem}-{status.st_size:x}-{status.st_mtime_ns:x}"
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            _unpack_to(archive, folder)
    return _inner(folder)


def _unpack_to(archive: Path, folder: Path) -> None:
    """Fill `folder`, wholly or not at all."""
    # whoever was killed at this had the lock that we have now
    for partial_of_killed in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(partial_of_killed, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as partial:
        content = Path(partial) / "content"
        content.mkdir()
        try:
            with tarfile.open(archive) as tar:
                # a bar where there is a terminal, nothing elsewhere
                for member in tqdm(tar, desc=f"unpacking {archive.name}", unit=" files", leave=False, disable=None):
                    tar.extract(member, content, filter="data")
        except tarfile.FilterError as error:
            raise SubquadError(f"{archive} is not safe to unpack: {error}") from None
        except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError) as error:
            raise SubquadError(f"{archive} is damaged or no archive: {error}") from None
        except OSError as error:
            raise SubquadError(f"can't unpack {archive} into {folder.parent}: {error}") from None
        content.replace(folder)


def _inner(folder: Path) -> Path:
    """Past folders that hold nothing but one folder of folders, as archives often begin."""
    while True:
        visible = [entry for entry in folder.iterdir() if not entry.name.startswith((".", "__MACOSX"))]
        if len(visible) != 1 or not visible[0].is_dir() or not any(entry.is_dir() for entry in visible[0].iterdir()):
            return folder
        folder = visible[0]
