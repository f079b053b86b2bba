"""A mechanism has one colour on every page and picture; what shares it is told apart by shades."""

import re
from xml.etree import ElementTree

import pytest

import subquad
from subquad import ATTENTION
from subquad.analysis import Findings, MeasureRow
from subquad.attention import traits_of
from subquad.benchmarks import BlockRow
from subquad.pages import bench_picture
from subquad.pages.analysis_page import write_analysis
from subquad.pages.colours import classes_of, colour_of, colour_of_class, style_of


def rgb(colour):
    return [int(colour[k : k + 2], 16) for k in (1, 3, 5)]


def test_every_mechanism_has_the_colour_that_it_says_and_no_two_are_alike():
    colours = {name: colour_of(name) for name in ATTENTION}
    assert colours == {name: traits_of(cls).colour or colours[name] for name, cls in ATTENTION.items()}
    assert len(set(colours.values())) == len(ATTENTION)


def test_what_nobody_has_given_a_colour_has_one_of_its_name():
    assert (colour_of("mean"), colour_of("less")) == ("#3fa2a7", "#59ba48")
    assert colour_of("mean:size=3") == colour_of("mean") != colour_of("means")


def test_networks_of_several_mechanisms_have_the_colour_of_the_first_that_is_not_quadratic():
    assert colour_of("softmax+agent:num_agents=4+linear") == colour_of("agent")
    assert colour_of("softmax:relative_bias=true+softmax") == colour_of("softmax")


def test_labels_of_one_mechanism_get_shades_of_it_and_the_first_the_colour_itself():
    labels = {f"{name} {k}": name for k in range(12) for name in ATTENTION}
    classes = classes_of(labels)
    assert len(set(classes.values())) == len(labels)
    assert all(classes[f"{name} 0"] == f"colour-{colour_of(name)[1:]}" for name in ATTENTION)
    # whoever else is there
    assert classes_of({"agent 0": "agent"}) == {"agent 0": classes["agent 0"]}


def test_colours_are_light_on_dark_paper():
    style = style_of('<g class="series colour-3a3f4a"/><g class="series colour-0072b2"/>')
    light, dark = (re.findall(r"--colour: (#\w{6})", part) for part in style.split("@media"))
    assert light == ["#3a3f4a", "#0072b2"] and all(sum(rgb(colour)) > 1.1 * sum(rgb("#707070")) for colour in dark)
    assert dark[1] != dark[0] and colour_of_class("colour-0072b2") == "#0072b2"


def block_row(name, tokens):
    numbers = dict.fromkeys((field for field in BlockRow.__dataclass_fields__), 1.0)
    return BlockRow(**numbers | {"mechanism": name, "tokens": tokens, "batch_size": 1, "dtype": "fp32"})


@pytest.mark.parametrize("name", ["agent", "mean"])
def test_report_analysis_and_pictures_agree(name, make_run, tmp_path):
    wanted = f"colour-{colour_of(name)[1:]}"
    make_run("other", "linear")
    make_run("run", name)
    subquad.report([tmp_path / "runs"], tmp_path / "report.html", scaling=False)
    rows = [MeasureRow("net", layer, "blocks", name, "entropy", 0, 0.5, 0.4, 0.6, None) for layer in (1, 2)]
    write_analysis(tmp_path / "analysis.html", Findings(rows={"net": rows}))
    bench_picture([block_row(name, 16), block_row(name, 64)], tmp_path / "bench.svg")
    for file in ("report.html", "analysis.html"):
        markup = (tmp_path / file).read_text()
        assert f'<g class="series {wanted}">' in markup and f".{wanted} " in markup
    strokes = [each.get("style", "") for each in ElementTree.parse(tmp_path / "bench.svg").iter()]
    assert any(f"stroke: {colour_of(name)};" in style for style in strokes)


def test_layers_without_a_number_are_left_out_of_the_charts(tmp_path):
    values = {1: 0.5, 2: float("nan"), 3: 0.7}
    rows = [MeasureRow("net", layer, "blocks", "pola", "entropy", 0, x, x, x, None) for layer, x in values.items()]
    write_analysis(tmp_path / "page.html", Findings(rows={"net": rows}))
    assert (tmp_path / "page.html").read_text().count("<circle") == 2
