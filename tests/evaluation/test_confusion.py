"""The confusion matrix: readable at 80 columns, complete in its files."""

import csv
import warnings

import pytest
import torch
from PIL import Image

from subquad.errors import SubquadError
from subquad.tasks.confusion import confused_pairs, confusion_text, save_confusion
from subquad.tasks.segmentation.intersection_over_union import judge_confusion
from subquad.tasks.segmentation.trained_segmenter import SceneJudgement
from subquad.text import columns, columns_of, padded, shorten

ANIMALS = ("cat", "dog", "bird")
SMALL = torch.tensor([[8, 2, 0], [1, 9, 0], [0, 3, 7]])


def random_confusion(classes, largest):
    return torch.randint(largest, (classes, classes)) + largest * torch.eye(classes, dtype=torch.long)


def test_a_few_classes_are_shown_as_a_matrix():
    assert confusion_text(SMALL, ANIMALS).splitlines() == [
        "rows true, columns predicted, images",
        "       0 1 2",
        "0 cat  8 2 ·",
        "1 dog  1 9 ·",
        "2 bird · 3 7",
    ]


def test_names_that_take_two_columns_a_letter_leave_numbers_below_each_other():
    """Counted by letters they pushed the numbers of their row to the right."""
    assert confusion_text(SMALL, ("猫", "e\u0301cureuil", "bird")).splitlines() == [
        "rows true, columns predicted, images",
        "           0 1 2",
        "0 猫       8 2 ·",
        "1 e\u0301cureuil 1 9 ·",
        "2 bird     · 3 7",
    ]
    assert columns([["class", "IoU"], ["猫の写真", "1.00"]]) == "class      IoU\n猫の写真  1.00"


@pytest.mark.parametrize("width", range(1, 12))
@pytest.mark.parametrize("name", ["日本語のクラス", "a name", "e\u0301" * 9, "", "a日b本"])
def test_a_shortened_name_takes_no_more_columns_than_it_may(name, width):
    short = shorten(name, width)
    assert columns_of(short) <= width and (short == name or short.endswith("…"))
    assert (columns_of(name) <= width) == (short == name) and columns_of(padded(short, width)) == width


def test_names_that_no_font_has_are_drawn_without_a_line_about_each_letter(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_confusion(SMALL, ("日本語", "\U0001f469", "bird"), tmp_path / "confusion")
    assert (tmp_path / "confusion.png").stat().st_size and "日本語" in (tmp_path / "confusion.csv").read_text()


def test_classes_called_by_numbers_are_not_numbered_twice():
    assert confusion_text(SMALL, "012").splitlines()[2] == "0 8 2 ·"


@pytest.mark.parametrize("classes", [2, 10, 20, 21, 200])
@pytest.mark.parametrize("largest", [3, 100_000])
@pytest.mark.parametrize("name", ["class", "a class with a very long name, as there are"])
def test_no_line_is_wider_than_80(classes, largest, name):
    text = confusion_text(random_confusion(classes, largest), [f"{name} {i}" for i in range(classes)])
    assert max(map(len, text.splitlines())) <= 80


def test_numbers_that_do_not_fit_become_percent():
    confusion = torch.eye(20, dtype=torch.long) * 90_000
    confusion[3, 4], confusion[5, 6] = 10_000, 1
    text = confusion_text(confusion, [f"class {i}" for i in range(20)])
    rows = text.splitlines()
    assert "percent of a row" in rows[0]
    cells = [row[-60:] for row in rows[2:]]
    assert cells[3][9:15] == " 90 10" and cells[5][15:21] == "100  0" and cells[0][3:6] == "  ·"


def test_of_many_classes_the_most_confused_pairs_are_listed():
    confusion = 10 * torch.eye(30, dtype=torch.long)
    confusion[3, 7], confusion[2, 1] = 30, 5
    lines = confusion_text(confusion, [f"c{i}" for i in range(30)]).splitlines()
    assert lines[0] == "30 classes, 35 of 335 images mistaken"
    assert [line.split() for line in lines[2:]] == [
        ["c3", "→", "c7", "30", "75.0", "%"],
        ["c2", "→", "c1", "5", "33.3", "%"],
    ]
    perfect = confusion_text(torch.eye(30, dtype=torch.long), [f"c{i}" for i in range(30)])
    assert perfect == "30 classes, 0 of 30 images mistaken"


def test_confused_pairs_leave_out_what_is_right():
    assert confused_pairs(SMALL, 2) == [(2, 1, 3), (0, 1, 2)]
    assert confused_pairs(SMALL, 99) == [(2, 1, 3), (0, 1, 2), (1, 0, 1)]


def test_a_class_without_images_does_no_harm():
    empty = torch.tensor([[5, 0], [0, 0]])
    assert "1 b · ·" in confusion_text(empty, "ab")


@pytest.mark.parametrize("classes", [3, 25, 61])
def test_the_files_hold_every_number(tmp_path, classes):
    confusion = random_confusion(classes, 50)
    names = ["$a_b$, c", *map(str, range(1, classes))]
    table, picture = save_confusion(confusion, names, tmp_path / "new" / "confusion")
    with table.open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head[1:] == names and [row[0] for row in rows] == names
    assert [[int(cell) for cell in row[1:]] for row in rows] == confusion.tolist()
    with Image.open(picture) as image:
        assert image.format == "PNG" and min(image.size) > 300
    assert sorted(path.name for path in table.parent.iterdir()) == ["confusion.csv", "confusion.png"]


@pytest.mark.parametrize(("given", "stem"), [("night.v2", "night.v2"), ("a.csv", "a"), ("a.PNG", "a"), (".a", ".a")])
def test_two_names_are_two_files(tmp_path, given, stem):
    """What stands behind a point was cut off, so that night.v1 and night.v2 were one file."""
    save_confusion(SMALL, "abc", tmp_path / given)
    assert {path.name for path in tmp_path.iterdir()} == {f"{stem}.csv", f"{stem}.png"}


def test_the_picture_says_what_is_counted(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(
        "subquad.tasks.confusion.save_figure", lambda figure, path: titles.append(figure.axes[0].get_title("left"))
    )
    save_confusion(SMALL, "abc", tmp_path / "a")
    judged = SceneJudgement(judge_confusion(SMALL), ("a", "b", "c"), 1, 1.0, [], torch.device("cpu"))
    judged.save(tmp_path / "b")
    assert titles[0].endswith("images right") and titles[1].endswith("pixels right")


def test_names_that_do_not_fit_the_matrix_are_refused():
    with pytest.raises(SubquadError, match=r"\(3, 3\) does not fit 2 class names"):
        confusion_text(SMALL, "ab")
