"""The texts of `hpc-det top`: the cells of an experiment, its details, the summary line and the queue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpc_det.cli.top.experiments import Job, Row
from hpc_det.view.formatting import NONE, cut, number, quantity, reached, sparkline, values_in_words
from hpc_det.view.state import ExperimentState

_STATES = (ExperimentState.RUNNING, ExperimentState.QUEUED, ExperimentState.PAUSED)
# widths in characters, including the blank after the text; TRY is the number of attempts
_FIXED = {"ID": 5, "STATE": 11, "PROGRESS": 14, "BEST": 16, "TRY": 4, "SLOTS": 6}
HEADINGS = ("ID", "NAME", "STATE", "PROGRESS", "BEST", "LOSS", "TRY", "SLOTS")
SHORTEST, LONGEST = 10, 40  # limits of the widths of the columns NAME and LOSS, in characters


def widths(width: int) -> dict[str, int]:
    """Return the width of each column, with the blank after it; NAME and LOSS share the space that is left."""
    share = min(max((width - sum(_FIXED.values())) // 2, SHORTEST), LONGEST)
    return {heading: _FIXED.get(heading, share) for heading in HEADINGS}


def cells(row: Row, width_of: dict[str, int]) -> tuple[str, ...]:
    """Return the cells of an experiment in the order of HEADINGS, cut to the widths of their columns."""
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
    """Return the slots in use, and those in use or waited for, such as 4/8."""
    wanted = row.slots + row.slots_wanted
    return f"{row.slots}/{wanted}" if wanted else NONE


def heading(rows: Iterable[Row]) -> str:
    """Return the number of experiments in each state, and the slots of all experiments."""
    rows = list(rows)
    states = [row.summary.state for row in rows]
    counts = [f"{states.count(state)} {state.value.lower()}" for state in _STATES]
    if suspended := states.count(ExperimentState.SUSPENDED):
        counts.insert(1, f"{suspended} suspended")
    ended = sum(state.is_final for state in states)
    used, wanted = sum(row.slots for row in rows), sum(row.slots_wanted for row in rows)
    return f"{', '.join(counts)}, {ended} ended; slots: {used} in use, {wanted} waited for"


def detail(row: Row, width: int) -> list[str]:
    """Return a few lines about one experiment, cut to `width` characters."""
    found = row.summary
    lines = [f"Experiment {found.id}: {found.name}, {found.state.value}" + (f" ({found.phase})" if found.phase else "")]
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
    """Return a line for each job; if they exceed `height` lines, the last line counts the rest."""
    lines = [f"{job.job_id}  experiment {job.experiment}  {job.state.value}  {_reason(job)}" for job in jobs]
    if len(lines) > height:
        lines[height - 1 :] = [f"and {len(lines) - height + 1} more"]
    return [cut(line.rstrip(), width) for line in lines] or ["no jobs"]


def _reason(job: Job) -> str:
    """Return the scheduler's reason in parentheses, or "" without one; Slurm prints None for no reason."""
    return f"({job.reason})" if job.reason not in ("", "None") else ""
