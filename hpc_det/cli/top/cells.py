"""An experiment as cells of a table, and all of them in a line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpc_det.cli.top.experiments import Job, Row
from hpc_det.view.formatting import NONE, cut, number, quantity, reached, sparkline, values_in_words
from hpc_det.view.state import ExperimentState

_STATES = (ExperimentState.RUNNING, ExperimentState.QUEUED, ExperimentState.PAUSED)
_FIXED = {"ID": 5, "STATE": 11, "PROGRESS": 14, "BEST": 16, "TRY": 4, "SLOTS": 6}
HEADINGS = ("ID", "NAME", "STATE", "PROGRESS", "BEST", "LOSS", "TRY", "SLOTS")
SHORTEST, LONGEST = 10, 40
"""Of names and of losses."""


def widths(width: int) -> dict[str, int]:
    """Of each column, with the blank after it: names and losses share what the others leave."""
    share = min(max((width - sum(_FIXED.values())) // 2, SHORTEST), LONGEST)
    return {heading: _FIXED.get(heading, share) for heading in HEADINGS}


def cells(row: Row, width_of: dict[str, int]) -> tuple[str, ...]:
    found = row.summary
    texts = {
        "ID": str(found.id),
        "NAME": found.name,
        "STATE": found.state.value,
        "PROGRESS": reached(vars(found)),
        "BEST": f"{found.best['metric']} {number(found.best['value'])}" if found.best else NONE,
        "LOSS": sparkline(row.losses, width_of["LOSS"] - 1),
        "TRY": str(row.attempts) if row.attempts else NONE,
        "SLOTS": _slots(row),
    }
    return tuple(cut(texts[heading], width_of[heading] - 1) for heading in HEADINGS)


def _slots(row: Row) -> str:
    """In use, of all that its jobs have or wait for."""
    wanted = row.slots + row.slots_wanted
    return f"{row.slots}/{wanted}" if wanted else NONE


def heading(rows: Iterable[Row]) -> str:
    """How many there are of a kind, and the slots of all."""
    rows = list(rows)
    states = [row.summary.state for row in rows]
    counts = [f"{states.count(state)} {state.value.lower()}" for state in _STATES]
    if suspended := states.count(ExperimentState.SUSPENDED):
        counts.insert(1, f"{suspended} suspended")
    ended = sum(state.is_final for state in states)
    used, wanted = sum(row.slots for row in rows), sum(row.slots_wanted for row in rows)
    return f"{', '.join(counts)}, {ended} ended; slots: {used} in use, {wanted} waited for"


def detail(row: Row, width: int) -> list[str]:
    """A few lines about one experiment."""
    found = row.summary
    lines = [f"Experiment {found.id}: {found.name}, {found.state.value}"]
    if row.waits_for:
        lines.append(f"waits for: {row.waits_for}")
    if row.trial and row.attempts:
        lines.append(f"trial {row.trial}, attempt {row.attempts}")
    for kind, metrics in (("training", row.training), ("validation", row.validation)):
        if metrics:
            lines.append(f"{kind}: {values_in_words(metrics)}")
    if row.gpu_use is not None:
        lines.append(f"GPUs in use {quantity(row.gpu_use, '%')} of the time")
    if row.losses:
        lines.append(f"loss: {sparkline(row.losses, max(width - 6, 1))}")
    if found.best:
        of = f" in trial {found.best['trial']}" if found.batches is None else ""
        lines.append(f"best {found.best['metric']} {number(found.best['value'])}{of}")
    return [cut(line, width) for line in lines]


def queue(jobs: Sequence[Job], height: int, width: int) -> list[str]:
    """A line for each job, as far as they fit."""
    lines = [f"{job.job_id}  experiment {job.experiment}  {job.state.value}  {_reason(job)}" for job in jobs]
    if len(lines) > height:
        lines[height - 1 :] = [f"and {len(lines) - height + 1} more"]
    return [cut(line.rstrip(), width) for line in lines] or ["no jobs"]


def _reason(job: Job) -> str:
    """Slurm says None where there is none to tell."""
    return f"({job.reason})" if job.reason not in ("", "None") else ""
