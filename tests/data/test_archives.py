"""Archives: unpacked once, safely, and anew when they have changed."""

import io
import tarfile

import pytest

from subquad.data import load_dataset
from subquad.data.archives import unpack
from subquad.errors import SubquadError
from subquad.home import home

TREE = {"train/a": 2, "train/b": 2, "val/a": 1, "val/b": 1}


def pack(root, archive, mode="w", top=None):
    with tarfile.open(archive, mode) as tar:
        for folder in sorted(root.iterdir()):
            tar.add(folder, f"{top}/{folder.name}" if top else folder.name)
    return archive


@pytest.mark.parametrize(
    ("ending", "mode"), [(".tar", "w"), (".tar.gz", "w:gz"), (".tgz", "w:gz"), (".tar.xz", "w:xz")]
)
def test_all_kinds_of_archives_are_read(make_tree, tmp_path, ending, mode):
    archive = pack(make_tree(TREE), tmp_path / f"images{ending}", mode)
    assert load_dataset(str(archive), split="train").labels == [0, 0, 1, 1]
    assert len(load_dataset("cifar10", data_dir=archive, split="validation")) == 2


def test_a_folder_around_everything_is_looked_through(make_tree, tmp_path):
    archive = pack(make_tree(TREE), tmp_path / "images.tar", top="images-v1")
    assert load_dataset(str(archive), split="train").classes == ("a", "b")


def test_an_archive_is_unpacked_once_and_anew_when_it_changed(make_tree, tmp_path):
    archive = pack(make_tree(TREE), tmp_path / "images.tar")
    first = unpack(archive)
    (first / "mark").touch()
    assert unpack(archive) == first and (first / "mark").exists()
    pack(make_tree({"a": 30, "b": 3}, "other"), archive)
    assert unpack(archive) != first and first.is_relative_to(home() / "data")


def test_a_damaged_archive_leaves_nothing_behind(make_tree, tmp_path):
    archive = pack(make_tree(TREE), tmp_path / "images.tar.gz", "w:gz")
    archive.write_bytes(archive.read_bytes()[:300])
    with pytest.raises(SubquadError, match=r"images\.tar\.gz is damaged or no archive"):
        unpack(archive)
    archive.write_bytes(b"nothing of the kind")
    with pytest.raises(SubquadError, match="damaged or no archive"):
        unpack(archive)
    assert not [path for path in (home() / "data").iterdir() if path.is_dir()]


@pytest.mark.parametrize("name", ["../outside.jpg", "link"])
def test_an_archive_that_reaches_outside_is_refused(tmp_path, name):
    member = tarfile.TarInfo(name)
    if name == "link":
        member.type, member.linkname = tarfile.SYMTYPE, "/etc"
    else:
        member.size = 4
    with tarfile.open(tmp_path / "evil.tar", "w") as tar:
        tar.addfile(member, io.BytesIO(b"evil"))
    with pytest.raises(SubquadError, match="not safe to unpack"):
        unpack(tmp_path / "evil.tar")
    assert not [path for path in (home() / "data").rglob("*") if path.suffix == ".jpg"]
