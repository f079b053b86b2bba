"""The page of `subquad analyze`: every measure over the layers, what was counted over a data set, maps to click."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from subquad.analysis import ALL_MEASURES, Counts, Findings, MeasureRow, Removal, confusion_words, removal_shares
from subquad.pages.charts import Axis, Series, line_chart
from subquad.pages.colours import NEUTRAL, classes_of
from subquad.pages.page_parts import NOTHING, charts, footer, header, render, section, write_page
from subquad.pages.viewer import attention_viewer

_REMOVED = (
    "Top-1 accuracy when every query loses the keys around it, or as many at random elsewhere; without retraining. "
    "Windows are cut at borders, and where more than half of the keys are near, no more than the others can go. "
    "InLine's paper finds that the near ones are missed far more, by softmax more than by itself."
)
_CONFUSED = (
    "Pairs of queries of an image that differ and yet have the same weights, over all heads and layers. "
    "InLine's paper counts more than 25 in images of linear attention and hardly any of softmax."
)


def write_analysis(path: Path, findings: Findings, *, command: str = "", note: str = "") -> None:
    """Write the page to `path`.

    Args:
        path: the HTML file.
        findings: what is shown.
        command: that made it.
        note: on what it was measured.
    """
    names = findings.names
    title = f"What {', '.join(names)} attend{'s' if len(names) == 1 else ''} to"
    mechanisms = {name: dict.fromkeys(row.mechanism for row in findings.rows.get(name, [])) for name in names}
    colours = classes_of({name: "+".join(of_layers) or name for name, of_layers in mechanisms.items()})
    parts = [
        attention_viewer(findings.pictures, findings.looks),
        *(_measure(measure, findings.rows, colours) for measure in ALL_MEASURES),
        _removed(findings.hits, colours),
        _confused(findings.confusions, colours),
    ]
    write_page(path, title, [header("subquad analyze", title, note), *parts, footer([command])])


def _chart(series: Sequence[Series], x: Axis, y: Axis) -> Markup:
    return charts(line_chart(series, x, y, width=680, height=320))


def _measure(measure: str, rows: Mapping[str, Sequence[MeasureRow]], colours: Mapping[str, str]) -> Markup:
    series: list[Series] = []
    baselines: dict[int, float] = {}
    for name, network_rows in rows.items():
        # a network whose weights have run away is shown as far as there are numbers
        own = [row for row in network_rows if row.measure == measure and not row.head and math.isfinite(row.mean)]
        if not own:
            continue
        points = [(row.layer, row.mean) for row in own]
        tips = [
            f"{name}, layer {row.layer} ({row.mechanism}): {row.mean:.3f}, 90 % of the maps from {row.low:.3f} to "
            f"{row.high:.3f}"
            for row in own
        ]
        series.append(Series(name, colours[name], points, tips))
        baselines |= {row.layer: row.baseline for row in own if row.baseline is not None}
    if not series:
        return NOTHING
    if baselines:
        points = sorted(baselines.items())
        tips = [f"everywhere alike, or by chance: {value:.3f}" for _, value in points]
        series.append(Series("baseline", NEUTRAL, points, tips))
    what = ALL_MEASURES[measure]
    return section(measure.capitalize(), what.says, _chart(series, Axis("layer", whole=True), Axis(what.unit)))


def _removed(hits: Mapping[str, Counts], colours: Mapping[str, str]) -> Markup:
    series = []
    for name, counts in hits.items():
        shares = removal_shares(counts)
        for kind in ("local", "random"):
            points = [(0.0, shares["none"])]
            points += [
                (float(part.window**2), shares[str(part)])
                for part in (Removal(kind, window) for window in (3, 5, 7))
                if str(part) in shares
            ]
            tips = [f"{name}, {count:.0f} {kind} keys removed: top-1 {share:.2f} %" for count, share in points]
            series.append(Series(f"{name} {kind}", colours[name], points, tips))
    if not series:
        return NOTHING
    return section("Removed keys", _REMOVED, _chart(series, Axis("keys removed"), Axis("top-1 %")))


def _confused(confusions: Mapping[str, Counts], colours: Mapping[str, str]) -> Markup:
    series, words = [], []
    for name, counts in confusions.items():
        values = sorted(counts["confused"])
        points = []
        for share in range(0, 101, 5):
            value = values[min(len(values) - 1, math.floor(share / 100 * len(values)))]
            # a logarithmic axis has no 0
            points.append((float(share), value + 1))
        tips = [f"{name}: {share:.0f} % of the images have at most {value - 1:.0f}" for share, value in points]
        series.append(Series(name, colours[name], points, tips))
        words.append((f"{name}:", confusion_words(counts)))
    if not series:
        return NOTHING
    chart = _chart(series, Axis("share of images, %"), Axis("confused pairs + 1", log=True))
    return section("Confused queries", _CONFUSED, render("list.html", heading="", items=words) + chart)
