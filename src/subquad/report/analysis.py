"""The page of `subquad analyze`: every measure over the layers, one line a network."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from subquad.analysis import ALL_MEASURES, MeasureRow
from subquad.report.charts import Axis, Series, line_chart
from subquad.report.parts import section, short_command, write_page

_COLOURS = 9


def write_analysis(path: Path, rows: Mapping[str, Sequence[MeasureRow]], *, command: str = "", note: str = "") -> None:
    """Write the page to `path`.

    Args:
        path: the HTML file.
        rows: by network, what `measure_network` found.
        command: that made it.
        note: on what it was measured.
    """
    names = list(rows)
    title = f"What {', '.join(names)} attend{'s' if len(names) == 1 else ''} to"
    header = (
        f'<header><p class="kicker">subquad analyze</p><h1>{escape(title)}</h1>'
        f'<p class="facts">{escape(note)}</p></header>'
    )
    parts = [_measure(measure, rows) for measure in ALL_MEASURES]
    last = f"<footer><h2>How it was made</h2><pre>{escape(short_command(command))}</pre></footer>" if command else ""
    write_page(path, title, [header, *filter(None, parts), last])


def _measure(measure: str, rows: Mapping[str, Sequence[MeasureRow]]) -> str:
    series: list[Series] = []
    baselines: dict[int, float] = {}
    for place, (name, found) in enumerate(rows.items()):
        own = [row for row in found if row.measure == measure and not row.head]
        if not own:
            continue
        points = [(row.layer, row.mean) for row in own]
        tips = [
            f"{name}, layer {row.layer} ({row.mechanism}): {row.mean:.3f}, 90 % of the maps from {row.low:.3f} to "
            f"{row.high:.3f}"
            for row in own
        ]
        series.append(Series(name, f"c{(place + 1) % _COLOURS}", points, tips))
        baselines |= {row.layer: row.baseline for row in own if row.baseline is not None}
    if not series:
        return ""
    if baselines:
        points = sorted(baselines.items())
        tips = [f"everywhere alike, or by chance: {value:.3f}" for _, value in points]
        series.append(Series("baseline", "c0", points, tips))
    what = ALL_MEASURES[measure]
    chart = line_chart(series, Axis("layer", whole=True), Axis(what.unit), width=680, height=320)
    return section(measure.capitalize(), what.says, f'<figure class="wide">{chart}</figure>')
