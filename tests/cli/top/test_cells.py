from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_det.cli.top import cells
from hpc_det.cli.top.experiments import Job, Row
from hpc_det.schedulers.scheduler import JobState
from hpc_det.view.state import ExperimentState
from hpc_det.view.summary import Summary


@pytest.mark.parametrize("width", [80, 100, 132, 200])
def test_the_table_fits_the_terminal(width: int) -> None:
    widths = cells.widths(width)
    assert list(widths) == list(cells.HEADINGS)
    assert sum(widths.values()) <= width


def row(number: int = 1, state: ExperimentState = ExperimentState.RUNNING, **changes: object) -> Row:
    known = {"name": "digits", "batches": 200, "total_batches": 400, "trials": None, **changes}
    return Row(
        summary=Summary(id=number, state=state, **known),  # type: ignore[arg-type]
        slots=8,
        slots_wanted=8,
        attempts=2,
    )


def test_a_cell_is_cut_where_it_does_not_fit() -> None:
    texts = cells.cells(row(name="a-name-that-is-long"), cells.widths(80))
    assert texts[:4] == ("1", "a-name-tha…", "RUNNING", "200/400")
    assert texts[6:] == ("2", "8/16")


def test_a_search_counts_trials() -> None:
    trials = {"expected": 16, "created": 4, "running": 1, "completed": 2, "failed": 1, "invalid": 0}
    assert cells.cells(row(batches=None, trials=trials), cells.widths(80))[3] == "3/16 trials"


def test_a_running_startup_hook_takes_the_place_of_the_batches() -> None:
    hooked = row(phase="startup hook", batches=0)
    assert cells.cells(hooked, cells.widths(80))[2:4] == ("RUNNING", "startup hook")
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
