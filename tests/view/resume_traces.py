"""Traces of trainings on disk, for the comparison of a resumed run."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_det.node.json_files import append_line
from hpc_det.store.folders import TrialFolder

Change = Mapping[tuple[int, str], Mapping[str, str]]
"""(batch, part) -> values that differ from the usual ones."""
USUAL = {"state": {"weights": "0.5", "generators['torch']": "a"}, "data": {"[0]": "x"}, "metrics": {"['loss']": "1.0"}}


def trace(
    trial: TrialFolder, batches: int, resumes: tuple[int, ...] = (), change: Change | None = None, ranks: int = 1
) -> None:
    trial.resume_trace(0).parent.mkdir(parents=True)
    for rank in range(ranks):
        for batch in range(batches):
            parts = {part: values | dict((change or {}).get((batch, part), {})) for part, values in USUAL.items()}
            first = batch in (0, *resumes)
            append_line(trial.resume_trace(rank), {"batch": batch, "attempt": 1, "first": first, **parts})
        append_line(trial.resume_trace(rank), {"batch": batches, "attempt": 1, "first": False, "state": USUAL["state"]})
