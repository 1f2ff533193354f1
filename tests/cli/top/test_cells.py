from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_det.cli.top import cells
from hpc_det.cli.top.experiments import Job, Row
from hpc_det.schedulers.scheduler import JobState
from hpc_det.view.pace import Epoch
from hpc_det.view.state import ExperimentState
from hpc_det.view.summary import Summary


def row(number: int = 1, state: ExperimentState = ExperimentState.RUNNING, **changes: object) -> Row:
    known = {"name": "digits", "batches": 200, "total_batches": 400, "trials": None, **changes}
    return Row(
        summary=Summary(id=number, state=state, **known),  # type: ignore[arg-type]
        slots=8,
        slots_wanted=8,
        attempts=2,
    )


def shown(width: int, *rows: Row) -> list[dict[str, str]]:
    """Return the cells of the rows in a terminal of this width, by heading."""
    texts = [cells.texts(row) for row in rows]
    width_of = cells.widths(cells.needed(texts, {}), width)
    pairs = zip(rows, texts, strict=True)
    return [dict(zip(width_of, cells.cells(row, its, width_of), strict=True)) for row, its in pairs]


BEST = {"metric": "validation_perplexity", "value": 12.3456, "batches": 100, "trial": 1}
TRAINING = replace(
    row(name="a-name-that-is-long-enough", best=BEST),
    losses=(3.0, 2.0, 1.0),
    epoch=Epoch(3, 20),
    samples_per_s=640.0,
    remaining_s=7500.0,
)


@pytest.mark.parametrize("width", [60, 80, 100, 132, 200])
def test_the_table_fits_the_terminal(width: int) -> None:
    widths = cells.widths(cells.needed([cells.texts(TRAINING)], {}), width)
    assert sum(widths.values()) <= width
    assert [heading for heading in cells.HEADINGS if heading in widths] == list(widths)


@pytest.mark.parametrize("width", [70, 80, 100, 132, 200])
def test_the_best_metric_is_never_cut_in_favour_of_another_column(width: int) -> None:
    (found,) = shown(width, TRAINING)
    assert found["BEST"] == "validation_perplexity 12.346"


def test_the_least_useful_columns_are_the_first_without_room() -> None:
    left_out = {width: {*cells.HEADINGS} - {*shown(width, TRAINING)[0]} for width in (60, 80, 90, 115, 120, 140)}
    assert left_out == {
        60: {"LOSS", "TRY", "SLOTS", "EPOCH", "SPEED", "ETA"},
        80: {"LOSS", "TRY", "SLOTS", "SPEED"},
        90: {"LOSS", "TRY", "SLOTS"},
        115: {"LOSS", "TRY"},
        120: {"LOSS"},
        140: set(),
    }


def test_only_the_end_of_a_metric_that_is_too_long_for_the_terminal_is_cut() -> None:
    (found,) = shown(50, TRAINING)
    assert found["BEST"].startswith("validation")
    assert found["BEST"].endswith("…")


def test_a_column_stays_as_wide_as_it_was() -> None:
    former = cells.needed([cells.texts(TRAINING)], {})
    assert cells.needed([cells.texts(row())], former) == former


def test_the_pace_is_shown_with_its_units() -> None:
    (found,) = shown(200, TRAINING)
    assert (found["ETA"], found["EPOCH"], found["SPEED"]) == ("2 h 5 min", "3/20", "640 samples/s")
    without_samples = replace(TRAINING, samples_per_s=None, batches_per_s=0.21234, remaining_s=12.0)
    (found,) = shown(200, without_samples)
    assert (found["ETA"], found["SPEED"]) == ("< 1 min", "0.212 batches/s")
    (found,) = shown(200, row())
    assert (found["ETA"], found["EPOCH"], found["SPEED"]) == ("-", "-", "-")


def test_a_search_counts_trials() -> None:
    trials = {"expected": 16, "created": 4, "running": 1, "completed": 2, "failed": 1, "invalid": 0}
    assert cells.texts(row(batches=None, trials=trials))["PROGRESS"] == "3/16 trials"


def test_a_running_startup_hook_takes_the_place_of_the_batches() -> None:
    hooked = row(phase="startup hook", batches=0)
    texts = cells.texts(hooked)
    assert (texts["STATE"], texts["PROGRESS"]) == ("RUNNING", "startup hook")
    assert cells.detail(hooked, 80)[0].endswith("RUNNING (startup hook)")


def test_the_heading_counts_experiments_and_slots() -> None:
    rows = [row(), row(2, ExperimentState.PAUSED), row(3, ExperimentState.ERROR), row(4, ExperimentState.COMPLETED)]
    said = "1 running, 0 queued, 1 paused, 2 ended; slots: 32 in use, 32 waited for"
    assert cells.heading(rows) == said


def test_the_queue_says_how_many_do_not_fit() -> None:
    jobs = [Job(job_id=str(n), experiment=n, state=JobState.QUEUED, reason="Priority") for n in range(5)]
    assert cells.queue(jobs, 3, 80) == [
        "0  experiment 0  queued  (Priority)",
        "1  experiment 1  queued  (Priority)",
        "and 3 more",
    ]
    assert cells.queue(jobs[:1], 3, 20) == ["0  experiment 0  qu…"]
    assert cells.queue([], 3, 80) == ["no jobs"]


def test_the_detail_tells_the_use_of_gpus_where_it_is_measured() -> None:
    assert "GPUs in use 87% of the time" in cells.detail(replace(row(), gpu_use=86.7), 80)
    assert not any("GPU" in line for line in cells.detail(row(), 80))
