"""Damaged archives and caches: either all of the content, or one line; what is kept is looked after."""

import io
import itertools
import os
import re
import shutil
import tarfile

import pytest
import worlds

from subquad import SubquadError
from subquad.data import load_dataset
from subquad.data.archives import unpack
from subquad.data.tars import read_tar
from subquad.tasks.detection.object_data import load_objects
from subquad.tasks.segmentation import load_scenes

CONTENT = {f"{name}/{k}.txt": f"{name}{k}".encode() for name in "ab" for k in range(2)}
BLOCK = 512


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A $SUBQUAD_HOME of its own for every test."""
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def packed(mode="w", content=CONTENT, form=tarfile.PAX_FORMAT):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode, format=form) as tar:
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


class Damaged:
    """Archives like `whole`, each with some of its bytes changed, and what comes of reading them."""

    def __init__(self, folder, whole):
        self.archive, self.target, self.whole = folder / "damaged.tar", folder / "target", whole
        self.archive.write_bytes(whole)

    def outcome(self, content):
        """Files and their bytes, or None where it is one line."""
        self.archive.write_bytes(content)
        return self.read()

    def read(self):
        try:
            # first without writing, which is quicker, and must complain of the same
            read_tar(self.archive)
            shutil.rmtree(self.target, ignore_errors=True)
            self.target.mkdir()
            read_tar(self.archive, self.target)
        except SubquadError as error:
            assert str(self.archive) in str(error) and "\n" not in str(error)
            return None
        files = (path for path in self.target.rglob("*") if path.is_file())
        return {path.relative_to(self.target).as_posix(): path.read_bytes() for path in files}

    def flipped(self, place, bit):
        # a byte is changed where it stands, which is quicker than writing all of them
        with self.archive.open("r+b", buffering=0) as file:
            file.seek(place)
            file.write(bytes([self.whole[place] ^ 1 << bit]))
            found = self.read()
            file.seek(place)
            file.write(self.whole[place : place + 1])
        return found


def headers(whole):
    """Places of all bytes of a small archive that are no content: of headers, and behind the end."""
    spaces = range(0, 8 * BLOCK, 2 * BLOCK)
    return [place for place in range(len(whole)) if not any(s + BLOCK <= place < s + BLOCK + 2 for s in spaces)]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_flipped_bit_of_a_tar_is_harmless_or_said(form, tmp_path):
    whole = packed(form=form)
    damaged = Damaged(tmp_path, whole)
    assert damaged.outcome(whole) == CONTENT
    for turn, place in enumerate(headers(whole)[::97]):
        assert damaged.flipped(place, turn % 8) in (CONTENT, None), place


@pytest.mark.slow
def test_every_flipped_bit_of_the_headers_of_a_tar_is_harmless_or_said(tmp_path):
    whole = packed()
    damaged = Damaged(tmp_path, whole)
    # all of the headers, and the first block of the end
    places = [place for place in headers(whole) if place < 9 * BLOCK and place // BLOCK % 2 == 0]
    outcomes = [damaged.flipped(place, bit) for place, bit in itertools.product(places, range(8))]
    assert all(outcome in (CONTENT, None) for outcome in outcomes)
    # all that is summed up by a header's checksum is noticed: harmless is what stands beside its digits
    assert sum(outcome is None for outcome in outcomes) > 0.98 * len(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_lose_no_file_to_a_flipped_bit(form, tmp_path):
    content = {f"{'x' * 120}/{name}": data for name, data in CONTENT.items()}
    whole = packed(content=content, form=form)
    damaged = Damaged(tmp_path, whole)
    for turn, place in enumerate(range(0, len(whole), 13)):
        outcome = damaged.flipped(place, turn % 8)
        # such a name is summed up nowhere: its file may be called otherwise, but it is there
        assert outcome is None or len(outcome) == len(content), place


@pytest.mark.parametrize("mode", ["w:gz", "w:xz"])
def test_a_damaged_byte_of_a_compressed_tar_is_harmless_or_said(mode, tmp_path):
    whole = packed(mode)
    damaged = Damaged(tmp_path, whole)
    for place in range(len(whole)):
        assert damaged.flipped(place, place % 8) in (CONTENT, None), place
    for length in range(0, len(whole), 5):
        assert damaged.outcome(whole[:length]) is None, length
    assert damaged.outcome(whole + b"more") is None


def test_what_is_cut_off_or_behind_the_end_is_said(tmp_path):
    whole = packed()
    damaged = Damaged(tmp_path, whole)
    for length in (0, 1, BLOCK, 2 * BLOCK, 3 * BLOCK, 8 * BLOCK, 8 * BLOCK - 1):
        assert damaged.outcome(whole[:length]) is None, length
    assert damaged.outcome(whole + packed()) is None
    assert damaged.outcome(packed(content={})) is None
    assert damaged.outcome(b"text") is None


def test_a_member_that_is_there_twice_is_said(tmp_path):
    archive = tmp_path / "twice.tar"
    with tarfile.open(archive, "w") as tar:
        for data in (b"1", b"22"):
            member = tarfile.TarInfo("a/0.txt")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    with pytest.raises(SubquadError, match="has 2 files of 1 names"):
        unpack(archive)


def test_headers_without_sense_are_said(tmp_path):
    for number, headers_of_one in enumerate(({"mtime": "nan"}, {"size": "many"}, {"mtime": "1e400"})):
        archive = tmp_path / f"{number}.tar"
        with tarfile.open(archive, "w", pax_headers=headers_of_one) as tar:
            tar.addfile(tarfile.TarInfo("a/0.txt"))
        try:
            unpack(archive)
        except SubquadError as error:
            assert re.match(rf"{archive} is damaged", str(error)) and "\n" not in str(error)


class Cached:
    """An archive that was unpacked."""

    def __init__(self, folder):
        self.archive = folder / "images.tar"
        self.archive.write_bytes(packed())
        self.folder = unpack(self.archive)
        self.note = self.folder.with_name(f"{self.folder.name}.json")

    def is_whole(self):
        """Whether it is found again with all it has, and nothing is left beside it."""
        folder = unpack(self.archive)
        kept = {path.suffix for path in folder.parent.iterdir() if not path.is_dir()}
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.txt")}
        return files == CONTENT and kept == {".json", ".lock"} and not list(folder.parent.glob(".*"))


def delete_file(cached):
    (cached.folder / "a/0.txt").unlink()


def empty_file(cached):
    (cached.folder / "b/1.txt").write_bytes(b"")


def add_file(cached):
    (cached.folder / "b/2.txt").write_bytes(b"2")


def delete_folder(cached):
    shutil.rmtree(cached.folder / "a")


def delete_all(cached):
    shutil.rmtree(cached.folder)


def spoil_note(cached):
    cached.note.write_text("{")


def forget_note(cached):
    cached.note.unlink()


def forget_note_of_a_half(cached):
    delete_file(cached)
    forget_note(cached)


def leave_something(cached):
    leftover = cached.folder.with_name(f".{cached.folder.name}-killed")
    (leftover / "content").mkdir(parents=True)
    delete_file(cached)


DAMAGES = [delete_file, empty_file, add_file, delete_folder, delete_all, spoil_note, forget_note]
DAMAGES += [forget_note_of_a_half, leave_something]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_cache_is_unpacked_again(damage, tmp_path):
    cached = Cached(tmp_path)
    assert cached.is_whole()
    damage(cached)
    assert cached.is_whole() and cached.is_whole()


def test_a_cache_of_an_earlier_version_is_looked_at_once_and_kept(tmp_path):
    cached = Cached(tmp_path)
    forget_note(cached)
    before = (cached.folder / "a").stat().st_ino
    assert cached.is_whole() and (cached.folder / "a").stat().st_ino == before and cached.note.is_file()


def test_another_archive_of_the_same_size_and_time_is_not_taken_for_the_first(tmp_path):
    cached = Cached(tmp_path)
    status = cached.archive.stat()
    other = {name: data[::-1] for name, data in CONTENT.items()}
    cached.archive.write_bytes(packed(content=other))
    os.utime(cached.archive, ns=(status.st_atime_ns, status.st_mtime_ns))
    folder = unpack(cached.archive)
    assert (folder / "a/0.txt").read_bytes() == b"0a" and (cached.folder / "a/0.txt").read_bytes() == b"a0"
    assert unpack(cached.archive) == folder
    # a copy of the first is found again
    cached.archive.write_bytes(packed())
    os.utime(cached.archive, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert unpack(cached.archive) == cached.folder


def test_a_flipped_bit_in_a_header_ends_every_task_in_one_line(tmp_path):
    worlds.scenes(tmp_path / "scenes", counts=(2, 2), size=(8, 8))
    worlds.objects(tmp_path / "objects", counts=(2, 2), size=(8, 8))
    for name, load in (("scenes", load_scenes), ("objects", load_objects), ("scenes", load_dataset)):
        archive = tmp_path / f"{name}.tar"
        with tarfile.open(archive, "w") as tar:
            tar.add(tmp_path / name, name)
        with tarfile.open(archive) as tar:
            last = tar.getmembers()[-1].offset
        content = bytearray(archive.read_bytes())
        content[last] ^= 1
        archive.write_bytes(content)
        with pytest.raises(
            SubquadError, match=rf"{name}\.tar is damaged or no archive: the header at byte {last}: bad"
        ):
            load(str(archive), split="train")
        assert not [path for path in (tmp_path / "home/data").iterdir() if path.is_dir()]
