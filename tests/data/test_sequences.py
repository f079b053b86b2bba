"""Sequences of the Long Range Arena: each task gives numbers above 0 for what is there, and 0 for padding."""

import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from subquad import SubquadError
from subquad.data.synthetic import generation, listops, pathfinder
from subquad.tasks.sequences.lra_data import SEQUENCES, load_sequences

PAIRS = [("1", "the first paper é", "the second"), ("0.0", "a third", "and a fourth"), ("1", "fifth", "sixth")]


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path / "home"))


@pytest.fixture
def sources(home, tmp_path):
    """Arguments of `load_sequences` for a little of each task."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 3)):
        for name in ("cat", "dog"):
            folder = tmp_path / "cifar" / split / name
            folder.mkdir(parents=True)
            for k in range(count):
                Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / f"{k}.png")
        for name in ("neg", "pos"):
            folder = tmp_path / "imdb" / "aclImdb" / split / name
            folder.mkdir(parents=True)
            for k in range(count):
                (folder / f"{k}_7.txt").write_bytes(f"{name} review {k} Ω".encode())
    with tarfile.open(tmp_path / "imdb.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "imdb" / "aclImdb", "aclImdb")
    (tmp_path / "aan").mkdir()
    for part in ("train", "eval", "test"):
        lines = ("\t".join([label, "1", "2", one, two]) for label, one, two in PAIRS)
        (tmp_path / "aan" / f"new_aan_pairs.{part}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {
        "listops": {"settings": {"count": 100, "shortest": 5, "longest": 40}, "max_length": 48},
        "pathfinder": {"settings": {"count": 20, "contour_length": 6}, "max_length": 1024},
        "image": {"data_dir": tmp_path / "cifar", "max_length": 1024},
        "text": {"data_dir": tmp_path / "imdb.tar.gz", "max_length": 32},
        "retrieval": {"data_dir": tmp_path / "aan", "max_length": 32},
    }


@pytest.mark.parametrize("task", SEQUENCES)
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_every_task_gives_whole_sequences(task, split, sources):
    data = load_sequences(task, split=split, **sources[task])
    what, length = SEQUENCES[task], sources[task]["max_length"]
    assert len(data) == len(data.labels) > 0 and data.num_broken == 0 and data.broken_paths() == []
    for tokens, label in (data[index] for index in range(len(data))):
        assert tokens.shape == ((2, length) if what.pairs else (length,)) and tokens.dtype == torch.long
        assert (
            tokens.min() >= 0
            and tokens.max() < what.symbols
            and 0 <= label < len(data.classes) == (2 if task == "image" else what.num_classes)
        )
        # nothing that is there is hidden: zeros only stand behind the end
        present = tokens.reshape(-1, length) != 0
        assert (present[:, 1:] <= present[:, :-1]).all() and present.any(1).all()


def test_sequences_are_what_they_were_made_of(sources):
    made = listops.load_listops("test", **sources["listops"]["settings"])
    data = load_sequences("listops", split="test", **sources["listops"])
    words = [listops.VOCABULARY[k] for k in data[0][0].tolist() if k]
    assert listops.evaluate(words) == data[0][1] == made.labels[0]
    images, labels = pathfinder.load_pathfinder("test", count=20, contour_length=6)
    tokens, label = load_sequences("pathfinder", split="test", **sources["pathfinder"])[1]
    assert np.array_equal(tokens.view(32, 32).numpy() - 1, images[1]) and label == labels[1]
    tokens, label = load_sequences("text", split="test", **sources["text"])[0]
    assert bytes(tokens[tokens > 0].numpy().astype(np.uint8) - 1).decode() == "neg review 0 Ω" and label == 0
    tokens, label = load_sequences("retrieval", split="test", **sources["retrieval"])[0]
    assert bytes(tokens[0][tokens[0] > 0].numpy().astype(np.uint8) - 1).decode() == PAIRS[0][1] and label == 1


def test_each_split_of_retrieval_is_read_from_its_own_file(sources, tmp_path):
    for part, name in (("train", "train"), ("eval", "validation"), ("test", "test")):
        (tmp_path / "aan" / f"new_aan_pairs.{part}.tsv").write_text(f"1\t1\t2\t{name}\tother\n")
        tokens, _ = load_sequences("retrieval", split=name, **sources["retrieval"])[0]
        assert bytes(tokens[0][tokens[0] > 0].numpy().astype(np.uint8) - 1).decode() == name


def test_pairs_of_an_editor_are_those_without_its_mark_and_line_ends(sources, tmp_path):
    file = tmp_path / "aan" / "new_aan_pairs.test.tsv"
    expected = load_sequences("retrieval", split="test", **sources["retrieval"])
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    found = load_sequences("retrieval", split="test", **sources["retrieval"])
    assert len(found) == len(expected)
    assert all(torch.equal(a[0], b[0]) and a[1] == b[1] for a, b in zip(found, expected, strict=True))


def test_other_images_of_the_same_size_and_time_are_not_taken_for_those_that_were_kept(sources, tmp_path):
    file = tmp_path / "cifar" / "test" / "cat" / "0.png"
    shown = []
    for light in (0, 255):
        Image.new("RGB", (32, 32), (light,) * 3).save(file, compress_level=0)
        os.utime(file, (0, 0))
        shown.append(load_sequences("image", split="test", **sources["image"])[0][0])
    assert shown[0].unique().tolist() == [1] and shown[1].unique().tolist() == [256]


def test_grey_is_that_of_the_arena(sources, tmp_path):
    tokens, _ = load_sequences("image", split="test", **sources["image"])[0]
    with Image.open(tmp_path / "cifar" / "test" / "cat" / "0.png") as image:
        pixels = np.asarray(image, np.float64)
    expected = np.floor(255.5 * (pixels / 255 @ [0.2989, 0.5870, 0.1140]))
    assert np.abs(tokens.view(32, 32).numpy() - 1 - expected).max() <= 1
    assert (tokens.view(32, 32).numpy() - 1 == expected).mean() > 0.99


def test_held_out_reviews_are_not_trained_on(sources):
    parts = [load_sequences("text", split=split, **sources["text"]) for split in ("train", "validation", "test")]
    texts = [{tuple(data[k][0].tolist()) for k in range(len(data))} for data in parts]
    assert len(texts[0]) == 22 and len(texts[1]) == 2 and not texts[0] & texts[1]


def test_long_texts_are_cut_and_few_are_kept(sources):
    data = load_sequences("text", split="train", max_sequences=4, **{**sources["text"], "max_length": 5})
    assert len(data) == 4 and (data[0][0] > 0).all()


LONGER = {
    "listops": {"settings": {"count": 100, "shortest": 5, "longest": 40}},
    "pathfinder": {"settings": {"count": 200_000, "size": 64}},
    "image": {},
}


@pytest.mark.parametrize("task", LONGER)
def test_what_is_worth_nothing_without_its_end_is_not_cut(task, sources):
    """Of 64×64 px the first quarter was read, without a word, and expressions without their end."""
    given = {**sources[task], **LONGER[task]}
    needed = {"listops": 40, "pathfinder": 4096, "image": 1024}[task]
    # what is read from files has no settings
    ways = {"listops": ", or a smaller longest", "pathfinder": ", or a smaller size"}.get(task, "$")
    said = (
        rf"^sequences of {task} have up to {needed} tokens, and {needed - 1} of them .* give max_length {needed}{ways}"
    )
    with pytest.raises(SubquadError, match=said):
        load_sequences(task, split="train", **given | {"max_length": needed - 1})
    # and in front of all drawing
    assert task == "image" or not (Path(os.environ["SUBQUAD_HOME"])).exists()


def test_every_task_that_has_settings_is_refused_another_place_of_its_data(sources, tmp_path):
    """They named data that were not looked at."""
    made = [task for task, what in SEQUENCES.items() if what.settings]
    assert made == ["listops", "pathfinder"] == [task for task, what in SEQUENCES.items() if what.needed]
    for task in made:
        said = rf"^{task} is generated and not read from {tmp_path}: leave out data_dir"
        with pytest.raises(SubquadError, match=said):
            load_sequences(task, split="train", **sources[task], data_dir=tmp_path)


@pytest.mark.parametrize("task", [name for name, what in SEQUENCES.items() if what.drawn])
def test_few_sequences_are_not_drawn_with_all_others(task, home, monkeypatch):
    counts, draw = [], pathfinder.draw_images
    monkeypatch.setattr(pathfinder, "draw_images", lambda *given: counts.append(given[-1]) or draw(*given))
    monkeypatch.setattr(generation, "CHUNK", 2)
    settings = {"count": 4000, "contour_length": 6}
    assert len(load_sequences(task, split="train", max_sequences=4, max_length=1024, settings=settings)) == 4
    assert sum(counts) == 4


def test_complaints_are_one_line(sources, tmp_path):
    load = load_sequences
    (tmp_path / "aan" / "new_aan_pairs.test.tsv").write_text("yes\t1\t2\ta\tb\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.tsv").touch()
    for task, given, text in [
        ("listop", {}, "unknown task 'listop': did you mean listops"),
        ("listops", {"settings": {"longst": 3}}, "unknown setting of the data of listops 'longst'"),
        ("image", {"settings": {"count": 3}}, "the data of image are read and have no settings, got count"),
        ("text", {}, "text is not ours to give away: name with data_dir where IMDb's archive"),
        ("text", {"data_dir": tmp_path / "no"}, "there is no folder or archive"),
        ("text", {"data_dir": tmp_path / "text.tsv"}, "text.tsv is neither a folder nor an archive"),
        ("text", {"data_dir": tmp_path / "empty"}, "has no reviews"),
        ("retrieval", {"data_dir": tmp_path / "empty"}, "new_aan_pairs.test.tsv is missing"),
        ("retrieval", {"data_dir": tmp_path / "aan"}, "line 1 of .* is no pair"),
    ]:
        with pytest.raises(SubquadError, match=text) as found:
            load(task, split="test", max_length=8, **given)
        assert "\n" not in str(found.value)
