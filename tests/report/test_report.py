"""The page shows every run, needs nothing from outside, and says in one line what it can't read."""

import base64
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hosts import without_prefix
from mechanisms import WITH_WEIGHTS, WITHOUT_WEIGHTS
from PIL import Image

import subquad
from subquad import ATTENTION, SubquadError
from subquad.analysis import QueryMaps, attention_weights
from subquad.analysis.query_maps import _whole_map_layers, query_maps
from subquad.analysis.small_maps import Looking
from subquad.attention import traits_of
from subquad.benchmarks import measure_scaling
from subquad.pages import write_report
from subquad.pages.attention_maps import drawn_maps
from subquad.pages.charts import Axis, Series, _Frame, line_chart, point_chart, tick_texts, ticks_of
from subquad.pages.page_parts import Cell, sortable_table
from subquad.pages.viewer import attention_viewer
from subquad.runs.run_records import differing_fields, find_runs, group_runs


class Strict(HTMLParser):
    """Collects attributes and checks that tags close in order."""

    VOID = frozenset({"meta", "img", "br", "path", "circle"})

    def __init__(self):
        super().__init__()
        self.open, self.links, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.links += [value for key, value in attrs if key in ("src", "href", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(path):
    page = path.read_text()
    parser = Strict()
    parser.feed(page)
    assert not parser.open
    return page, parser


def scaling():
    (row,) = measure_scaling(["agent"], [4], dim=8, num_heads=1, repeats=1)
    return [
        replace(row, mechanism=name, tokens=n, block_ms=ms * n, softmax_block_ms=0.1 * n, peak_mb=n / 100)
        for name, ms in (("softmax", 0.1), ("agent", 0.05))
        for n in (64, 256)
    ]


def test_every_mechanism_is_in_the_page_and_nothing_comes_from_outside(make_run, tmp_path):
    for place, name in enumerate(ATTENTION):
        make_run(f"{name}-s0", name, top1=90 + place)
    write_report(group_runs(find_runs([tmp_path / "runs"])), tmp_path / "page.html", scaling=scaling())
    page, parser = read(tmp_path / "page.html")
    text = " ".join(parser.text)
    assert all(name in text for name in ATTENTION)
    assert f"{len(ATTENTION)} attention mechanisms on digits" in text
    assert "agent at every length from 64 on" in re.sub(r"\s+", " ", text)
    assert all(link.startswith("data:") for link in parser.links)
    assert "http" not in re.sub(r'xmlns="[^"]*"', "", page) and "url(" not in page and "@import" not in page


def test_runs_that_differ_by_their_seed_are_one_row_with_mean_and_deviation(make_run, tmp_path):
    for seed, top1 in enumerate((90.0, 92.0)):
        make_run(f"agent-s{seed}", "agent", seed=seed, top1=top1)
    (group,) = group_runs(find_runs([tmp_path / "runs"]))
    assert group.mean("eval_top1") == 91 and group.spread("eval_top1") == pytest.approx(2**0.5)
    subquad.report([tmp_path / "runs"], tmp_path / "page.html", scaling=False)
    assert "91.00 ± 1.41" in (tmp_path / "page.html").read_text()


def test_a_run_that_is_named_twice_is_one(make_run, tmp_path):
    runs = [make_run(f"s{seed}", "agent", seed=seed, top1=90.0 + seed) for seed in range(2)]
    (group,) = group_runs(find_runs([tmp_path / "runs", *runs, runs[0] / ".." / "s1"]))
    assert len(group.runs) == 2 and group.mean("eval_top1") == 90.5


def test_a_seed_counts_once(make_run, tmp_path):
    # two folders of images, which the recipe has in no other field
    for name, top1 in (("cats", 90.0), ("cars", 70.0)):
        for seed in range(2):
            make_run(f"{name}/linear-s{seed}", "linear", seed=seed, top1=top1 + seed, data="folder", data_dir=name)
    groups = group_runs(find_runs([tmp_path / "runs" / "cats", tmp_path / "runs" / "cars"]))
    assert [group.label for group in groups] == ["linear (cats/linear-s0)", "linear (cars/linear-s0)"]
    assert [group.mean("eval_top1") for group in groups] == [90.5, 70.5]


def test_data_with_other_classes_is_other_data(make_run, tmp_path):
    for seed, name in enumerate(("cats", "cars")):
        folder = make_run(name, "linear", seed=seed, data="folder", data_dir=name)
        facts = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(facts | {"classes": [name, "none"]}))
    assert len(group_runs(find_runs([tmp_path / "runs"]))) == 2
    subquad.report([tmp_path / "runs"], tmp_path / "page.html", scaling=False)
    assert "in more than the attention: data_dir, classes." in (tmp_path / "page.html").read_text()


def test_how_many_seeds_there_are_is_said_of_all(make_run, tmp_path):
    for seed in range(3):
        make_run(f"softmax-s{seed}", "softmax", seed=seed)
    subquad.report([tmp_path / "runs"], tmp_path / "page.html", scaling=False)
    assert "3 seeds each" in (tmp_path / "page.html").read_text()
    make_run("agent-s0", "agent")
    subquad.report([tmp_path / "runs"], tmp_path / "page.html", scaling=False)
    assert "1 to 3 seeds each" in (tmp_path / "page.html").read_text()


def test_runs_that_have_not_finished_or_begun_are_said_to_be(make_run, tmp_path):
    make_run("whole", "agent", epochs=5, lr=0.1), make_run("begun", "softmax", lr=0.1)
    (make_run("first", "inline") / "metrics.jsonl").write_text("")
    (make_run("killed", "inline") / "recipe.yaml").unlink()
    for name, epochs in (("whole", 5), ("begun", 8)):
        file = tmp_path / "runs" / name / "recipe.yaml"
        file.write_text(file.read_text() + f"epochs: {epochs}\ncooldown_epochs: 0\n")
    said = []
    subquad.report([tmp_path / "runs"], tmp_path / "page.html", scaling=False, log=said.append)
    assert len([line for line in said if line.startswith("left out: ") and "no whole epoch yet" in line]) == 2
    text = " ".join(read(tmp_path / "page.html")[1].text)
    assert "Not finished yet: begun (5 of 8 epochs)." in text and "whole (" not in text
    with pytest.raises(SubquadError, match="first has no whole epoch yet"):
        find_runs([tmp_path / "runs" / "first"])


def test_what_differs_beside_the_attention_is_said(make_run, tmp_path):
    make_run("a", "agent", lr=0.1, workers=1), make_run("b", "softmax", lr=0.1, workers=2, settings={"x": 1})
    subquad.report([tmp_path / "runs"], tmp_path / "page.html", scaling=False)
    assert "only the attention differs" in (tmp_path / "page.html").read_text()
    make_run("c", "softmax", lr=0.2, model="pvt_tiny")
    subquad.report([tmp_path / "runs"], tmp_path / "page.html", scaling=False)
    page = (tmp_path / "page.html").read_text()
    assert "only the attention differs" not in page and "in more than the attention: lr, model." in page


def test_runs_stand_in_the_order_of_their_first_mechanism_whatever_its_settings(make_run, tmp_path):
    known = list(ATTENTION)[:3]
    for place, name in enumerate([f"{known[2]}+softmax", f"{known[1]}:local=true+{known[0]}", "unknown", known[0]]):
        make_run(f"{place}", name)
    labels = [group.label for group in group_runs(find_runs([tmp_path / "runs"]))]
    assert labels == [known[0], f"{known[1]}:local=true+{known[0]}", f"{known[2]}+softmax", "unknown"]


def test_names_from_files_are_escaped(make_run, tmp_path):
    make_run("odd", "agent", data="<script>alert(1)</script>")
    subquad.report([tmp_path / "runs"], tmp_path / "page.html", scaling=False)
    page, _ = read(tmp_path / "page.html")
    assert "<script>alert" not in page


def test_what_is_missing_is_said_and_not_drawn(make_run, tmp_path):
    said = []
    subquad.report([make_run("one", "agent", epochs=1)], tmp_path / "page.html", scaling=False, log=said.append)
    text = " ".join(read(tmp_path / "page.html")[1].text)
    assert "were not measured" in text and "No run has kept weights" in text
    assert "no attention maps of agent" in said[0]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("metrics.jsonl", '{"epoch": 0}\n{"epo', "line 2 of"),
        ("metrics.jsonl", "", "has no whole epoch yet"),
        ("run.json", "{", "can't be read"),
    ],
)
def test_a_broken_run_is_one_line(make_run, tmp_path, file, content, message):
    folder = make_run("broken", "agent")
    (folder / file).write_text(content)
    with pytest.raises(SubquadError, match=message) as caught:
        subquad.report([folder], tmp_path / "page.html", scaling=False)
    assert "\n" not in str(caught.value) and not (tmp_path / "page.html").exists()


def test_a_folder_without_runs_is_one_line(tmp_path):
    with pytest.raises(SubquadError, match="holds no run"):
        find_runs([tmp_path])
    with pytest.raises(SubquadError, match="there is no run folder"):
        find_runs([tmp_path / "nowhere"])


def test_a_page_of_somebody_else_is_not_written_over(make_run, tmp_path):
    """A test runner's report.html, say: it went without a word, as the command's own name for its page is that."""
    run = make_run("run", "linear")
    page = tmp_path / "report.html"
    page.write_text("<!doctype html><title>mine</title>")
    with pytest.raises(SubquadError, match="is there already and is no page of subquad: remove it, or"):
        subquad.report(run, page, scaling=False)
    assert "mine" in page.read_text()
    page.write_text("")
    for _ in range(2):
        # its own is replaced
        subquad.report(run, page, scaling=False)
    assert "linear" in page.read_text()


def test_a_report_that_is_not_named_html_is_refused(make_run, tmp_path):
    with pytest.raises(SubquadError, match=r"name it like .*page\.html"):
        subquad.report([make_run("one", "agent")], tmp_path / "page.pdf", scaling=False)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [[3.0], [5.0, 5.0], [0.02, 4000.0], [97.1, 97.2]])
def test_charts_draw_any_range_inside_their_frame(values, log):
    series = [Series("name", "c0", [(k + 1, value) for k, value in enumerate(values)], [str(v) for v in values])]
    for chart in (line_chart, point_chart):
        svg = chart(series, Axis("x", log), Axis("y", log), width=500, height=300)
        for cx, cy in re.findall(r'cx="([-\d.]+)" cy="([-\d.]+)"', svg):
            assert 0 <= float(cx) <= 500 and 0 <= float(cy) <= 300


def test_names_at_line_ends_do_not_overlap():
    series = [Series(f"n{k}", "c0", [(1, 1), (2, 1 + k / 1000)], ["", ""]) for k in range(9)]
    levels = sorted(
        float(y) for y in re.findall(r'class="name" x="[\d.]+" y="([\d.]+)"', line_chart(series, Axis("x"), Axis("y")))
    )
    assert min(b - a for a, b in pairwise(levels)) >= 12.9


@pytest.mark.slow
def test_attention_maps_show_every_mechanism_over_the_same_images(make_run):
    groups = []
    for name in ATTENTION:
        folder = make_run(name, name)
        sizes = {"num_classes": 10, "depths": (2,), "patch_size": 2}
        model = subquad.create_model("deit_micro", attention=name, **sizes, **without_prefix(name))
        note = {
            "classes": [str(k) for k in range(10)],
            "data": "digits",
            "input": {"mean": [0.5] * 3, "std": [0.5] * 3},
        }
        subquad.save_weights(model, folder / "best.safetensors", note)
        groups += group_runs(find_runs([folder]))
    sources = [(group.label, group.first.path) for group in groups]
    said = []
    tables = [drawn_maps(asked) for asked in query_maps(sources, said.append, count=3)]
    assert [table.layer for table in tables] == ["layer 2 of 2, the last"]
    assert tables[0].labels == WITH_WEIGHTS and len(tables[0].images) == 3
    for name, line in zip(WITHOUT_WEIGHTS, said, strict=True):
        assert line.startswith(f"no attention maps of {name}: ") and traits_of(ATTENTION[name]).no_weights in line
    assert all(cell.startswith("data:image/png;base64,") for row in tables[0].maps for cell in row)


def test_cells_say_what_their_columns_are_sorted_by():
    """Sizes in the first column are no words, and a number that is not there compares with those that are."""
    page = sortable_table(
        ("pixels", "kept"), [[Cell("1036×1036", "1036"), Cell("–")], [Cell("224×224", "224"), Cell("9 %", "9")]]
    )
    values = re.findall(r'<t([hd])(?: scope="row")? data-value="([^"]*)"', page)
    assert values == [("h", "1036"), ("d", "-Infinity"), ("h", "224"), ("d", "9")]


def embedded(page):
    """The pictures in some markup, in its order."""
    sources = re.findall(r"data:image/png;base64,([^\"]*)", page)
    return [Image.open(io.BytesIO(base64.b64decode(source))) for source in sources]


@pytest.mark.parametrize(("size", "fitted"), [((320, 80), (1, 0.25)), ((80, 320), (0.25, 1)), ((600, 2), (1, 1 / 112))])
def test_pictures_and_maps_have_the_aspect_of_what_they_show(size, fitted):
    picture, weights = Image.new("RGB", size), np.zeros((4, 40), np.float32)
    asked = QueryMaps("layer 1 of 1", ["a"], [(picture, "x")], [(0.9, 0.99)], (4, 400), [[weights]])
    (table,) = [drawn_maps(asked)]
    shown = embedded(table.images[0][0] + '"' + table.maps[0][0])
    assert [each.size for each in shown] == [tuple(round(112 * side) for side in fitted)] * 2
    look = Looking(1, "softmax", (1, 2), (1, 2), np.zeros((2, 2), np.int8), 1.0)
    viewer = attention_viewer([picture], {"a": [[look]]})
    (clicked,) = embedded(viewer)
    assert max(clicked.size) == 224 and f"aspect-ratio: {clicked.width} / {clicked.height}" in viewer
    assert clicked.size == pytest.approx([224 * side for side in fitted], abs=1)


def test_maps_stand_beside_what_the_crop_leaves_of_their_images(tmp_path):
    """The frame is around a place of what the network sees; its border is outside of the crop."""
    for name in ("a", "b"):
        (tmp_path / "data" / "val" / name).mkdir(parents=True)
        picture = Image.new("RGB", (64, 64), (0, 0, 0))
        picture.paste((0, 200, 0), (16, 16, 48, 48))
        picture.save(tmp_path / "data" / "val" / name / "x.png")
    model = subquad.create_model("deit_micro", depths=(1,), num_classes=2, img_size=(16, 32), patch_size=4)
    seen = {"crop_pct": 0.5, "interpolation": "nearest"}
    note = {"task": "classify", "classes": ["a", "b"], "input": seen, "data": str(tmp_path / "data")}
    subquad.save_weights(model, tmp_path / "m.safetensors", note)
    (asked,) = query_maps([("m", tmp_path / "m.safetensors")], count=2)
    findings = subquad.analyze(tmp_path / "m.safetensors", tmp_path / "out", measures=["entropy"])
    for picture in [*(picture for picture, _ in asked.pictures), *findings.pictures]:
        assert picture.size == (32, 16) and picture.getcolors() == [(512, (0, 200, 0))]


def test_the_last_layer_is_that_of_all_networks(tmp_path):
    note = {"classes": [str(k) for k in range(10)], "data": "digits", "input": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    for depth in (2, 3):
        model = subquad.create_model("deit_micro", num_classes=10, depths=(depth,), patch_size=2)
        subquad.save_weights(model, tmp_path / f"{depth}.safetensors", note)
    sources = [(f"{depth} blocks", tmp_path / f"{depth}.safetensors") for depth in (2, 3)]
    assert [asked.layer for asked in query_maps(sources, count=1)] == ["layer 2 of 2 or 3"]


def test_maps_are_of_layers_that_see_the_whole_image():
    sizes = {"img_size": 64, "embed_dim": 12, "num_heads": (1, 2, 3, 4), "depths": (2, 1, 1, 1), "num_classes": 3}
    images = torch.randn(2, 3, 64, 64)
    networks = [
        attention_weights(subquad.create_model("swin_tiny", attention=name, **sizes), images)
        for name in ("softmax", "agent")
    ]
    # 16 and 8 tokens a side are cut into windows of 7, 4 and 2 are not
    assert [len(layers) for layers in networks] == [5, 5]
    assert _whole_map_layers(networks, 2) == [3, 4] and _whole_map_layers(networks[1:], 2) == [0, 1, 2, 3, 4]


def test_runs_of_different_tasks_are_refused_in_front_of_all_measuring(tmp_path, monkeypatch):
    folder = Path(__file__).parents[1] / "fixtures" / "runs"
    monkeypatch.setattr("subquad.api.measure_scaling", lambda *given, **more: pytest.fail("it is measured"))
    with pytest.raises(SubquadError, match=r"^runs of different tasks .* can't be compared"):
        subquad.report([folder / "classify", folder / "segment"], tmp_path / "page.html", log=pytest.fail)
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("data", "places", "seeds", "labels"),
    [
        # one set of data, on two machines
        ("cifar10", ("/a/cifar10.tar", "/b/cifar10.tar"), (0, 1), ["linear"]),
        # of one seed there is one run of some data
        ("coco", ("mine", "yours"), (0, 0), ["linear (s0)", "linear (s1)"]),
        ("folder", ("mine", "yours"), (0, 0), ["linear (s0)", "linear (s1)"]),
        ("folder", ("mine", "yours"), (0, 1), ["linear (s0)", "linear (s1)"]),
        ("folder", ("mine", "mine"), (0, 1), ["linear"]),
    ],
)
def test_runs_on_other_data_are_not_taken_for_seeds_of_one(make_run, tmp_path, data, places, seeds, labels):
    for k, (place, seed) in enumerate(zip(places, seeds, strict=True)):
        make_run(f"s{k}", "linear", seed=seed, data=data, data_dir=place)
    groups = group_runs(find_runs([tmp_path / "runs"]))
    assert [group.label for group in groups] == labels
    assert differing_fields(groups) == (["data_dir"] if len(labels) > 1 else [])


def test_long_numbers_at_an_axis_do_not_lie_on_its_title():
    for values in ([0.000465, 0.00048], [1.0, 3.0], [1234.5678, 1234.5679]):
        frame = _Frame([Series("", "", list(enumerate(values)), [])], Axis("x"), Axis("y"), 400, 200)
        longest = max(map(len, tick_texts(frame.y_ticks)))
        assert frame.left - 7 - 7 * longest >= 20, values
        assert frame.place(0, values[0])[0] >= frame.left


@pytest.mark.parametrize(
    "values", [(0.99998, 1.0), (95.001, 95.002), (1e6, 1e6 + 3), (0, 12), (-1e-6, 1e-6), (20.5, 2000)]
)
def test_ticks_of_an_axis_have_as_many_digits_as_tell_them_apart(values):
    """Entropies of almost uniform rows stood at ticks of 1, 1, 1 and 1."""
    ticks, _ = ticks_of(values, Axis("entropy"))
    texts = tick_texts(ticks)
    assert len(set(texts)) == len(ticks) > 2
    read = [1000 * float(text[:-1]) if text.endswith("k") else float(text) for text in texts]
    assert read == pytest.approx(ticks, abs=(ticks[1] - ticks[0]) / 3)


@pytest.mark.parametrize("values", [(2.37, 2.57), (196.0, 196.0), (1.01, 1.02), (0.3, 40.0)])
def test_a_logarithmic_axis_has_numbers_however_close_its_values_lie(values):
    ticks, (low, high) = ticks_of(values, Axis("milliseconds", log=True))
    assert len(ticks) > 1 and all(low <= tick <= high for tick in ticks) and low < min(values) <= max(values) < high


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_figures_that_are_no_numbers_are_refused_in_one_line(make_run, value):
    """Python's JSON reads NaN, of which a chart can make nothing."""
    folder = make_run("agent-s0", "agent")
    rows = [json.loads(line) | {"eval_top1": value} for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SubquadError, match=f"line 1 of .* is damaged: its eval_top1 is {value}"):
        find_runs([folder])
