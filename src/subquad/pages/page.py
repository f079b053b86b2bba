"""The report: what was compared, how accurate and costly each mechanism is, how it scales and where it looks.

One HTML file with everything in it: it opens from a disk, without a network.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from markupsafe import Markup

from subquad.analysis import QueryMaps
from subquad.benchmarks import BlockRow, faster_than_softmax
from subquad.models import names_in
from subquad.pages.attention_maps import MapTable, drawn_maps
from subquad.pages.charts import Axis, Series, line_chart, point_chart
from subquad.pages.colours import classes_of
from subquad.pages.comparisons import measure_of
from subquad.pages.gallery import gallery_section
from subquad.pages.known_results import known_results
from subquad.pages.page_parts import NOTHING, charts, check_page, footer, header, render, section, write_page
from subquad.pages.table import accuracy_table
from subquad.runs.run_records import Group, differing_fields
from subquad.tasks import Gallery
from subquad.text import clock, counted, si, speed_text


def write_report(
    groups: Sequence[Group],
    path: Path,
    *,
    scaling: Sequence[BlockRow] = (),
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


def _header(groups: Sequence[Group]) -> Markup:
    """What was compared, and the three numbers one asks for first."""
    first = groups[0].first
    recipe, facts = first.recipe, first.facts
    fewest, most = min(len(group.runs) for group in groups), max(len(group.runs) for group in groups)
    models = sorted({group.first.network for group in groups})
    made = datetime.fromisoformat(facts["created"])
    told = [
        f"{', '.join(models)}",
        counted(len(first.rows), "epoch"),
        f"batch {recipe['batch_size']}",
        f"{most if fewest == most else f'{fewest} to {most}'} seed{'s' if most > 1 else ''} each",
        f"{facts['device']}, {facts['threads']} thread{'s' if facts['threads'] > 1 else ''}",
        f"torch {facts['versions']['torch']}",
        f"{made.day} {made:%B %Y}",
    ]
    return header(
        "subquad report",
        _title(groups),
        " · ".join(told),
        lead=_lead(groups),
        cards=_cards(groups) if len(groups) > 1 else (),
    )


def _lead(groups: Sequence[Group]) -> str:
    """What is the same in all runs, and what is not."""
    differing, most = differing_fields(groups), 5
    lead = "The same host, data and recipe; only the attention differs."
    if differing:
        more = ", …" if len(differing) > most else ""
        lead = f"The recipes differ in more than the attention: {', '.join(differing[:most])}{more}."
    unfinished = [f"{run.path.name} ({run.unfinished})" for group in groups for run in group.runs if run.unfinished]
    return f"{lead} Not finished yet: {', '.join(unfinished)}." if unfinished else lead


def _cards(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Which mechanism is most accurate, fastest and leanest."""
    measure = measure_of(groups)
    best = max(groups, key=lambda group: group.mean(measure.main))
    fast = max(groups, key=lambda group: group.cost("images_per_second"))
    lean = min(groups, key=lambda group: group.first.facts["macs"])
    return [
        (f"{best.mean(measure.main):.1f} %", f"highest {measure.short}: {best.label}"),
        (f"{speed_text(fast.cost('images_per_second'))} images/s", f"fastest in training: {fast.label}"),
        (f"{si(lean.first.facts['macs'])} MACs", f"fewest for an image: {lean.label}"),
    ]


def _accuracy(groups: Sequence[Group], colours: dict[str, str]) -> Markup:
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
    picture = charts(chart, caption="Up is more accurate, right is faster.") if len(groups) > 1 else NOTHING
    return section(
        "Accuracy and cost",
        "The best epoch’s accuracy on images that were not trained on. MACs are multiply-adds of one image; time is "
        "training and evaluation. Click a header to sort; the best value of a column is bold.",
        accuracy_table(groups, colours) + picture,
    )


def _curves(groups: Sequence[Group], colours: dict[str, str]) -> Markup:
    def chart(metric: str, title: str, unit: str) -> Markup:
        series = []
        for group in groups:
            points = group.curve(metric)
            tips = [f"{group.label}, epoch {epoch:.0f}: {value:.3f}{unit}" for epoch, value in points]
            series.append(Series(group.label, colours[group.label], points, tips))
        return line_chart(series, Axis("epoch", whole=True), Axis(title))

    if min(len(group.curve("train_loss")) for group in groups) < 2:
        return NOTHING
    measure = measure_of(groups)
    both = charts(chart(measure.main, measure.title, " %"), chart("train_loss", "training loss", ""))
    buttons = render("series_buttons.html", colours=[(group.label, colours[group.label]) for group in groups])
    return section(
        "Learning curves",
        "By epoch, the mean over the seeds; the training loss has the augmentation and smoothing of its recipe.",
        buttons + both,
    )


def _scaling(rows: Sequence[BlockRow], note: str, groups: Sequence[Group], colours: dict[str, str]) -> Markup:
    if not rows:
        return section("Against sequence length", "Latency and memory against sequence length were not measured.")
    # a mechanism has the colour of its first group
    known = {name: colours[group.label] for group in reversed(groups) for name in names_in(group.first.attention)[:1]}
    names = [name for name in dict.fromkeys(row.mechanism for row in rows) if name in known]

    def chart(title: str, unit: str, value: Callable[[BlockRow], float]) -> Markup:
        series = []
        for name in names:
            own = [row for row in rows if row.mechanism == name]
            tips = [f"{name}, {row.tokens} tokens: {value(row):.3g} {unit}" for row in own]
            series.append(Series(name, known[name], [(row.tokens, value(row)) for row in own], tips))
        return line_chart(series, Axis("tokens", log=True), Axis(title, log=True))

    both = charts(
        chart("milliseconds", "ms", lambda row: float(row.block_ms or 0)),
        chart("peak memory, MB", "MB", lambda row: row.peak_mb),
    )
    return section(
        "Against sequence length",
        f"One attention layer with its projections, forward, on logarithmic axes. {note}",
        both + _crossings(rows, names),
    )


def _crossings(rows: Sequence[BlockRow], names: Sequence[str]) -> Markup:
    """From which length on each mechanism is faster than softmax."""
    if "softmax" not in names:
        return NOTHING
    shortest = min(row.tokens for row in rows)
    longest = max(row.tokens for row in rows)
    items = []
    for (name, *_), length in faster_than_softmax([row for row in rows if row.mechanism in names]).items():
        text = (
            f"not up to {longest:,} tokens" if length is None else f"from about {float(f'{length:.2g}'):,.0f} tokens on"
        )
        text = f"at every length from {shortest} on" if length == shortest else text
        items.append((name, text))
    return render("list.html", heading="Faster than softmax", items=items)


def _maps(tables: Sequence[MapTable]) -> Markup:
    if not tables:
        return section("Attention maps", "No run has kept weights whose attention could be shown.")
    return section(
        "What they attend to",
        "How much the framed patch takes from every patch of its image: the explicit weights of its query, averaged "
        "over the heads. Each picture has its own scale; the local branches are not part of the weights.",
        render("maps.html", tables=tables, signed=any(any(table.signed) for table in tables)),
    )


def _provenance(groups: Sequence[Group]) -> Markup:
    """The commands and versions behind the page."""
    commands = dict.fromkeys(str(run.facts["command"]) for group in groups for run in group.runs)
    versions = ", ".join(f"{name} {number}" for name, number in groups[0].first.facts["versions"].items())
    total = sum(group.seconds * len(group.runs) for group in groups)
    note = (
        f"{versions}; {clock(total)} of training in all. Accuracy is {measure_of(groups).words}, of the best epoch. "
        "On a CPU, peak memory is that of the whole process, libraries included."
    )
    return footer(list(commands), note)
