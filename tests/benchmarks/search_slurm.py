"""Measure how much of an allocation on Slurm a search of short trials trains.

64 trials of async_halving on one slot each, in one allocation of tests/labs (`SEARCH_SLOTS`, default 2). A batch waits
for 0.2 s instead of computing, like a process whose GPU computes, so that the cores of this machine do not limit the
search. A trial takes 10 s, and one of the better half 20 s. An attempt trains from the beginning of its first batch to
the end of its last batch or validation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from hpc_det.store.folders import TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.store.metrics import each
from tests.benchmarks.lab import run_experiment, running_lab
from tests.benchmarks.table import show
from tests.labs.slurm import SlurmLab, available

TRIALS = int(os.environ.get("SEARCH_TRIALS", "64"))
SLOTS = int(os.environ.get("SEARCH_SLOTS", "2"))
CODE = Path(__file__).parents[1] / "e2e" / "search" / "model_def.py"
EXPERIMENT = """
name: short
entrypoint: model_def:Known
hyperparameters:
  global_batch_size: 4
  batch_s: 0.2
  x: {{type: double, minval: 0, maxval: 1}}
resources: {{slots_per_trial: 1, packed_slots: {slots}}}
searcher:
  name: async_halving
  metric: distance
  max_trials: {trials}
  num_rungs: 2
  divisor: 2
  max_length: {{batches: 100}}
scheduling_unit: 50
checkpoint_policy: none
"""

Span = tuple[float, float]
"""Begin and end, in seconds since the epoch."""


def main() -> None:
    if reason := available():
        print(f"search_slurm: not measured: {reason}")
        return
    with running_lab() as lab:
        trials = _search(lab)
        events = [event for trial in trials for event in Journal(trial.journal).events()]
        starts = [event for event in events if event["event"] == "started"]
        began = time.mktime(time.strptime(lab.job(starts[0]["job_id"])["StartTime"], "%Y-%m-%dT%H:%M:%S"))
    ended = max(event["time"] for event in events if event["event"] == "ended")
    workers = _by_worker(trials)
    trained = sum(end - begin for spans in workers for begin, end in spans)
    pauses = [after[0] - before[1] for spans in workers for before, after in pairwise(spans)]
    rows = [
        ("share of slots x time in which trials train", f"{trained / (SLOTS * (ended - began)):.4f}"),
        ("start of the job to the end of the last trial [s]", f"{ended - began:.1f}"),
        ("start of the job to the first batch of each slot, mean [s]", f"{mean(w[0][0] for w in workers) - began:.2f}"),
        ("from one trial to the next on its slot, median [s]", f"{median(pauses):.2f}"),
        ("the longest of these [s]", f"{max(pauses):.2f}"),
        ("slots without a trial until the last has ended, mean [s]", f"{ended - mean(w[-1][1] for w in workers):.2f}"),
        ("attempts", str(sum(map(len, workers)))),
    ]
    show(f"{TRIALS} trials on {SLOTS} slots", ("", ""), rows)


def _search(lab: SlurmLab) -> list[TrialFolder]:
    """Run the search and return its trials."""
    config = EXPERIMENT.format(slots=SLOTS, trials=TRIALS)
    experiment = run_experiment(lab, config, CODE.name, CODE.read_text())
    return [experiment.trial(number + 1) for number in range(TRIALS)]


def _by_worker(trials: Sequence[TrialFolder]) -> list[list[Span]]:
    """Return when each worker has trained, in order."""
    workers: dict[int, list[Span]] = {}
    for trial in trials:
        worker_of = {e["attempt"]: e["worker"] for e in Journal(trial.journal).events() if e["event"] == "started"}
        reports: dict[int, list[float]] = {}
        for report in each(trial.metrics):
            reports.setdefault(report["attempt"], []).append(report["time"])
        for attempt, times in reports.items():
            workers.setdefault(worker_of[attempt], []).append((times[0], times[-1]))
    return [sorted(spans) for spans in workers.values()]


if __name__ == "__main__":
    main()
