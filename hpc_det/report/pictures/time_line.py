"""Time lines: a row for each trial, from its job's submission to its end, and a bar of the sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from hpc_det.errors import count
from hpc_det.report.pictures import svg
from hpc_det.report.pictures.svg import Scale
from hpc_det.view.formatting import duration, percent

WIDTH, LEFT, RIGHT, TOP = 1000, 62, 14, 24
FINEST = 1.5
"""Width in pixels below which neighbouring spans are combined: each phase keeps its share of their width."""
CUTS = ("preempted", "time limit", "failed", "node lost", "hung", "disk full", "unhealthy node", "scheduler away")
"""Causes of interrupted attempts, whose ends are marked in the time line."""
Trial = Mapping[str, Any]
_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def time_line(trials: Sequence[Trial]) -> Markup:
    """Return the time line of trials, of which at least one has a span."""
    begins = [span["begin"] for trial in trials for span in trial["spans"]]
    ends = [span["end"] for trial in trials for span in trial["spans"]]
    first, last = min(begins), max(ends)
    size, unit = next((known for known in _UNITS if last - first >= 2 * known[0]), _UNITS[-1])
    row = _row_height(len(trials))
    height = TOP + row * len(trials) + 6
    x = Scale.of([0.0, (last - first) / size], LEFT, WIDTH - RIGHT, may_be_log=False)
    parts = [*_axis(x, unit, height)]
    for index, trial in enumerate(trials):
        parts.append(_row(trial, TOP + (index + 0.5) * row, row, lambda at: x.at((at - first) / size)))
    said = f"Time line of {count(len(trials), 'trial')} over {duration(last - first)}"
    return svg.picture(WIDTH, height, said, parts, "picture wide rows")


def _row_height(trials: int) -> float:
    return 18.0 if trials <= 40 else 9.0 if trials <= 200 else 4.0


def _axis(x: Scale, unit: str, height: float) -> Iterator[Markup]:
    for tick in x.ticks(10):
        yield svg.line(x.at(tick), TOP - 4, x.at(tick), height, "grid")
        yield svg.text(x.at(tick), TOP - 10, f"{tick:g}", anchor="middle")
    yield svg.text(0, TOP - 10, unit, "label")


def _row(trial: Trial, y: float, row: float, at: Any) -> Markup:
    thickness = row - (4.0 if row > 12 else 1.0)
    drawn: dict[str, str] = {}
    for phase, begin, end in columns([(span["phase"], at(span["begin"]), at(span["end"])) for span in trial["spans"]]):
        drawn[phase] = drawn.get(phase, "") + f"M{svg.place(begin, y)}h{end - begin:.2f}"
    label = [svg.text(LEFT - 8, y + 4, str(trial["id"]), anchor="end")] if row > 8 else []
    spans = (svg.element("path", class_=f"stroke p-{phase}", d=d, stroke_width=thickness) for phase, d in drawn.items())
    tip = svg.element("title", in_words(trial))
    return svg.of_line(trial["id"], tip, *label, *spans, *_cuts(trial, y, thickness, at))


def in_words(trial: Trial) -> str:
    """Return the goodput of the trial and the time in each phase as text."""
    spent = ", ".join(f"{phase} {duration(seconds)}" for phase, seconds in trial["seconds"].items())
    return f"trial {trial['id']}, goodput {percent(trial['goodput'])}: {spent}"


def _cuts(trial: Trial, y: float, thickness: float, at: Any) -> Iterator[Markup]:
    """Yield a mark at each attempt that was interrupted."""
    for attempt in trial["attempts"]:
        if attempt["cause"] in CUTS and attempt["ended"]:
            x, half = at(attempt["ended"]), thickness / 2 + 1.5
            tip = svg.element("title", f"trial {trial['id']}, attempt {attempt['number']}: {attempt['cause']}")
            yield svg.element("path", tip, class_="cut", d=f"M{svg.place(x, y - half)}v{2 * half:g}")


def columns(spans: Sequence[tuple[str, float, float]]) -> Iterator[tuple[str, float, float]]:
    """Yield the spans, given as phase, begin and end in pixels. Those too short to see are combined by `_shared`."""
    short: list[tuple[str, float, float]] = []
    for span in spans:
        _, begin, end = span
        touches = bool(short) and begin - short[-1][2] < 1e-6
        if short and (not touches or end - begin >= FINEST or begin - short[0][1] >= FINEST):
            yield from _shared(short)
            short = []
        if end - begin >= FINEST:
            yield span
        else:
            short.append(span)
    yield from _shared(short)


def _shared(short: Sequence[tuple[str, float, float]]) -> Iterator[tuple[str, float, float]]:
    """Yield one span for each phase in the place of these neighbouring spans, with the sum of their widths."""
    widths: dict[str, float] = {}
    for phase, begin, end in short:
        widths[phase] = widths.get(phase, 0.0) + end - begin
    at = short[0][1] if short else 0.0
    for phase, width in widths.items():
        yield phase, at, at + width
        at += width


def time_bar(whose: str, seconds: Mapping[str, float]) -> Markup:
    """Return a bar that is divided in proportion to the seconds of each phase or part."""
    total, x = sum(seconds.values()) or 1.0, 0.0
    parts = []
    for phase, amount in seconds.items():
        width = amount / total * WIDTH
        tip = svg.element("title", f"{phase}: {duration(amount)}, {percent(amount / total)}")
        parts.append(svg.element("rect", tip, x=x, y=0.0, width=width, height=22.0, class_=f"fill p-{phase}"))
        x += width
    said = "; ".join(f"{phase} {percent(amount / total)}" for phase, amount in seconds.items())
    return svg.picture(WIDTH, 22, f"Time of {whose}: {said}", parts, "picture wide")
