"""Pathfinder and same-different: what the labels say is in the images, and they look as the released ones do."""

import time
from functools import partial

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from subquad import SubquadError
from subquad.data import load_dataset
from subquad.data.synthetic import dashed_paths, generation, needles, pathfinder, same_different
from subquad.data.synthetic.long_distances import DRAWN

# of 60 released images each: dashes, share of zero pixels, share above 64, mean
RELEASED = [(6, 0.77, 0.08, 13), (9, 0.73, 0.09, 16), (14, 0.66, 0.12, 20)]


@pytest.mark.slow
@pytest.mark.parametrize(("length", "zero", "bright", "mean"), RELEASED)
def test_images_have_the_released_statistics(length, zero, bright, mean):
    images, labels = pathfinder.draw_images(pathfinder.Setting(contour_length=length), 0, 0, 256)
    assert images.shape == (256, 32, 32) and images.dtype == np.uint8 and images.max() == 255
    assert (images == 0).mean() == pytest.approx(zero, abs=0.06)
    assert (images > 64).mean() == pytest.approx(bright, abs=0.02)
    assert images.mean() == pytest.approx(mean, abs=4)
    assert 0.4 < labels.mean() < 0.6


def bright_discs(image):
    """How many places look like a marker: a bright square of 3 pixels."""
    solid = ndimage.minimum_filter(image.astype(float), 3) > 180
    return ndimage.label(solid, np.ones((3, 3)))[1]


def test_two_discs_mark_what_is_asked():
    images, _ = pathfinder.draw_images(pathfinder.Setting(contour_length=6, distractors=0), 1, 0, 200)
    assert np.mean([bright_discs(image) == 2 for image in images]) > 0.9


def test_joined_discs_lie_on_one_contour():
    """Without distractors, widened dashes grow together: joined discs then mostly touch one piece, others two."""
    images, labels = pathfinder.draw_images(pathfinder.Setting(contour_length=6, distractors=0), 2, 0, 200)
    together = []
    for image in images:
        solid, _ = ndimage.label(ndimage.minimum_filter(image.astype(float), 3) > 180, np.ones((3, 3)))
        pieces, _ = ndimage.label(ndimage.binary_dilation(image > 60, np.ones((3, 3))), np.ones((3, 3)))
        discs = [pieces[solid == k][0] for k in range(1, solid.max() + 1)]
        together.append(len(set(discs)) == 1)
    together = np.array(together)
    assert together[labels == 1].mean() > 0.9 and together[labels == 0].mean() < 0.6


@pytest.mark.slow
def test_larger_images_have_longer_paths():
    setting = pathfinder.Setting(size=64, contour_length=20)
    images, _ = pathfinder.draw_images(setting, 0, 0, 8)
    assert images.shape == (8, 64, 64)
    assert pathfinder.Setting(size=64, contour_length=14).count == 20  # five on a quarter of the area


@pytest.mark.parametrize("load", [drawing.load for drawing in DRAWN.values()])
def test_parts_are_kept_and_follow_from_the_seed(load, monkeypatch, tmp_path):
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path))
    train, validation = load("train", count=40), load("validation", count=40)
    assert len(train[0]) == len(train[1]) == 32 and len(validation[0]) == 4
    assert np.array_equal(load("train", count=40)[0], train[0])
    assert not np.array_equal(load("train", count=40, seed=1)[0], train[0])
    assert len({image.tobytes() for image in np.concatenate([train[0], validation[0]])}) == 36


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The images that `same_different` is asked to draw, one a chunk of 8; nothing is kept yet."""
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path))
    monkeypatch.setattr(generation, "CHUNK", 8)
    counts, draw = [], same_different.draw_images
    monkeypatch.setattr(same_different, "draw_images", lambda *given: counts.append(given[-1]) or draw(*given))
    return counts


def test_no_more_is_drawn_than_is_wanted(asked):
    load = partial(load_dataset, "same_different:count=200")
    few, held_out = load(split="train", max_images=11), load(split="validation")
    assert len(few) == 11 and set(few.labels) == {0, 1} and len(held_out) == 20
    # two chunks hold 11, and 160 to 180 are three
    assert sum(asked) == 16 + 24
    load(split="train", max_images=11), load(split="validation")
    assert sum(asked) == 40


def test_few_images_are_the_same_whether_all_are_drawn_or_not(asked):
    def tokens():
        train = same_different.load_same_different("train", count=100, most=11)
        test = same_different.load_same_different("test", count=100)
        return [array.tobytes() for array in (*train, *test)]

    alone = tokens()
    every = same_different.load_same_different("train", count=100)
    assert sum(asked) > 100 and tokens() == alone
    assert every[0][:16].tobytes() == alone[0] and every[1][:16].tobytes() == alone[1]


def test_images_of_different_chunks_are_different(monkeypatch):
    monkeypatch.setattr(generation, "CHUNK", 8)
    drawn = generation.draw_many(partial(same_different.draw_images, same_different.Setting()), 0, 24)
    assert drawn["images"].shape[0] == len({image.tobytes() for image in drawn["images"]}) == 24


def test_patterns_are_as_often_above_each_other_as_beside():
    images, _ = same_different.draw_images(same_different.Setting(size=48, distance=20), 0, 0, 200)
    boxes = [ndimage.find_objects(ndimage.label(image != 64)[0]) for image in images]
    across = [abs(one[1].start - other[1].start) > abs(one[0].start - other[0].start) for one, other in boxes]
    assert 0.35 < np.mean(across) < 0.65


def test_a_contour_turns_either_way_whatever_its_direction():
    canvas, count = dashed_paths.Canvas(400, 32), 400
    for degrees in (0, 90, 179, -180, -90):
        heads = np.full((count, 2), 16)
        snakes = dashed_paths.Snakes(heads, heads, np.full(count, degrees + 180))
        found, shape, _ = dashed_paths.grow(canvas, np.random.default_rng(0), snakes)
        turn = np.angle(np.exp(1j * (dashed_paths.stencils_of()[0].angle[shape] - np.deg2rad(degrees))))
        assert found.all() and np.abs(turn).max() < np.pi / 2
        assert 0.3 < (turn > 0).mean() / (np.abs(turn) > 0.02).mean() < 0.7


def test_a_dash_takes_its_room():
    canvas, row, head, shape = dashed_paths.Canvas(1, 32), np.array([0]), np.array([[16, 16]]), np.array([90])
    assert canvas.room(row, head, shape).all()
    canvas.occupy(row, head, shape)
    assert not canvas.room(row, head, shape).any() and canvas.room(row, head + 8, shape).all()


@pytest.mark.parametrize("cells", [2, 4, 8])
def test_patterns_are_equal_where_they_are_called_so(cells):
    setting = same_different.Setting(size=48, distance=20, cells=cells)
    images, labels = same_different.draw_images(setting, 0, 0, 64)
    for image, label in zip(images, labels, strict=True):
        drawn, count = ndimage.label(image != 64)
        boxes = ndimage.find_objects(drawn)
        assert count == 2
        one, other = (image[box] for box in boxes)
        corners = np.array([[side.start for side in box] for box in boxes])
        assert np.abs(corners[0] - corners[1]).max() == 20
        differing = (one != other).mean()
        assert (differing == 0) if label else differing >= 3 / 8


def test_complaints_name_the_numbers():
    for wrong, text in [
        (lambda: pathfinder.Setting(contour_length=40), "2 to 16 dashes, got 40: take a larger size"),
        (lambda: pathfinder.Setting(size=8), "at least 24 pixels, got 8"),
        (lambda: pathfinder.Setting(distractors=-1), "distractors must be at least 0, got -1"),
        (lambda: same_different.Setting(distance=40), "9 to 24 px apart, got 40"),
        (lambda: same_different.Setting(cells=3), "2, 4 or 8 cells a side, got 3"),
        (lambda: pathfinder.load_pathfinder("held", count=40), "unknown split 'held'"),
        (lambda: pathfinder.load_pathfinder("test", count=3), "leaves none for test: ask for 10 or more"),
    ]:
        with pytest.raises(SubquadError, match=text):
            wrong()


@pytest.mark.slow
def test_drawing_is_fast_enough_to_be_used():
    """A hundred hard images a second are asked for; a busy machine may take three times as long."""
    setting = pathfinder.Setting(contour_length=14)
    pathfinder.draw_images(setting, 0, 1, 8)
    start = time.perf_counter()
    pathfinder.draw_images(setting, 0, 0, 512)
    assert 512 / (time.perf_counter() - start) > 33


def test_drawn_images_are_data_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path))
    data = load_dataset("same_different:size=40,distance=20,count=30", split="validation")
    assert len(data) == 3 and data.classes == same_different.CLASSES and data[0][0].size == (40, 40)
    assert len(load_dataset("pathfinder:contour_length=6,count=20", split="train")) == 16
    for name, text in [
        ("same_different:distanc=3", "unknown setting of same_different 'distanc'"),
        ("pathfinder:size=big", "size of pathfinder is a whole number, got 'big'"),
    ]:
        with pytest.raises(SubquadError, match=text):
            load_dataset(name, split="train")
    with pytest.raises(SubquadError, match="drawn and not read"):
        load_dataset("pathfinder", split="train", data_dir=tmp_path)


@pytest.mark.parametrize("directions", [2, 4])
def test_marks_point_the_same_way_where_they_are_called_so(directions):
    setting = needles.Setting(size=48, distance=20, directions=directions)
    for behind in ((), (np.full((10, 12), 7, np.uint8),)):
        images, labels = needles.draw_images(setting, behind, 0, 0, 64)
        stripes = needles.marks(directions)
        assert 16 < labels.sum() < 48
        for image, label in zip(images, labels, strict=True):
            windows = np.lib.stride_tricks.sliding_window_view(image, (8, 8))
            found = [np.argwhere((windows == stripe).all((2, 3))) for stripe in stripes]
            corners = np.concatenate(found)
            assert len(corners) == 2 and np.abs(corners[0] - corners[1]).max() >= 20
            assert sorted(map(len, found))[-1] == 1 + label


def test_photographs_lie_behind_marks_whatever_their_size(tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path / "home"))
    for number, size in enumerate([(20, 10), (16, 12)]):
        Image.new("RGB", size, (90 + 60 * number,) * 3).save(tmp_path / f"{number}.png")
    drawn = load_dataset("needles:size=40,count=20", split="train", data_dir=tmp_path)
    pixels = {value for image, _ in drawn for value in np.unique(np.asarray(image))}
    assert len(drawn) == 16 and pixels == {0, 90, 150, 255}
    # a map of classes is no photograph
    for part, value in (("images", 33), ("annotations", 5)):
        (tmp_path / "scenes" / part).mkdir(parents=True)
        Image.new("L", (9, 9), value).save(tmp_path / "scenes" / part / "a.png")
    scene = load_dataset("needles:size=40,count=20", split="train", data_dir=tmp_path / "scenes")
    assert set(np.unique(np.asarray(scene[0][0]))) == {0, 33, 255}
    with pytest.raises(SubquadError, match="same_different is drawn and not read from"):
        load_dataset("same_different", split="train", data_dir=tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(SubquadError, match="there is no image in"):
        load_dataset("needles:count=20", split="train", data_dir=tmp_path / "none")
