"""Make the pictures of docs/images from a real run on the Slurm of tests/labs: `make pictures`, as root on Debian.

Chromium takes the picture of the report. Text in the SVG files uses the reader's own fonts, so that no picture loads
anything from another host.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from markupsafe import Markup

from hpc_det.cli.top.app import Top
from hpc_det.node.json_files import read_lines, read_map
from hpc_det.report.pictures.svg import element
from hpc_det.store.experiments import ExperimentStore
from tests.e2e.story import Story, hpc_det
from tests.e2e.test_slurm import PROFILE
from tests.labs.chromium import Chromium
from tests.labs.slurm import SlurmLab

CHECKOUT = Path(__file__).parents[2]
IMAGES = CHECKOUT / "docs" / "images"
DIGITS = CHECKOUT / "docs" / "examples" / "digits"
CONFIG = CHECKOUT / "conf" / "experiment" / "digits.yaml"
SEARCH = (
    "searcher={name: async_halving, metric: accuracy, smaller_is_better: false, max_trials: 12, num_rungs: 3, "
    "divisor: 2, max_length: {epochs: 8}}",
    "hyperparameters.learning_rate={type: log, base: 10, minval: -3, maxval: -0.5}",
    "hyperparameters.dropout={type: double, minval: 0.0, maxval: 0.6}",
    "resources.slots_per_trial=1",
    "resources.max_slots=6",
    "name=digits-search",
)
COLOURS = {"queued": "#b8bec9", "starting": "#f2c14e", "training": "#4c9f70", "saving": "#2f6db5", "ending": "#8a63a8"}
SHOWN_AS = {"validating": "training"}
"""Phases that are too short to be visible beside another."""
FONT = "font-family:Helvetica,Arial,sans-serif"


def main() -> None:
    lab = SlurmLab.start()
    with pytest.MonkeyPatch.context() as patch, lab.used_alone(), tempfile.TemporaryDirectory() as scratch:
        root = lab.folder()
        (root / "conf" / "cluster").mkdir(parents=True)
        (root / "conf" / "cluster" / "lab.yaml").write_text(PROFILE)
        patch.setenv("HPC_DET_ROOT", str(root))
        lab.use(patch)
        try:
            preempted = _preempted_run(lab)
            (IMAGES / "preemption.svg").write_text(_time_line(preempted))
            search = _begin("digits-search", *SEARCH)
            search.wait()
            waiting = [_begin("digits-wide", "resources.slots_per_trial=6", "searcher.max_length={epochs: 400}")]
            waiting += [_begin("digits-next", "resources.slots_per_trial=4")]
            waiting[0].until_batch(100)
            (IMAGES / "top.svg").write_text(asyncio.run(_screen(root)))
            for each in waiting:
                hpc_det("experiment", "kill", each.number)
            _photograph(search, Path(scratch))
        finally:
            lab.stop()
    (IMAGES / "flow.svg").write_text(_flow())


def _begin(name: str, *overrides: str) -> Story:
    return Story.begin(f"name={name}", *overrides, cluster="lab", config=CONFIG, context=DIGITS)


# --- the time line of a preemption


def _preempted_run(lab: SlurmLab) -> Story:
    """Run six ranks on three nodes, preempted for some seconds by a job of another queue."""
    story = _begin("digits", "resources.slots_per_trial=6", "searcher.max_length={epochs: 30}")
    story.until_batch(300)
    lab.preempt(3, seconds=4)
    story.wait()
    assert story.causes == ["preempted", "finished"]
    return story


class Moment(NamedTuple):
    at: float
    text: str


def _time_line(story: Story) -> str:
    (trial,) = json.loads(hpc_det("report", story.number, "--json").stdout)["trials"]
    notice = float((read_map(story.trial.stop) or {})["time"])
    first, second = trial["attempts"]
    saves = list(read_lines(story.trial.saves))
    last = [save for save in saves if first["started"] < save["began"] < first["ended"]][-1]
    trains_again = next(
        span["begin"] for span in trial["spans"] if span["phase"] == "training" and span["begin"] > second["started"]
    )
    moments = [
        Moment(notice, "Slurm's preemption signal reaches the node agents"),
        Moment(last["began"], f"all six ranks stop at batch {last['batches']} and begin to save"),
        Moment(last["began"] + last["committed_s"], "the checkpoint is committed"),
        Moment(first["ended"], "the attempt has ended, the job is requeued"),
        Moment(second["started"], "the job starts again, attempt 2 begins"),
        Moment(trains_again, f"training resumes at batch {last['batches']}"),
    ]
    spans = [
        (SHOWN_AS.get(span["phase"], span["phase"]), span["begin"] - notice, span["end"] - notice)
        for span in trial["spans"]
    ]
    return str(_drawn(spans, [Moment(moment.at - notice, moment.text) for moment in moments]))


def _drawn(spans: Sequence[tuple[str, float, float]], moments: Sequence[Moment]) -> Markup:
    begin, end = moments[0].at - 8.0, moments[-1].at + 8.0
    left, width = 30.0, 900.0

    def x(at: float) -> float:
        return left + (min(max(at, begin), end) - begin) / (end - begin) * width

    bars = [
        element("rect", x=x(a), y=34, width=max(x(b) - x(a), 0.0), height=34, fill=COLOURS.get(phase, "#999999"))
        for phase, a, b in spans
        if b > begin and a < end
    ]
    marks = []
    for number, moment in enumerate(moments, 1):
        y = 130 + 24 * number
        marks += [
            element("circle", cx=x(moment.at), cy=_lane(moments, number, x), r=9, fill="#222222"),
            _text(x(moment.at), _lane(moments, number, x) + 4, str(number), "middle", "#ffffff"),
            element("path", d=f"M{x(moment.at):.1f},68V{_lane(moments, number, x) - 9}", stroke="#222222"),
            _text(left, y, f"{number}", "start"),
            _text(left + 76, y, f"{moment.at:+.1f} s", "end"),
            _text(left + 94, y, moment.text, "start"),
        ]
    legend = [
        part
        for place, (phase, colour) in enumerate(COLOURS.items())
        for part in (
            element("rect", x=left + 120 * place, y=10, width=12, height=12, fill=colour),
            _text(left + 18 + 120 * place, 20, phase, "start"),
        )
    ]
    return _picture(960, 292, "A preempted run of six ranks on three nodes", [*legend, *bars, *marks])


def _lane(moments: Sequence[Moment], number: int, x: Any) -> float:
    """Return the height of a mark: below the one before it where they would touch."""
    lane = 0
    for before, moment in pairwise(moments[:number]):
        lane = lane + 1 if x(moment.at) - x(before.at) < 20 else 0
    return 84.0 + 19 * (lane % 3)


def _text(x: float, y: float, words: str, anchor: str, fill: str = "#222222") -> Markup:
    return element("text", words, x=x, y=y, text_anchor=anchor, fill=fill, font_size=13)


def _picture(width: int, height: int, title: str, parts: Sequence[Markup]) -> Markup:
    background = element("rect", width=width, height=height, rx=8, fill="#ffffff")
    inside = (element("title", title), background, *parts)
    size = {"viewBox": f"0 0 {width} {height}", "width": width, "height": height}
    return element("svg", *inside, xmlns="http://www.w3.org/2000/svg", role="img", style=FONT, **size)


# --- the flow

STEPS = (
    ("config", "layers merged,", "validated"),
    ("plan", "nodes x ranks,", "all decided"),
    ("submit", "one job script,", "sbatch or qsub"),
    ("launch", "a job, an agent", "on each node"),
    ("pytorch", "ranks train,", "one loop"),
    ("checkpoint", "all ranks save,", "one rename"),
)
"""A folder of the package, and its task in two lines."""


def _flow() -> str:
    box, gap, top = 132.0, 22.0, 60.0
    parts = [
        element("rect", x=12, y=30, width=3 * (box + gap), height=150, rx=6, fill="#eef2f8"),
        element("rect", x=20 + 3 * (box + gap), y=30, width=3 * (box + gap), height=150, rx=6, fill="#eef7f0"),
        _text(22, 48, "login node", "start", "#555555"),
        _text(30 + 3 * (box + gap), 48, "nodes of the job", "start", "#555555"),
    ]
    for number, (name, *lines) in enumerate(STEPS):
        x = 22 + number * (box + gap)
        parts += [
            element("rect", x=x, y=top, width=box, height=70, rx=6, fill="#ffffff", stroke="#4c6a92"),
            element("text", name, x=x + box / 2, y=top + 24, text_anchor="middle", font_weight="bold", font_size=14),
            *(_text(x + box / 2, top + 44 + 16 * row, line, "middle") for row, line in enumerate(lines)),
        ]
        if number:
            parts.append(_arrow(x - gap, top + 35, x, top + 35))
    back, front = 22 + 5 * (box + gap) + box / 2, 22 + 2 * (box + gap) + box / 2
    parts += [
        element("path", d=f"M{back},{top + 70}v34H{front}v-28", fill="none", stroke="#b5482f", stroke_width=2),
        _arrow(front, top + 78, front, top + 70, "#b5482f"),
        _text(
            (back + front) / 2, top + 98, "preempted, out of time, node lost: requeue and resume", "middle", "#b5482f"
        ),
    ]
    return str(_picture(946, 192, "The flow of an experiment", parts))


def _arrow(x1: float, y1: float, x2: float, y2: float, colour: str = "#4c6a92") -> Markup:
    line = element("path", d=f"M{x1:.1f},{y1:.1f}L{x2:.1f},{y2:.1f}", stroke=colour, stroke_width=2)
    down = y2 != y1
    tip = f"M{x2},{y2}l-5,8h10z" if down else f"M{x2},{y2}l-8,-5v10z"
    return Markup("").join([line, element("path", d=tip, fill=colour)])


# --- the screen of `hpc-det top`, and the report


async def _screen(root: Path) -> str:
    app = Top(ExperimentStore(root))
    async with app.run_test(size=(110, 24)) as pilot:
        await pilot.pause(5.0)
        drawn = app.export_screenshot(title="hpc-det top")
    return _without_fonts(drawn)


def _without_fonts(drawn: str) -> str:
    """Use the reader's own monospace font: Textual's picture loads its fonts from another host."""
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL).replace("Fira Code", "ui-monospace, monospace")


def _photograph(story: Story, scratch: Path) -> None:
    page = scratch / "report.html"
    hpc_det("report", story.number, "-o", page)
    page.write_text(page.read_text().replace(os.environ["HPC_DET_ROOT"], "/home/ada/hpc_det"))
    Chromium("chromium", scratch / "profile").load(page, IMAGES / "report.png", size="1200,1500")


if __name__ == "__main__":
    main()
