"""The report: what was compared, how accurate and costly each mechanism is, how it scales and where it looks.

One HTML file with everything in it: it opens from a disk, without a network.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from html import escape
from pathlib import Path

from subquad.analysis import QueryMaps
from subquad.benchmarks import ScalingRow, crossover
from subquad.pages.attention_maps import MapTable, drawn_maps
from subquad.pages.charts import Axis, Series, line_chart, point_chart
from subquad.pages.colours import classes_of
from subquad.pages.comparisons import measure_of
from subquad.pages.gallery import gallery_section
from subquad.pages.known_results import known_results
from subquad.pages.page_parts import check_page, section, short_command, write_page
from subquad.pages.table import accuracy_table
from subquad.runs.run_records import Group
from subquad.tasks import Gallery
from subquad.text import clock, si, speed_text


def write_report(
    groups: Sequence[Group],
    path: Path,
    *,
    scaling: Sequence[ScalingRow] = (),
    scaling_note: str = "",
    gallery: Gallery | None = None,
    maps: Sequence[QueryMaps] = (),
) -> None:
    """Write the page about `groups` of runs to `path`, whole or not at all; `subquad.report` measures what it shows.

    Args:
        groups: what to show, of `group_runs`.
        path: the HTML file.
        scaling: what `subquad.benchmarks.measure_scaling` found; its section is left out without it.
        scaling_note: on what that was measured.
        gallery: what the networks make of held-out images.
        maps: what they attend to, where there is no gallery.
    """
    check_page(path)
    colours = classes_of({group.label: group.first.attention for group in groups})
    sections = [
        _header(groups),
        _accuracy(groups, colours),
        _curves(groups, colours),
        _scaling(scaling, scaling_note, groups, colours),
        known_results(groups) or (gallery_section(gallery) if gallery else _maps([*map(drawn_maps, maps)])),
        _provenance(groups),
    ]
    write_page(path, _title(groups), sections)


def _title(groups: Sequence[Group]) -> str:
    data = sorted({str(group.first.recipe["data"]) for group in groups})
    what = f"{len(groups)} attention mechanisms" if len(groups) > 1 else f"{groups[0].label} attention"
    return f"{what} on {', '.join(Path(name).name for name in data)}"


def _header(groups: Sequence[Group]) -> str:
    """What was compared, and the three numbers one asks for first."""
    first = groups[0].first
    recipe, facts = first.recipe, first.facts
    seeds = max(len(group.runs) for group in groups)
    models = sorted({group.first.network for group in groups})
    made = datetime.fromisoformat(facts["created"])
    told = [
        f"{', '.join(models)}",
        f"{len(first.rows)} epochs",
        f"batch {recipe['batch_size']}",
        f"{seeds} seed{'s' if seeds > 1 else ''} each",
        f"{facts['device']}, {facts['threads']} thread{'s' if facts['threads'] > 1 else ''}",
        f"torch {facts['versions']['torch']}",
        f"{made.day} {made:%B %Y}",
    ]
    cards = ""
    if len(groups) > 1:
        measure = measure_of(groups)
        best = max(groups, key=lambda group: group.mean(measure.main))
        fast = max(groups, key=lambda group: group.cost("images_per_second"))
        lean = min(groups, key=lambda group: group.first.facts["macs"])
        cards = "".join(
            f'<div class="card"><b>{escape(number)}</b><span>{escape(what)}</span></div>'
            for number, what in (
                (f"{best.mean(measure.main):.1f} %", f"highest {measure.short}: {best.label}"),
                (f"{speed_text(fast.cost('images_per_second'))} images/s", f"fastest in training: {fast.label}"),
                (f"{si(lean.first.facts['macs'])} MACs", f"fewest for an image: {lean.label}"),
            )
        )
    return (
        f'<header><p class="kicker">subquad report</p><h1>{escape(_title(groups))}</h1>'
        f'<p class="lead">The same host, data and recipe; only the attention differs.</p>'
        f'<p class="facts">{" · ".join(map(escape, told))}</p><div class="cards">{cards}</div></header>'
    )


def _accuracy(groups: Sequence[Group], colours: dict[str, str]) -> str:
    measure = measure_of(groups)
    clouds = [
        Series(
            group.label,
            colours[group.label],
            [(group.cost("images_per_second"), group.mean(measure.main))],
            [
                f"{group.label}: {group.mean(measure.main):.2f} % at "
                f"{speed_text(group.cost('images_per_second'))} images/s"
            ],
        )
        for group in groups
    ]
    chart = point_chart(clouds, Axis("training images/s"), Axis(measure.title), width=600, height=320)
    picture = f'<figure class="wide">{chart}<figcaption>Up is more accurate, right is faster.</figcaption></figure>'
    return section(
        "Accuracy and cost",
        "The best epoch’s accuracy on images that were not trained on. MACs are multiply-adds of one image; time is "
        "training and evaluation. Click a header to sort; the best value of a column is bold.",
        accuracy_table(groups, colours) + (picture if len(groups) > 1 else ""),
    )


def _curves(groups: Sequence[Group], colours: dict[str, str]) -> str:
    def chart(metric: str, title: str, unit: str) -> str:
        series = []
        for group in groups:
            points = group.curve(metric)
            tips = [f"{group.label}, epoch {epoch:.0f}: {value:.3f}{unit}" for epoch, value in points]
            series.append(Series(group.label, colours[group.label], points, tips))
        return f"<figure>{line_chart(series, Axis('epoch', whole=True), Axis(title))}</figure>"

    if min(len(group.curve("train_loss")) for group in groups) < 2:
        return ""
    measure = measure_of(groups)
    both = chart(measure.main, measure.title, " %") + chart("train_loss", "training loss", "")
    return section(
        "Learning curves",
        "By epoch, the mean over the seeds; the training loss has the augmentation and smoothing of its recipe.",
        f'{_legend(groups, colours)}<div class="pair">{both}</div>',
    )


def _legend(groups: Sequence[Group], colours: dict[str, str]) -> str:
    """Buttons that show and hide a mechanism in all charts."""
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-series="{colours[group.label]}">'
        f'<span class="swatch {colours[group.label]}"></span>{escape(group.label)}</button>'
        for group in groups
    )
    return f'<div class="legend" aria-label="show or hide a mechanism">{buttons}</div>'


def _scaling(rows: Sequence[ScalingRow], note: str, groups: Sequence[Group], colours: dict[str, str]) -> str:
    if not rows:
        return section("Against sequence length", "Latency and memory against sequence length were not measured.", "")
    # a mechanism has the colour of its first group
    known = {group.first.attention.split(":")[0]: colours[group.label] for group in reversed(groups)}
    names = [name for name in dict.fromkeys(row.mechanism for row in rows) if name in known]

    def chart(title: str, unit: str, value: Callable[[ScalingRow], float]) -> str:
        series = []
        for name in names:
            own = [row for row in rows if row.mechanism == name]
            tips = [f"{name}, {row.num_tokens} tokens: {value(row):.3g} {unit}" for row in own]
            series.append(Series(name, known[name], [(row.num_tokens, value(row)) for row in own], tips))
        return f"<figure>{line_chart(series, Axis('tokens', log=True), Axis(title, log=True))}</figure>"

    both = chart("milliseconds", "ms", lambda row: row.median_ms) + chart(
        "peak memory, MB", "MB", lambda row: row.peak_mb
    )
    return section(
        "Against sequence length",
        f"One attention layer with its projections, forward, on logarithmic axes. {note}",
        f'<div class="pair">{both}</div>{_crossings(rows, names)}',
    )


def _crossings(rows: Sequence[ScalingRow], names: Sequence[str]) -> str:
    """From which length on each mechanism is faster than softmax."""
    if "softmax" not in names:
        return ""
    shortest = min(row.num_tokens for row in rows)
    longest = max(row.num_tokens for row in rows)
    items = []
    for name, length in crossover([row for row in rows if row.mechanism in names]).items():
        text = (
            f"not up to {longest:,} tokens" if length is None else f"from about {float(f'{length:.2g}'):,.0f} tokens on"
        )
        text = f"at every length from {shortest} on" if length == shortest else text
        items.append(f"<li><b>{escape(name)}</b> {text}</li>")
    return f'<div class="crossings"><h3>Faster than softmax</h3><ul>{"".join(items)}</ul></div>'


def _maps(tables: Sequence[MapTable]) -> str:
    if not tables:
        return section("Attention maps", "No run has kept weights whose attention could be shown.", "")
    blocks = []
    for table in tables:
        head = "".join(
            f'<th scope="col">{escape(label)}{"<i>±</i>" if signed else ""}</th>'
            for label, signed in zip(table.labels, table.signed, strict=True)
        )
        rows = []
        for (image, name), cells in zip(table.images, table.maps, strict=True):
            pictures = "".join(
                f'<td><img src="{cell}" alt="attention of {escape(label, quote=True)}"></td>'
                for cell, label in zip(cells, table.labels, strict=True)
            )
            shown = f'<img src="{image}" alt="image of class {escape(name, quote=True)}">'
            rows.append(f'<tr><th scope="row">{shown}<span>{escape(name)}</span></th>{pictures}</tr>')
        blocks.append(
            f"<h3>{escape(table.layer)}</h3>"
            f'<div class="scroll"><table class="maps"><thead><tr><th scope="col">query</th>{head}</tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table></div>"
        )
    keys = '<span class="ramp sequential"></span>0 to the largest'
    if any(any(table.signed) for table in tables):
        keys += ' &nbsp; <span class="ramp diverging"></span>± : minus the largest, 0, plus the largest'
    return section(
        "What they attend to",
        "How much the framed patch takes from every patch of its image: the explicit weights of its query, averaged "
        "over the heads. Each picture has its own scale; the local branches are not part of the weights.",
        f'<p class="key">{keys}</p>{"".join(blocks)}',
    )


def _provenance(groups: Sequence[Group]) -> str:
    """The commands and versions behind the page."""
    commands = dict.fromkeys(str(run.facts["command"]) for group in groups for run in group.runs)
    versions = ", ".join(f"{name} {number}" for name, number in groups[0].first.facts["versions"].items())
    total = sum(group.seconds * len(group.runs) for group in groups)
    lines = "\n".join(escape(short_command(command)) for command in commands)
    return (
        f"<footer><h2>How it was made</h2><pre>{lines}</pre>"
        f"<p>{escape(versions)}; {clock(total)} of training in all. Accuracy is {measure_of(groups).words}, of "
        "the best epoch. On a CPU, peak memory is that of the whole process, libraries included.</p></footer>"
    )
