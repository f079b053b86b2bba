"""What comes from outside, names of files, classes, runs, settings, prompts, is text on every page and nothing else.

Each page is made twice, with plain names and with names that would be markup: both have the same tags and attributes.
"""

import dataclasses
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from subquad.analysis import Findings, MeasureRow, QueryMaps
from subquad.analysis.small_maps import Looking
from subquad.benchmarks import BlockRow, MethodRow
from subquad.conversion.conversion_record import Record
from subquad.conversion.hybrids import BlockDamage, HybridRow
from subquad.conversion.judging import Comparison
from subquad.conversion.labelled_features import LabelledComparison, Readable
from subquad.conversion.measured_costs import CostRow
from subquad.conversion.paired_maps import PairedMaps
from subquad.diffusion.folder import ImageRow
from subquad.pages import bench_picture, write_conversion, write_images_page, write_report
from subquad.pages.analysis_page import write_analysis
from subquad.runs import RunFolder
from subquad.runs.run_records import find_runs, group_runs
from subquad.tasks import TASKS, Gallery

HOSTILE = """</script></title></style>"'><script>alert(1)</script><img src=x onerror='a()'>&lt;"""
PLAIN = "plain"
PICTURE = Image.new("RGB", (8, 8), (9, 99, 199))


class Skeleton(HTMLParser):
    """The tags of a page with the names of their attributes, and its text."""

    def __init__(self):
        super().__init__()
        self.tags, self.words = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, [name for name, _ in attrs]))
        self.words += [str(value) for _, value in attrs]

    def handle_data(self, data):
        self.words.append(data)


def report(name, make_run, folder, task="classify", **sections):
    """A report of two runs whose every word is `name`."""
    facts = {"task": task, "command": f"subquad {name}", "device": name, "versions": {"torch": name, name: name}}
    groups = []
    for k, attention in enumerate(("agent", "linear")):
        make_run(f"{len(list(folder.rglob('run.json')))}", attention, model=name, data=name)
        (group,) = group_runs(find_runs([folder / "runs"])[-1:])
        runs = [dataclasses.replace(run, facts=run.facts | facts) for run in group.runs]
        groups.append(dataclasses.replace(group, label=f"{name} {k}", runs=tuple(runs)))
    page = folder / "report.html"
    write_report(groups, page, **sections)
    return page.read_text()


def block_row(mechanism, tokens):
    numbers = dict.fromkeys(BlockRow.__dataclass_fields__, 1.0) | {"batch_size": 1, "dtype": "fp32"}
    return BlockRow(**numbers | {"mechanism": mechanism, "tokens": tokens})


def with_gallery(name, make_run, folder, monkeypatch):
    scaling = [block_row(kind, n) for kind in ("agent", "linear") for n in (16, 64)]
    gallery = Gallery([[(PICTURE, name)]], [(name, (1, 2, 3))])
    return report(name, make_run, folder, scaling=scaling, scaling_note=name, gallery=gallery)


def with_maps(name, make_run, folder, monkeypatch):
    weights = [[np.array([[-1.0, 1.0]], np.float32)]]
    maps = QueryMaps(name, [name], [(PICTURE, name)], [(0.5, 0.5)], (1, 2), weights)
    return report(name, make_run, folder, maps=[maps])


def with_known_results(name, make_run, folder, monkeypatch):
    """Of a task with a test set, whose guesses are called by names of the data."""
    task = next(task for task in TASKS.values() if "benchmark" in task.commands)
    monkeypatch.setattr(task, "guesses", classmethod(lambda cls, facts: {name: 50.0}))
    monkeypatch.setattr(task, "published", classmethod(lambda cls, facts: []))
    monkeypatch.setattr(task, "network_name", classmethod(lambda cls, recipe: recipe["model"]))
    monkeypatch.setattr(RunFolder, "tested", lambda self, metric: 60.0)
    return report(name, make_run, folder, task=task.name)


def analysis(name, make_run, folder, monkeypatch):
    rows = [MeasureRow(name, layer, "blocks", name, "entropy", 0, 0.5, 0.4, 0.6, 0.7) for layer in (1, 2)]
    looks = [[Looking(1, name, (1, 2), (1, 2), np.zeros((3, 2), np.int8), 0.5)]]
    findings = Findings({name: rows}, {name: {"none": [1.0], "local 9": [0.0]}}, {name: {"confused": [1.0, 2.0]}})
    findings.looks[name], findings.pictures[:] = looks, [PICTURE]
    write_analysis(folder / "analysis.html", findings, command=f"subquad {name}", note=name)
    return (folder / "analysis.html").read_text()


def images(name, make_run, folder, monkeypatch):
    PICTURE.save(folder / "a.png")
    rows = [ImageRow(name, 0, f"{name} {k}", "a.png", 1.0) for k in range(2)]
    methods = [MethodRow(row.method, 1.0, None, None, None, None) for row in rows]
    write_images_page(folder / "images.html", rows, methods, command=f"subquad {name}", note=name)
    return (folder / "images.html").read_text()


def conversion(name, make_run, folder, monkeypatch):
    steps = dict.fromkeys(["swapped", name], Comparison(4, 0.9, 0.1, 0.5, 0.25, 0.5))
    curves = {f"{name} {k}": [[0, 0.5], [1, 0.4]] for k in range(5)}
    record = Record(
        {"source": name, "attention": name, "images": name, "batch_size": 4, "align_updates": 2, "keep": 1},
        {"grid": [2, 2, 1], "paths": {"0": name}, "num_blocks": 2},
        steps,
        {name: 2.0},
        blocks=[BlockDamage(k, 0.1, 0.5) for k in range(2)],
        hybrids=[HybridRow((0,)[:k], 0.1, 0.5, 3.0) for k in range(2)],
        broken=[name],
        before={0: 0.5, 1: 0.4},
        after={0: 0.1, 1: 0.2},
        history={"aligned": curves, "distilled": curves},
        costs=[CostRow(px, 2.0, 1.0, 3.0, 1.0) for px in (16, 32)],
        labelled=LabelledComparison(name, 4, 4, Readable(0.5, 0.5), {name: Readable(0.5, 0.5)}),
        command=f"subquad {name}",
        machine=name,
    )
    looks = [[Looking(0, name, (1, 2), (1, 2), np.zeros((3, 2), np.int8), 0.5)]]
    write_conversion(record, folder / "conversion.html", maps=PairedMaps([PICTURE], {"teacher": looks}, name))
    return (folder / "conversion.html").read_text()


@pytest.mark.parametrize("page", [with_gallery, with_maps, with_known_results, analysis, images, conversion])
def test_names_are_text_on_every_kind_of_page(page, make_run, tmp_path, monkeypatch):
    plain, hostile = Skeleton(), Skeleton()
    plain.feed(page(PLAIN, make_run, tmp_path, monkeypatch))
    hostile.feed(page(HOSTILE, make_run, tmp_path, monkeypatch))
    assert hostile.tags == plain.tags
    # charts cut long names short
    assert sum(HOSTILE in word for word in hostile.words) > 3 < sum(PLAIN in word for word in plain.words)


@pytest.mark.parametrize("name", [HOSTILE, "_hidden", "$x^{2$ $", "softmax"])
def test_names_are_text_in_pictures_that_stand_alone(name, tmp_path):
    """Also what matplotlib takes for formulas, and what it leaves out of legends."""
    bench_picture([block_row(name, n) for n in (16, 64)], tmp_path / "a.svg")
    elements = list(ElementTree.parse(tmp_path / "a.svg").iter())
    assert name in ["".join(element.itertext()) for element in elements if element.tag.endswith("text")]
    assert not [element.tag for element in elements if element.tag.endswith(("script", "img"))]
