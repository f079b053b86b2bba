"""The page of a conversion: what was not measured has no section, and the curve stands over what was."""

import math
from dataclasses import replace

import pytest

from subquad.conversion.conversion_record import Record, read_record
from subquad.conversion.hybrids import BlockDamage, HybridRow
from subquad.conversion.judging import Comparison
from subquad.conversion.labelled_features import LabelledComparison, Readable
from subquad.conversion.paired_maps import PairedMaps
from subquad.pages import write_conversion
from subquad.pages.charts import Axis, Series, bar_chart
from subquad.pages.colours import NEUTRAL, classes_of

PLAN = {"source": "timm/vit_x=w.safetensors", "attention": "agent:num_agents=9", "images": "photos", "batch_size": 8}
STEP = Comparison(4, 0.9, 0.1, None, None, None)


def page_of(folder, maps=None, **fields):
    done = {"grid": [2, 3, 1], "paths": {"1": "blocks.1", "0": "blocks.0"}, "num_blocks": 3}
    write_conversion(Record(PLAN, done, {"swapped": STEP}, {}, **fields), folder / "page.html", maps=maps)
    return (folder / "page.html").read_text()


def test_what_was_not_measured_has_no_section(tmp_path):
    page = page_of(tmp_path)
    assert "agent attention in vit_x" in page
    assert "Converted are 2 of 3 attention layers: 0, 1." in page
    for heading in (
        "Time and memory",
        "What each block costs",
        "Learning curves",
        "Broken images",
        "Where places look",
    ):
        assert f"<h2>{heading}" not in page
    assert "top-1</button>" not in page


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_figures_that_are_not_finite_are_left_out_of_the_charts(tmp_path, broken):
    """A block whose exchange breaks the network ended the page, at the end of the run, and when it was read again."""
    step = replace(STEP, error=broken, cosine=broken)
    fields = {
        "blocks": [BlockDamage(0, broken, None), BlockDamage(1, 0.125, None)],
        "hybrids": [HybridRow((), 0.0, None), HybridRow((0,), broken, None), HybridRow((1,), 0.125, None)],
        "before": {0: broken, 1: 0.5},
    }
    page = page_of(tmp_path, **fields)
    assert "block 1: 0.125" in page and "block 0:" not in page and "nan" not in page and "inf" not in page
    done = {"grid": [2, 3, 1], "paths": {"1": "blocks.1", "0": "blocks.0"}, "num_blocks": 3}
    Record(PLAN, done, {"swapped": step}, {}, **fields).save(tmp_path)
    record = read_record(tmp_path)
    assert math.isnan(record.blocks[0].damage) and math.isnan(record.before[0]) and record.before[1] == 0.5
    write_conversion(record, tmp_path / "again.html")
    assert '<td data-value="-Infinity">–</td>' in (tmp_path / "again.html").read_text()


def test_features_are_judged_behind_each_step_in_the_columns_that_were_measured(tmp_path):
    steps = {name: Readable(0.25, 0.5, 0.75) for name in ("swapped", "aligned", "distilled")}
    page = page_of(tmp_path, labelled=LabelledComparison("digits", 4, 4, Readable(0.5, 0.625, 1.0), steps))
    section = page[page.index("<h2>What the features tell") :]
    section = section[: section.index("</table>")]
    assert [name in section for name in ("teacher", *steps)] == [True] * 4
    assert [f"{title}</button>" in section for title in ("agreement", "neighbours", "linear probe", "own head")] == [
        True,
        True,
        True,
        False,
    ]
    assert section.count("75.00 %") == 3


def test_why_there_are_no_maps_is_said(tmp_path):
    assert "The networks have moved." in page_of(tmp_path, PairedMaps(without="The networks have moved."))


@pytest.mark.parametrize("ms", [None, 3.0])
def test_the_curve_is_over_milliseconds_where_they_were_measured(ms, tmp_path):
    rows = [HybridRow((0, 1)[:count], 0.1 * count, 0.9, ms and ms - count) for count in range(3)]
    page = page_of(tmp_path, hybrids=rows, blocks=[BlockDamage(k, 0.1, None) for k in range(2)])
    assert (">milliseconds</text>" in page) == (ms is not None)
    assert (">converted blocks</text>" in page) == (ms is None)
    # the student is one of the hybrids: all blocks
    assert page.count("this student</text>") == 2


def test_teacher_and_student_have_the_colours_of_their_mechanisms(tmp_path):
    colours = classes_of({"teacher": "softmax", "student": "agent"})
    page = page_of(tmp_path, before={0: 0.5, 1: 0.2}, after={0: 0.1, 1: 0.0})
    assert f'class="series {colours["student"]}"' in page
    # no logarithm of nothing
    assert "block 1, after" not in page
    assert "block 1, before: 0.2" in page


def test_bars_stand_on_the_axis_and_are_as_high_as_what_they_show():
    bars = bar_chart(Series("", NEUTRAL, [(0, 1.0), (1, 2.0)], ["<a>", "b"]), Axis("x"), Axis("y"), height=260)
    heights = [float(part.split('"')[0]) for part in bars.split(' height="')[1:]]
    assert heights[1] == pytest.approx(2 * heights[0], rel=1e-2)
    assert "&lt;a&gt;" in bars
