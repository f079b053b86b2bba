"""The page of `subquad convert`: the plan, what each step left of the teacher, blocks, fits, time, and maps of both."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from subquad.conversion.conversion_record import UNTRAINED, Record
from subquad.conversion.hybrids import HybridRow
from subquad.conversion.judging import Comparison
from subquad.conversion.measured_costs import CostRow
from subquad.conversion.paired_maps import PairedMaps
from subquad.models import names_in
from subquad.pages.charts import Axis, Series, bar_chart, line_chart
from subquad.pages.colours import NEUTRAL, classes_of
from subquad.pages.page_parts import NOTHING, Cell, charts, footer, header, render, section, sortable_table, write_page
from subquad.pages.viewer import attention_viewer
from subquad.text import clock

Colours = Mapping[str, str]

_STEPS = (
    "All steps are judged on the same images. Kept is the student’s score as a share of the teacher’s, agreement the "
    "share of images with the same most likely class; the error is ‖y − t‖² / ‖t‖² of the last features. Time is that "
    "of the step’s fit."
)
_UNTRAINED = (
    " Rows called untrained are other networks that nobody has trained: the teacher’s softmax through a few landmarks "
    "(Nyströmformer), and agents as they are swapped in. Against them a student shows what its fits were worth."
)
_ON_HELD_OUT = {
    True: "Judged on held-out images of the network’s own data. ",
    False: "Judged on other parts of the very images that the student was fitted to: the figures "
    "say how well it was fitted, not how it does on others. ",
    None: "",
}
_BLOCKS = (
    "‖y − t‖² / ‖t‖² of each converted layer’s answer to the teacher’s own tokens, on a logarithmic axis: before "
    "and after alignment, on the same images, which were not trained on."
)
_DAMAGE = "The error of the last features when this block alone is converted: aligned, not yet distilled."
_CURVE = (
    "Blocks are converted one after another, those that cost least alone first. Aligned, not yet distilled: "
    "distillation wins back a part."
)
_FITS = "What each fit lowers, on logarithmic axes; one batch of images a point."
_COSTS = "A forward pass over one image, medians of passes in turns; memory is what a pass holds beyond the weights."
_LABELS = (
    "How many held-out images are told right by the features of the teacher, and of the student behind each step: by "
    "the 20 nearest training images, by a linear probe of least squares, and by the network’s own head where these are "
    "its classes. Agreement is the share that its head and the teacher’s tell alike."
)
_MAPS = (
    "Click a place of the image, or move with the arrow keys: the mean over heads of the weights that the place gives "
    "to all others, in the teacher’s blocks and in the same blocks of the student, each map from nothing to its own "
    "largest weight, blue where weights are negative. Local branches are not in it. Blocks are counted from 0."
)


def write_conversion(record: Record, path: Path, *, maps: PairedMaps | None = None) -> None:
    """Write the page about a conversion to `path`.

    Args:
        record: what is shown.
        path: the HTML file.
        maps: what places of images see in both networks.
    """
    colours = classes_of({"teacher": "softmax", "student": str(record.plan["attention"])})
    names = names_in(str(record.plan["attention"]))
    title = f"{', '.join(names)} attention in {_short(str(record.plan['source']))}"
    parts = [
        header("subquad convert", title, _facts(record), lead=_plan(record), cards=_cards(record)),
        _steps(record),
        _costs(record.costs, colours),
        _labels(record, colours),
        _curve(record, colours),
        _damages(record, colours),
        _blocks(record, colours),
        _fits(record, colours),
        _maps(maps),
        _broken(record.broken),
        footer([record.command]),
    ]
    write_page(path, title, parts)


def _short(source: str) -> str:
    """The last part of where a network is from, without its weights."""
    return Path(source.partition("=")[0]).name or source


def _facts(record: Record) -> str:
    height, width, prefix = record.conversion["grid"]
    tokens = f"{height}×{width} tokens" + (f" and {prefix} before them" if prefix else "")
    last = _last(record)
    told = [str(record.plan["source"]), str(record.plan["attention"]), tokens]
    return " · ".join([*told, f"judged on {last.images} images", *([record.machine] if record.machine else [])])


def _plan(record: Record) -> str:
    """What was done, in words."""
    plan, count = record.plan, record.conversion["num_blocks"]
    numbers = ", ".join(map(str, record.converted))
    words = [f"Converted are {len(record.converted)} of {count} attention layers: {numbers}."]
    chosen = {
        "keep": "Those that cost most stayed as they were: {}.",
        "tolerance": "As many as leave the last features within a relative error of {}.",
        "speedup": "As few as make the network {} times as fast at {at} px.",
    }
    kept = ", ".join(str(row.block) for row in record.blocks if row.block not in record.converted)
    values = {**plan, "keep": kept or "none"}
    words += [
        text.format(values[name], at=plan.get("at")) for name, text in chosen.items() if plan.get(name) is not None
    ]
    fits = [
        f"{verb} in {'at most ' if plan.get('time_budget') else ''}{plan[name]} updates"
        for name, verb in (("align_updates", "aligned block by block"), ("distil_updates", "distilled as a whole"))
        if plan.get(name)
    ]
    if fits:
        words.append(
            f"The student was {' and '.join(fits)} of {plan['batch_size']} images of {plan['images']}, without labels"
            f"{', in {:g} minutes'.format(plan['time_budget']) if plan.get('time_budget') else ''}."
        )
    return " ".join(words)


def _cards(record: Record) -> list[tuple[str, str]]:
    """The numbers one asks for first."""
    last = _last(record)
    cards = []
    if last.kept is not None:
        cards.append((_percent(last.kept), f"of the teacher’s {last.measure} kept"))
    if last.agreement is not None:
        cards.append((_percent(last.agreement), "of images in the teacher’s class"))
    cards.append((f"{last.error:.3g}", "relative error of the last features"))
    if record.costs:
        row = max(record.costs, key=lambda row: row.side)
        size = str(row.px) if isinstance(row.px, int) else "×".join(map(str, row.px))
        cards.insert(1, (f"{row.gain:.2f} ×", f"as fast at {size} px"))
    return cards[:3]


def _last(record: Record) -> Comparison:
    return list(record.steps.values())[-1]


def _steps(record: Record) -> Markup:
    with_classes = any(step.agreement is not None for step in record.steps.values())
    with_labels = any(step.student_score is not None for step in record.steps.values())
    titles = [
        "step",
        *([_last(record).measure, "kept"] if with_labels else []),
        *(["agreement"] if with_classes else []),
    ]
    titles += ["error", "cosine", "time"]
    rows = []
    for name, step in record.steps.items():
        shares = [
            *([step.student_score, step.kept] if with_labels else []),
            *([step.agreement] if with_classes else []),
        ]
        seconds = record.seconds.get(name)
        cells = [Cell(name), *(Cell(_percent(share), _value(share)) for share in shares)]
        cells += [Cell(_number(step.error, ".3g")), Cell(_number(step.cosine, ".4f"))]
        rows.append([*cells, Cell("–" if seconds is None else clock(seconds), _value(seconds or 0.0))])
    teacher = _last(record).teacher_score
    beside = "" if teacher is None else f" The teacher has {_percent(teacher)}."
    untrained = _UNTRAINED if any(name.endswith(UNTRAINED) for name in record.steps) else ""
    text = _ON_HELD_OUT[record.on_held_out] + _STEPS + beside + untrained
    return section("What each step left", text, sortable_table(titles, rows))


def _blocks(record: Record, colours: Colours) -> Markup:
    series = []
    figures = (("before", NEUTRAL, record.before), ("after", colours["student"], record.after))
    for label, colour, errors in figures:
        points = [(float(number), error) for number, error in sorted(errors.items())]
        series += _line(label, colour, points, lambda x, y, label=label: f"block {x:.0f}, {label}: {y:.4g}")
    return _chart_section("Each block before and after alignment", _BLOCKS, series, Axis("block", whole=True), _ERROR)


_ERROR = Axis("relative error", log=True)


def _damages(record: Record, colours: Colours) -> Markup:
    # a network that one block's exchange breaks has no bar
    rows = [row for row in record.blocks if math.isfinite(row.damage)]
    if not rows:
        return NOTHING
    tips = [f"block {row.block}: {row.damage:.4g}{_agreeing(row.agreement)}" for row in rows]
    bars = Series("", colours["student"], [(float(row.block), row.damage) for row in rows], tips)
    return section("What each block costs", _DAMAGE, charts(bar_chart(bars, Axis("block", whole=True), Axis("error"))))


def _curve(record: Record, colours: Colours) -> Markup:
    hybrids = [row for row in record.hybrids if math.isfinite(row.damage)]
    if not hybrids:
        return NOTHING
    timed = all(row.ms is not None for row in hybrids)
    # names stand at the right end: over milliseconds that is where nothing is converted
    rows = list(reversed(hybrids)) if timed else hybrids
    x = Axis("milliseconds") if timed else Axis("converted blocks", whole=True)

    def chart(title: str, value: Callable[[HybridRow], float]) -> Markup:
        def line(label: str, colour: str, rows: Sequence[HybridRow]) -> Series:
            points = [(float(row.ms if timed and row.ms else len(row.converted)), value(row)) for row in rows]
            return Series(label, colour, points, [_hybrid(row) for row in rows], 2.6 if len(rows) > 1 else 4.5)

        own = [row for row in hybrids if row.converted == record.converted]
        lines = [line("hybrids", colours["student"], rows)]
        return line_chart([*lines, *([line("this student", NEUTRAL, own)] if own else [])], x, Axis(title))

    drawn = [chart("error of the features", lambda row: row.damage)]
    if all(row.agreement is not None for row in hybrids):
        drawn.append(chart("agreement, %", lambda row: 100 * (row.agreement or 0.0)))
    return section("From all softmax to all converted", _CURVE, charts(*drawn))


def _hybrid(row: HybridRow) -> str:
    blocks = ", ".join(map(str, row.converted)) or "none"
    ms = "" if row.ms is None else f", {row.ms:.1f} ms"
    return f"converted {blocks}: error {row.damage:.4g}{_agreeing(row.agreement)}{ms}"


def _fits(record: Record, colours: Colours) -> Markup:
    drawn = []
    for name, title in (("aligned", "alignment: error of a block"), ("distilled", "distillation: losses")):
        history = record.history.get(name) or {}
        lines = _of_blocks(history) if name == "aligned" else dict(history)
        shades = classes_of(dict.fromkeys(lines, str(record.plan["attention"])))
        series = []
        for label, points in lines.items():
            pairs = [(float(update), float(figure)) for update, figure in points]
            series += _line(label, shades[label], pairs, lambda x, y, label=label: f"update {x:.0f}, {label}: {y:.4g}")
        if series and max(len(one.points) for one in series) > 1:
            drawn.append(line_chart(series, Axis("update", whole=True), Axis(title, log=True)))
    return section("Learning curves", _FITS, charts(*drawn)) if drawn else NOTHING


def _of_blocks(history: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, list[tuple[float, float]]]:
    """The mean of all blocks' curves; and the curves of those that ended lowest and highest, where there are more."""
    curves = {name: [(point[0], point[1]) for point in points] for name, points in history.items() if points}
    if len(curves) < 4:
        return curves
    by_end = sorted(curves, key=lambda name: curves[name][-1][1])
    each = zip(*curves.values(), strict=False)
    mean = [(points[0][0], math.fsum(figure for _, figure in points) / len(points)) for points in each]
    return {"mean": mean, by_end[0]: curves[by_end[0]], by_end[-1]: curves[by_end[-1]]}


def _costs(rows: Sequence[CostRow], colours: Colours) -> Markup:
    if not rows:
        return NOTHING
    titles = ("pixels", "teacher ms", "student ms", "times as fast", "teacher MB", "student MB")
    cells = [
        [
            Cell(f"{row.size[0]}×{row.size[1]}", f"{row.side:.6g}"),
            *(Cell(f"{value:.{digits}f}") for value, digits in _figures_of(row)),
        ]
        for row in rows
    ]

    oblong = any(not isinstance(row.px, int) for row in rows)
    side = "pixels of a side, of a square as large" if oblong else "pixels of a side"

    def chart(title: str, unit: str, value: Callable[[CostRow, str], float]) -> Markup:
        series = []
        for who in ("teacher", "student"):
            points = [(row.side, value(row, who)) for row in sorted(rows, key=lambda row: row.side)]
            series += _line(who, colours[who], points, lambda x, y, who=who: f"{who}, {x:.0f} px: {y:.4g} {unit}")
        return line_chart(series, Axis(side, log=True), Axis(title, log=True))

    drawn = NOTHING
    if len(rows) > 1:
        drawn = charts(
            chart("milliseconds", "ms", lambda row, who: row.teacher_ms if who == "teacher" else row.student_ms),
            chart("memory, MB", "MB", lambda row, who: row.teacher_mb if who == "teacher" else row.student_mb),
        )
    return section("Time and memory", _COSTS, sortable_table(titles, cells) + drawn)


def _figures_of(row: CostRow) -> list[tuple[float, int]]:
    times = [(row.teacher_ms, 1), (row.student_ms, 1), (row.gain, 2)]
    return [*times, (row.teacher_mb, 1), (row.student_mb, 1)]


def _labels(record: Record, colours: Colours) -> Markup:
    told = record.labelled
    if told is None:
        return NOTHING
    lead = f"{_LABELS} {told.data}: {told.train} images for training, {told.test} held out."
    rows = [("teacher", told.teacher, colours["teacher"])]
    rows += [(name, own, colours["student"]) for name, own in told.steps.items()]
    columns = {
        "agreement": lambda own: own.agreement,
        "neighbours": lambda own: own.neighbours,
        "linear probe": lambda own: own.probe,
        "own head": lambda own: own.head,
    }
    shown = {title: share for title, share in columns.items() if any(share(own) is not None for _, own, _ in rows)}
    cells = [
        [Cell(name, swatch=swatch), *(Cell(_percent(share(own)), _value(share(own))) for share in shown.values())]
        for name, own, swatch in rows
    ]
    return section("What the features tell", lead, sortable_table(("features of", *shown), cells))


def _maps(maps: PairedMaps | None) -> Markup:
    if maps is None:
        return NOTHING
    viewer = attention_viewer(maps.pictures, maps.looks, title=_MAPS_TITLE, lead=f"{_MAPS} {maps.without}".strip())
    return viewer or section(_MAPS_TITLE, maps.without or "No converted block attends over a whole map.")


_MAPS_TITLE = "Where places look, before and after"


def _broken(paths: Sequence[str]) -> Markup:
    if not paths:
        return NOTHING
    shown = [(path, "") for path in paths[:50]]
    more = "" if len(paths) <= len(shown) else f" The first {len(shown)}:"
    lead = f"{len(paths)} image{'s' if len(paths) > 1 else ''} could not be read, and were left out.{more}"
    return section("Broken images", lead, render("list.html", heading="", items=shown))


def _line(label: str, colour: str, points: Sequence[tuple[float, float]], tip: Any) -> list[Series]:
    """A line of what a logarithmic axis can show, if there is any of it."""
    there = [(x, y) for x, y in points if math.isfinite(y) and y > 0]
    return [Series(label, colour, there, [tip(x, y) for x, y in there])] if there else []


def _chart_section(title: str, lead: str, series: Sequence[Series], x: Axis, y: Axis) -> Markup:
    return section(title, lead, charts(line_chart(series, x, y, width=680, height=320))) if series else NOTHING


def _agreeing(share: float | None) -> str:
    return "" if share is None else f", agreement {share:.2%}"


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "–"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f} %"


def _value(number: float | None) -> str:
    return "" if number is None else f"{number:.6g}"
