"""What is marked as best, and which number of many a page shows."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from subquad.analysis import MeasureRow, confusion_words, removal_shares
from subquad.analysis.query_maps import _query_map, _salient
from subquad.pages.analysis_page import _measure
from subquad.pages.attention_maps import _coloured
from subquad.pages.charts import Axis, Series, _beside, _Frame, _share, spread_apart
from subquad.pages.image_page import _difference, _pictures
from subquad.pages.table import accuracy_table, columns_of
from subquad.runs.run_records import Run, find_runs, group_runs
from subquad.text import si


def rewritten(folder, *, facts, row):
    """A run folder with other facts, and other entries in every row."""
    (folder / "run.json").write_text(json.dumps(json.loads((folder / "run.json").read_text()) | facts))
    rows = [json.loads(line) | row for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_best_value_is_bold_on_the_side_where_it_is_better(make_run, tmp_path):
    small = {"facts": {"params": 1_000, "macs": 2_000}, "row": {"epoch_seconds": 1.0, "peak_memory_mb": 100.0}}
    large = {"facts": {"params": 9_000, "macs": 8_000}, "row": {"epoch_seconds": 5.0, "peak_memory_mb": 900.0}}
    rewritten(make_run("lean", "linear", top1=80.0), **{**small, "row": small["row"] | {"images_per_second": 50.0}})
    rewritten(make_run("good", "softmax", top1=95.0), **{**large, "row": large["row"] | {"images_per_second": 99.0}})
    groups = group_runs(find_runs([tmp_path / "runs"]))
    table = accuracy_table(groups, {group.label: "c1" for group in groups})
    lines = [line for line in re.findall(r"<tr>.*?</tr>", table) if "<td" in line]
    bold = {
        re.search(r"</span>(\w+)</th>", line)[1]: [
            column.title
            for column, kind in zip(columns_of(groups), re.findall(r"<td( class=\"best\")?", line), strict=True)
            if kind
        ]
        for line in lines
    }
    # both have 99 % in the second column
    assert bold["linear"] == ["top-5 %", "parameters", "MACs", "time", "peak MB"]
    assert bold["softmax"] == ["top-1 %", "top-5 %", "images/s"]


def rows(*values, **more):
    return [{"eval_top1": value, **{key: of[k] for key, of in more.items()}} for k, value in enumerate(values)]


def test_the_best_epoch_is_shown_and_not_the_last_whether_averaged_or_not(make_run, tmp_path):
    assert Run(tmp_path, {}, {}, rows(10.0, 30.0, 20.0)).best("eval_top1") == 30
    assert Run(tmp_path, {}, {}, rows(10.0, 30.0, 20.0, ema_top1=[5.0, 20.0, 40.0])).best("eval_top1") == 40


def test_costs_are_medians_of_epochs_and_means_of_seeds(make_run, tmp_path):
    for seed, seconds in enumerate((2.0, 4.0)):
        folder = make_run(f"s{seed}", "agent", seed=seed, epochs=3, top1=90.0 + seed)
        rewritten(folder, facts={}, row={"epoch_seconds": seconds})
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines[0]["images_per_second"] = 1.0
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (group,) = group_runs(find_runs([tmp_path / "runs"]))
    assert group.seconds == 9 and group.cost("images_per_second") == 701
    assert group.curve("eval_top1") == [(1, 88.5), (2, 89.5), (3, 90.5)]


def test_charts_go_up_and_right():
    series = [Series("a", "c1", [(1.0, 10.0), (100.0, 30.0)], ["", ""])]
    frame = _Frame(series, Axis("x"), Axis("y"), 500, 300)
    (left, low), (right, high) = frame.place(1.0, 10.0), frame.place(100.0, 30.0)
    assert left < right and high < low
    assert _share(10.0, (1.0, 100.0), True) == pytest.approx(0.5) and _share(25.0, (0.0, 100.0), False) == 0.25


def test_names_that_have_run_out_at_the_bottom_push_the_others_up():
    assert spread_apart([300.0, 290.0, 20.0, 310.0], 13, 18, 276) == [263.0, 250.0, 20.0, 276.0]


def test_names_beside_points_stand_neither_on_names_nor_on_points():
    places = [(100.0, 50.0), (120.0, 50.0), (130.0, 70.0), (400.0, 50.0), (90.0, 54.0)]
    levels = _beside(places)
    assert levels[3] == 50.0
    for k, (px, _) in enumerate(places):
        for other, (x, y) in enumerate(places):
            if other != k and abs(x - px) < 80:
                assert abs(levels[k] - levels[other]) >= 13
            if other != k and 0 < x - px < 80:
                assert abs(levels[k] - y) >= 13


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (999, "999"),
        (999_499, "999 k"),
        (999_500, "1 M"),
        (999_999_999, "1 G"),
        (2.94e12, "2.94 T"),
        (1_234_567, "1.23 M"),
    ],
)
def test_counts_have_three_digits_and_the_unit_that_they_round_to(number, text):
    assert si(number) == text


def test_shares_and_confusions_are_counted_over_all_images():
    assert removal_shares({"none": [1.0, 1.0, 0.0, 1.0], "local 9": [0.0, 1.0]}) == {"none": 75.0, "local 9": 50.0}
    words = confusion_words({"confused": [0.0, 26.0, 25.0, 1.0]})
    assert words == "13.0 confused pairs an image, median 13; more than 25 in 25.0 % of 4 images"


def test_a_measures_line_is_the_mean_of_all_heads(make_run):
    found = [
        MeasureRow("net", layer, "attn", "softmax", "entropy", head, mean, 0.1, 0.9, 1.0)
        for layer, head, mean in ((1, 0, 0.25), (1, 1, 0.75), (2, 0, 0.5))
    ]
    page = _measure("entropy", {"net": found}, {"net": "c1"})
    tips = re.findall(r'data-tip="net, layer (\d) \(softmax\): ([\d.]+)', page)
    assert tips == [("1", "0.250"), ("2", "0.500")] and page.count("by chance: 1.000") == 2


class Layer:
    """Three tokens of prefix on a map of 2 × 4: a query's weights are its own number on the keys' numbers."""

    def __init__(self):
        import torch

        from subquad.grid import TokenGrid

        self.grid = self.kv_grid = TokenGrid(2, 4, 3)
        self.weights = (100.0 * torch.arange(11)[:, None] + torch.arange(11)).expand(1, 2, 1, 11, 11)


def test_the_map_of_a_query_is_its_own_without_the_prefix():
    shown = _query_map(Layer(), 0, (0.75, 0.3))
    # row 1 and column 1 of the map, behind three tokens
    assert shown.tolist() == [[800.0 + k + 3 for k in range(4)], [800.0 + k + 7 for k in range(4)]]


def test_where_to_ask_is_where_a_picture_differs_most():
    picture = np.full((80, 160), 100, np.uint8)
    picture[70:80, 20:40] = 255
    assert _salient(Image.fromarray(picture)) == ((7 + 0.5) / 8, (1 + 0.5) / 8)


def test_colours_of_weights_tell_their_sign_and_size():
    light = np.asarray(_coloured(np.array([[0.0, 1.0]], np.float32), False, (112, 56))).astype(int).sum(-1)
    assert light[0, -1] > light[0, 0]
    signed = np.asarray(_coloured(np.array([[-1.0, 0.0, 1.0]], np.float32), True, (112, 37))).astype(int)
    assert signed[0, 0, 2] > signed[0, 0, 0] and signed[0, -1, 0] > signed[0, -1, 2]
    assert (signed[0, 56] > 240).all()


def test_differences_of_images_are_four_times_stronger_whatever_their_sign(tmp_path):
    first, second = Image.new("RGB", (2, 2), (10, 20, 200)), Image.new("RGB", (2, 2), (13, 18, 100))
    assert _difference(first, second).getpixel((0, 0)) == (12, 8, 255)
    assert _pictures(tmp_path / "page.html", [], ["softmax"]) == ""
