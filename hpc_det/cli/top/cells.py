"""The texts of `hpc-det top`: the cells of an experiment, its details, the summary line and the queue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hpc_det.cli.top.experiments import Job, Row
from hpc_det.schedulers.slurm.queue import DEPENDENCY
from hpc_det.view.formatting import (
    NONE,
    cut,
    duration,
    number,
    quantity,
    reached,
    sparkline,
    values_in_words,
)
from hpc_det.view.state import ExperimentState

_STATES = (ExperimentState.RUNNING, ExperimentState.QUEUED, ExperimentState.PAUSED)
HEADINGS = ("ID", "NAME", "STATE", "PROGRESS", "ETA", "EPOCH", "SPEED", "BEST", "LOSS", "TRY", "SLOTS")
"""The columns from left to right; TRY is the number of attempts."""
_ESSENTIAL = ("ID", "NAME", "STATE", "PROGRESS", "BEST")
_OPTIONAL = ("ETA", "SPEED", "EPOCH", "NAME", "SLOTS", "TRY")
"""The columns for which a narrow terminal has no room, the most useful one first. NAME: more of it than SHORTEST."""
SHORTEST, LONGEST = 10, 40
"""Limits of the widths of the columns NAME and LOSS, in characters."""

Texts = Mapping[str, str]
"""The cells of an experiment, by the headings of their columns, except LOSS, which fills its column."""


def texts(row: Row) -> dict[str, str]:
    """Return the cells of an experiment, not cut."""
    found = row.summary
    return {
        "ID": str(found.id),
        "NAME": found.name,
        "STATE": found.state.value,
        "PROGRESS": reached(vars(found)),
        "ETA": NONE if row.remaining_s is None else _remaining(row.remaining_s),
        "EPOCH": f"{row.epoch.current}/{row.epoch.total}" if row.epoch else NONE,
        "SPEED": speed(row) or NONE,
        "BEST": f"{found.best['metric']} {number(found.best['value'])}" if found.best else NONE,
        "TRY": str(row.attempts) if row.attempts else NONE,
        "SLOTS": _slots(row),
    }


def needed(rows: Iterable[Texts], former: Mapping[str, int]) -> dict[str, int]:
    """Return the width that each column needs, with the blank after it.

    It is not less than the `former` one, so that columns do not move with each change of a number.
    """
    found = {heading: max(len(heading) + 1, former.get(heading, 0)) for heading in HEADINGS if heading != "LOSS"}
    for row in rows:
        for heading, text in row.items():
            found[heading] = max(found[heading], len(text) + 1)
    return {**found, "NAME": min(found["NAME"], LONGEST)}


def widths(needs: Mapping[str, int], width: int) -> dict[str, int]:
    """Return the widths of the columns that fit into `width` characters, from left to right.

    Columns other than NAME and LOSS have the width that they need. If there is too little room, LOSS, then the optional
    columns, and at last the end of BEST are left out.
    """
    chosen = {heading: needs[heading] for heading in _ESSENTIAL}
    chosen["NAME"] = min(needs["NAME"], SHORTEST + 1)
    chosen["BEST"] = min(chosen["BEST"], max(width - sum(chosen.values()) + chosen["BEST"], len("BEST ")))
    left = width - sum(chosen.values())
    for heading in _OPTIONAL:
        more = needs[heading] - chosen.get(heading, 0)
        more = min(more, left) if heading == "NAME" else more
        if more <= left:
            chosen[heading], left = chosen.get(heading, 0) + more, left - more
    if left >= SHORTEST:
        chosen["LOSS"] = min(left, LONGEST)
    return {heading: chosen[heading] for heading in HEADINGS if heading in chosen}


def cells(row: Row, its: Texts, width_of: Mapping[str, int]) -> tuple[str, ...]:
    """Return the cells of an experiment, whose `texts` are `its`, cut to the widths of the columns."""
    whole = {**its, "LOSS": sparkline(row.losses, width_of["LOSS"] - 1) if "LOSS" in width_of else ""}
    return tuple(cut(whole[heading], width - 1) for heading, width in width_of.items())


def _remaining(seconds: float) -> str:
    return "< 1 min" if seconds < 60 else duration(round(seconds / 60) * 60)  # without seconds, which would flicker


def speed(row: Row) -> str:
    """Return the newest throughput in samples per second or, if that is not measured, in batches per second."""
    if row.samples_per_s is not None:
        return f"{_rounded(row.samples_per_s)} samples/s"
    return f"{_rounded(row.batches_per_s)} batches/s" if row.batches_per_s is not None else ""


def _rounded(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


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
        lines.append(", ".join(_pace(row)))
    for kind, metrics in (("training", row.training), ("validation", row.validation)):
        if metrics:
            lines.append(f"{kind}: {values_in_words(metrics)}")
    if found.best:
        of = f" in trial {found.best['trial']}" if found.batches is None else ""
        lines.append(f"best {found.best['metric']} {number(found.best['value'])}{of}")
    if row.gpu_use is not None:
        lines.append(f"GPUs in use {quantity(row.gpu_use, '%')} of the time")
    if row.losses:
        lines.append(f"loss: {sparkline(row.losses, max(width - 6, 1))}")
    return [cut(line, width) for line in lines]


def _pace(row: Row) -> Iterable[str]:
    yield f"trial {row.trial}, attempt {row.attempts}"
    if row.epoch:
        yield f"epoch {row.epoch.current} of {row.epoch.total}"
    if now := speed(row):
        yield now
    if row.remaining_s is not None:
        yield f"{_remaining(row.remaining_s)} left"


def queue(jobs: Sequence[Job], height: int, width: int) -> list[str]:
    """Return a line for each job; if they exceed `height` lines, the last line counts the rest."""
    lines = [f"{job.job_id}  experiment {job.experiment}  {job.state.value}  {_reason(job)}" for job in jobs]
    if len(lines) > height:
        lines[height - 1 :] = [f"and {len(lines) - height + 1} more"]
    return [cut(line.rstrip(), width) for line in lines] or ["no jobs"]


def _reason(job: Job) -> str:
    """Return the scheduler's reason in parentheses, or "" without one; Slurm prints None for no reason."""
    reason = "starts after the job before it" if job.reason == DEPENDENCY else job.reason
    return f"({reason})" if reason not in ("", "None") else ""
