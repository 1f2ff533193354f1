"""Searches of real trials: on this machine, and on a real Slurm where workers are preempted and killed."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from hpc_det.checkpoint.committed import committed
from hpc_det.node.json_files import read_json
from hpc_det.search.by_name import search_of
from hpc_det.search.journal import SearchJournal
from hpc_det.search.sample import SpaceSampler
from hpc_det.search.state import SearchState
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.metrics import read_reports, validations
from hpc_det.store.shared_log import SharedLog
from tests import processes
from tests.e2e.story import COMMAND, Story, hpc_det, warm_ranks_of
from tests.e2e.test_slurm import use
from tests.labs.slurm import SlurmLab

HERE = Path(__file__).parent / "search"
X = {"x": {"type": "double", "minval": 0, "maxval": 1}}
Decision = tuple[int, int, int | None]
"""A worker, the trial that it trains, and the length until which it trains."""


def begin(*overrides: str, cluster: str = "local") -> ExperimentFolder:
    story = Story.begin(*overrides, cluster=cluster, config=HERE / "asha.yaml", context=HERE)
    return story.trial.experiment()


def decisions(experiment: ExperimentFolder) -> list[Decision]:
    """Return all decisions that the search has given to workers, in order, from a replay of its journal."""
    method, _ = search_of(read_json(experiment.effective) or {}, [], experiment.code)
    state, given, before = SearchState(method), list[Decision](), dict[int, object]()
    for entry in SharedLog(experiment.search).new():
        state.apply(entry)
        given += [(worker, work.trial, work.until) for worker, work in state.open.items() if before.get(worker) != work]
        before = dict(state.open)
    return given


def trained(experiment: ExperimentFolder) -> Iterator[Decision]:
    """Yield the decisions that the workers logged when they started to train."""
    for log in experiment.jobs.glob("*.log"):
        for worker, trial, until in re.findall(r"worker (\d+): trial (\d+) until (\d+)", log.read_text()):
            yield int(worker), int(trial), int(until)


def hparams(experiment: ExperimentFolder, trial: int) -> dict[str, float]:
    spec = read_json(experiment.trial(trial).trial)
    assert spec
    found: dict[str, float] = spec["hparams"]
    return found


def check(experiment: ExperimentFolder, trials: int) -> None:
    """Check that the search found the best of its trials, and that every process made the decisions that a replay
    makes.
    """
    state = SearchJournal(experiment).state()
    assert state.finished
    assert sorted(state.trials) == list(range(1, trials + 1))
    sampler = SpaceSampler({"global_batch_size": 4, "batch_s": 0, **X}, 7)
    sampled = {number: sampler.sample(number).hparams["x"] for number in state.trials}
    assert {number: hparams(experiment, number)["x"] for number in sampled} == sampled
    best = min(sampled, key=lambda number: abs(sampled[number] - 0.3))
    described = json.loads(hpc_det("experiment", "describe", experiment.id, "--json").stdout)
    assert described["state"] == "COMPLETED"
    assert described["best"]["trial"] == best
    assert state.trials[best].length == 64
    assert decisions(experiment) == decisions(experiment)
    assert set(trained(experiment)) <= set(decisions(experiment))
    for number, trial in state.trials.items():
        records = [line for line in read_reports(experiment.trial(number).metrics) if line["kind"] == "validation"]
        validated = {record["steps"]: record["metrics"]["distance"] for record in records}
        assert trial.length is not None
        assert validated[trial.length] == trial.value


@pytest.mark.long
@pytest.mark.usefixtures("warm")
def test_two_workers_on_this_machine_find_the_best_trial_and_keep_what_the_policy_says() -> None:
    storage = "checkpoint_storage={save_experiment_best: 2, save_trial_best: 0, save_trial_latest: 0}"
    experiment = begin(warm_ranks_of("Known"), "searcher.max_trials=5", storage)
    hpc_det("experiment", "wait", experiment.id)
    check(experiment, 5)
    kept = [(item.path, item.steps) for trial in experiment.trials() for item in committed(trial.checkpoints)]
    best = json.loads(hpc_det("experiment", "list-checkpoints", experiment.id, "--best", 2, "--json").stdout)
    assert sorted(path.name for path, _ in kept) == sorted(record["uuid"] for record in best)
    validated = [validations(trial.metrics, "distance").values() for trial in experiment.trials()]
    assert [record["value"] for record in best] == sorted(chain(*validated))[:2]


# --- on a Slurm


def waiting(experiment: ExperimentFolder) -> subprocess.Popen[str]:
    """Start `experiment wait`, which also releases requeued jobs."""
    command = [str(COMMAND), "experiment", "wait", str(experiment.id)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def pids(experiment: ExperimentFolder, module: str) -> list[int]:
    """Return the PIDs of the experiment's processes that run `python -m module`, on all nodes: they share this
    machine's /proc.
    """
    runs = [pid for pid in processes.pids() if module in processes.modules(pid)]
    folder = f"{experiment.path}/"
    return [
        pid
        for pid in runs
        if any(folder in f"{word}/" for file in ("cmdline", "environ") for word in processes.words(pid, file))
    ]


def kill_one(experiment: ExperimentFolder, module: str, chance: random.Random) -> None:
    if found := pids(experiment, module):
        processes.send([chance.choice(found)], signal.SIGKILL)


def disturbed(experiment: ExperimentFolder, lab: SlurmLab, every_s: float, jobs_to_kill: int) -> None:
    """Wait for the end of the experiment, while nodes are taken away, and ranks, agents and whole jobs are killed at
    random.

    If the last job has been killed, nothing resubmits it, and this function continues the experiment, as its user
    would.
    """
    chance = random.Random(5)
    while output := end_or_disturb(experiment, lab, chance, every_s, jobs_to_kill):
        assert "were not done" in output, output
        hpc_det("experiment", "continue", experiment.id)
        jobs_to_kill = 0


def end_or_disturb(
    experiment: ExperimentFolder, lab: SlurmLab, chance: random.Random, every_s: float, jobs_to_kill: int
) -> str:
    """Return the reason why the experiment ended incomplete, or an empty string."""
    with waiting(experiment) as wait:
        while True:
            try:
                output, _ = wait.communicate(timeout=every_s)
            except subprocess.TimeoutExpired:
                what = chance.choice(["preempt", "hpc_det.launch.rank", "hpc_det.launch.agent", "hpc_det.launch.job"])
                if what == "preempt":
                    lab.preempt(1, seconds=1)
                elif what != "hpc_det.launch.job" or jobs_to_kill > 0:
                    kill_one(experiment, what, chance)
                    jobs_to_kill -= what == "hpc_det.launch.job"
            else:
                return output if wait.returncode else ""


@pytest.fixture
def on_the_lab(slurm_lab: SlurmLab, state_folder: None, monkeypatch: pytest.MonkeyPatch) -> SlurmLab:
    use(slurm_lab, monkeypatch)
    return slurm_lab


@pytest.mark.slurm
def test_an_array_of_workers_that_are_preempted_and_killed_finds_the_best_trial(on_the_lab: SlurmLab) -> None:
    direct = (
        "entrypoint=python3 -m hpc_det.launch.direct --trial model_def:Known"  # torchrun would load torch once more
    )
    experiment = begin(direct, "hyperparameters.batch_s=0.02", "searcher.max_trials=8", cluster="lab")
    disturbed(experiment, on_the_lab, every_s=5, jobs_to_kill=1)
    check(experiment, 8)


@pytest.mark.long
@pytest.mark.slurm
def test_one_allocation_runs_trial_after_trial(on_the_lab: SlurmLab) -> None:
    experiment = begin("searcher.max_trials=6", "resources.packed_slots=4", cluster="lab")
    hpc_det("experiment", "wait", experiment.id)
    check(experiment, 6)
    job = read_json(experiment.job())
    assert job
    assert on_the_lab.job(job["job_id"])["NumNodes"] == "2"


@pytest.mark.slurm
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_search_of_64_trials_survives_a_bad_day(on_the_lab: SlurmLab) -> None:
    # One bracket, of 64, 16, 4 and 1 trials. With several, chance would decide which one trains the best trial, and how
    # long.
    experiment = begin(
        "hyperparameters.batch_s=0.02",
        "searcher.mode=aggressive",
        "searcher.max_trials=64",
        "searcher.max_concurrent_trials=8",
        cluster="lab",
    )
    disturbed(experiment, on_the_lab, every_s=7, jobs_to_kill=6)
    check(experiment, 64)
