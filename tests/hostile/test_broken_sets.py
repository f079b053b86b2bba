"""Sets that are generated, tables of texts and sets of libraries: wrong settings, damaged caches, odd rows."""

import io
from dataclasses import fields

import numpy as np
import pytest
from PIL import Image

from subquad import SubquadError
from subquad.data import load_dataset
from subquad.data.synthetic import listops
from subquad.data.synthetic.generation import kept
from subquad.data.synthetic.long_distances import DRAWN
from subquad.tasks.sequences.lra_data import SEQUENCES, load_sequences

WRONG = [-1, 2.5, "many", True, float("nan"), [1]]
# what is drawn alone, by what loads it, and its settings
SETS = {
    name: (load, {"count", "seed", *(field.name for field in fields(kind))})
    for name, (load, _, kind, _) in DRAWN.items()
}
SETS["listops"] = (listops.load_listops, set(SEQUENCES["listops"].settings))


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A $SUBQUAD_HOME of its own for every test."""
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("name", SETS)
def test_wrong_settings_of_generated_sets_are_one_line(name):
    load, settings = SETS[name]
    for setting in settings:
        for wrong in WRONG:
            with pytest.raises(SubquadError, match=r"^[^\n]+$"):
                load("train", **{setting: wrong})


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("pathfinder:dashes=-1", "unknown setting of pathfinder 'dashes'"),
        ("pathfinder:size=-1", "size of pathfinder is a whole number, got '-1'"),
        ("pathfinder:size=4096", "at most 512 pixels, got 4096"),
        ("pathfinder:count=0", "count must be a whole number of at least 1, got 0"),
        ("pathfinder:count=2000000000", "GiB, of 32 at most"),
        ("same_different:size=100000,distance=12", "GiB, of 32 at most"),
    ],
)
def test_settings_in_names_of_data_are_checked(data, reason):
    with pytest.raises(SubquadError, match=rf"^[^\n]*{reason}[^\n]*$"):
        load_dataset(data, split="train")


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (2, 3)])
def test_expressions_that_run_out_are_said(shortest, longest):
    with pytest.raises(SubquadError, match=r"there are hardly more than \d+ expressions of . to . tokens"):
        listops.load_listops("train", count=100, shortest=shortest, longest=longest)


def spoiled(content):
    """A cache that is damaged in the ways a disk damages."""
    yield b""
    yield b"text"
    yield content[: len(content) // 2]
    for place in range(0, len(content), len(content) // 40):
        yield content[:place] + bytes([content[place] ^ 8]) + content[place + 1 :]
    other = io.BytesIO()
    np.savez_compressed(other, images=np.zeros(3), labels=np.zeros(3))
    yield other.getvalue()
    single = io.BytesIO()
    np.save(single, np.zeros(20))
    yield single.getvalue()


def test_damaged_caches_are_made_again(home):
    right = {"images": np.arange(2000, dtype=np.uint8).reshape(20, 100), "labels": np.arange(20)}

    def read():
        return kept("set", lambda: right, count=20)

    read()
    file = home / "data" / "set.npz"
    for content in spoiled(file.read_bytes()):
        file.write_bytes(content)
        for _ in range(2):
            found = read()
            assert found.keys() == right.keys() and all(np.array_equal(found[key], right[key]) for key in right)


PAIR = b"1\t1\t2\tone text\tanother\n"


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (b"", "is empty"),
        (PAIR + b"\n", "line 2 of .* is no pair: .* got 0 cells, nothing"),
        (PAIR + b"1\t1\t2\tone\n", "line 2 of .* got 4 cells"),
        (PAIR + b"2\t1\t2\tone\ttwo\n", "line 2 of .* got 5 cells, '2' first"),
        (PAIR + b"nan\t1\t2\tone\ttwo\n", "line 2 of .* got 5 cells, 'nan' first"),
        (PAIR + b"1\t1\t2\tone\t\n", "line 2 of .* has an empty text"),
        (PAIR + b"1\t1\t2\tone\t\xff\n", "can't be read behind line [01]: .* invalid start byte"),
    ],
)
def test_odd_rows_of_pairs_are_named(rows, reason, tmp_path):
    for part in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{part}.tsv").write_bytes(rows)
    with pytest.raises(SubquadError, match=rf"^[^\n]*{reason}[^\n]*$"):
        load_sequences("retrieval", split="train", max_length=8, data_dir=tmp_path)


def test_reviews_without_words_are_said(tmp_path):
    for name in ("neg", "pos"):
        folder = tmp_path / "train" / name
        folder.mkdir(parents=True)
        for k in range(3):
            (folder / f"{k}.txt").write_text("fine")
    (folder / "1.txt").write_text("")
    (folder / "2.txt").unlink()
    (folder / "2.txt").mkdir()
    with pytest.raises(SubquadError, match=r"2 of 6 reviews in .*train are empty or no files: .*1\.txt"):
        load_sequences("text", split="train", max_length=8, data_dir=tmp_path)


def test_grey_images_of_a_changed_folder_are_made_again(tmp_path):
    def write(level):
        for split in ("train", "test"):
            for name in ("a", "b"):
                (tmp_path / "data" / split / name).mkdir(parents=True, exist_ok=True)
                for k in range(3):
                    Image.new("L", (4, 4), level).save(tmp_path / "data" / split / name / f"{k}.png")

    for level in (10, 20):
        write(level)
        data = load_sequences("image", split="test", max_length=16, data_dir=tmp_path / "data")
        assert set(data[0][0].tolist()) == {level + 1}


class Failing:
    """Stands for the Hugging Face library."""

    def __init__(self, monkeypatch):
        import datasets

        self.datasets, self.monkeypatch = datasets, monkeypatch

    def give(self, answer):
        def load(*_, **__):
            if isinstance(answer, Exception):
                raise answer
            return answer

        self.monkeypatch.setattr(self.datasets, "load_dataset", load)


@pytest.fixture
def library(monkeypatch):
    return Failing(monkeypatch)


# it takes seconds to import
@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyError("x\ny"), TypeError("no"), OSError("gone"), Exception(""), MemoryError()])
def test_errors_of_the_hugging_face_library_are_one_line(library, error):
    library.give(error)
    with pytest.raises(SubquadError, match=r"^can't load hfds/some: [^\n]+$"):
        load_dataset("hfds/some", split="train")


def rows(library, labels, images):
    datasets = library.datasets
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    table = datasets.Dataset.from_dict({"image": images, "label": labels}, features=kinds)
    library.give({"train": table, "validation": table})


@pytest.mark.slow
def test_rows_without_labels_or_images_are_said(library):
    stream = io.BytesIO()
    Image.new("RGB", (4, 4)).save(stream, "PNG")
    whole = {"bytes": stream.getvalue(), "path": None}
    rows(library, [0, 1, 1], [whole, None, {"bytes": b"no image", "path": None}])
    images = load_dataset("hfds/some", split="train")
    assert [images[k] is None for k in range(3)] == [False, True, True]
    assert images.broken_paths() == ["hfds/some[1]", "hfds/some[2]"]
    for labels, shown in (([0, None, 1], "None"), ([0, -1, 1], "-1")):
        rows(library, labels, [whole] * 3)
        with pytest.raises(
            SubquadError, match=f"1 of 3 images of hfds/some have labels .* none of the 2 classes: {shown}"
        ):
            load_dataset("hfds/some", split="train")
    rows(library, [], [])
    with pytest.raises(SubquadError, match="hfds/some has no images"):
        load_dataset("hfds/some", split="train")
