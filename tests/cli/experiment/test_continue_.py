"""hpc-det experiment continue: only the remaining trials of a search get jobs again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_det.checkpoint.staging import Staging
from hpc_det.plan.effective import Effective
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Exit, Work
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from tests.cli.conftest import Command
from tests.facts import unnamed
from tests.schedulers.slurm.squeue_on_paper import KNOWS_NONE

pytestmark = pytest.mark.integration

Stub = Callable[[str, str], None]
RANDOM = """
name: tiny
entrypoint: model_def:MyTrial
searcher: {name: random, metric: accuracy, max_length: 10, max_trials: 3}
"""
HALVING = """
name: tiny
entrypoint: model_def:MyTrial
searcher: {name: async_halving, metric: accuracy, max_length: 10, max_trials: 2, num_rungs: 2, divisor: 2}
"""


@pytest.fixture
def slurm(slurm_commands: Stub) -> Stub:
    """Stub a Slurm that accepts every job and does not know it afterwards."""
    slurm_commands("sbatch", "echo 4711")
    slurm_commands("squeue", KNOWS_NONE)
    slurm_commands("scancel", "")
    return slurm_commands


@pytest.fixture
def create(hpc_det: Command, root: Path, config: Path, code: Path, slurm: Stub) -> Callable[[str], ExperimentFolder]:
    """Return a function that creates experiment 1 with a configuration on that Slurm."""

    def run(text: str) -> ExperimentFolder:
        config.write_text(text)
        hpc_det("experiment", "create", config, code, "--cluster", "slurm")
        return ExperimentStore(root).folder(1)

    return run


Create = Callable[[str], ExperimentFolder]


def trained(experiment: ExperimentFolder, worker: int = 0) -> list[int]:
    """Let a worker train all trials that the search assigns to it; return their numbers."""
    search, trials = SearchJournal(experiment), list[int]()
    work = search.ask(worker, f"4711_{worker}")
    while work:
        trials.append(work.trial)
        work = search.report(worker, work, 0.5)
    search.leave(worker)
    return trials


def test_after_a_refused_submission_the_next_one_is_seen(hpc_det: Command, create: Create, slurm: Stub) -> None:
    create(RANDOM)
    slurm("sbatch", "echo 'sbatch: error: the queue is full' >&2; exit 1")
    assert hpc_det("experiment", "continue", 1).code == 1
    slurm("sbatch", "echo 4712")
    assert hpc_det("experiment", "continue", 1).succeeds("experiment 1", "3 trials")
    slurm("squeue", "echo '4712|PENDING|Priority'")
    assert "QUEUED" in hpc_det("experiment", "describe", 1).out
    assert not unnamed(hpc_det("experiment", "continue", 1).err, "experiment 1", "QUEUED")


def test_trials_that_replace_invalid_ones_are_left_to_do(hpc_det: Command, create: Create) -> None:
    experiment = create(RANDOM)
    search = SearchJournal(experiment)
    search.ask(0, "4711_0")
    search.end(0, 1, Exit.INVALID_HP)
    search.ask(1, "4711_1")
    search.ask(2, "4711_2")
    search.report(1, Work(2, 10), 0.5)
    search.report(2, Work(3, 10), 0.5)
    assert hpc_det("experiment", "continue", 1).succeeds("experiment 1", "1 trial")
    assert trained(experiment, worker=3) == [4]


def test_a_search_that_compares_gives_failed_trials_no_other_chance(hpc_det: Command, create: Create) -> None:
    """The search has made its decisions without them."""
    experiment = create(HALVING)
    search = SearchJournal(experiment)
    search.ask(0, "4711_0")
    search.end(0, 1, Exit.FAILED)
    trained(experiment, worker=1)
    assert SearchJournal(experiment).state().finished
    assert not unnamed(hpc_det("experiment", "continue", 1).err, "experiment 1", "searcher.max_length")


def test_a_search_that_compares_goes_on_after_a_cancellation(hpc_det: Command, create: Create) -> None:
    experiment = create(HALVING)
    search = SearchJournal(experiment)
    search.ask(0, "4711_0")
    search.cancel("ada")
    search.end(0, 1, Exit.CANCELLED)
    search.leave(0)
    assert hpc_det("experiment", "continue", 1).succeeds("experiment 1", "2 trials")
    assert [trained(experiment, worker) for worker in (2, 3)] == [[1], [2, 1]]


def test_the_next_jobs_have_the_limit_that_was_set_last(hpc_det: Command, create: Create, slurm: Stub) -> None:
    experiment = create(RANDOM)
    slurm("squeue", "echo '4711|PENDING|Priority'")
    said = hpc_det("experiment", "set", "max-slots", 1, 2)
    assert said.succeeds("Experiment 1", "2 slots")
    assert "--array=0-2\n" in experiment.script(1).read_text()
    hpc_det("experiment", "pause", 1)
    slurm("squeue", KNOWS_NONE)
    assert hpc_det("experiment", "activate", 1).code == 0
    assert "--array=0-2%2" in experiment.script(2).read_text()
    assert "max_slots: 2" in hpc_det("experiment", "config", 1).out
    assert "resources.max_slots: 2" in hpc_det("experiment", "config", 1, "--origins").out


def test_a_limit_that_no_trial_fits_into_is_refused(hpc_det: Command, create: Create) -> None:
    experiment = create(RANDOM + "resources: {slots_per_trial: 4}\n")
    before = experiment.effective.read_text()
    code, out, err = hpc_det("experiment", "set", "max-slots", 1, 2)
    assert (code, out) == (2, "")
    assert not unnamed(err, "experiment 1", "max-slots 2", 4)
    assert experiment.effective.read_text() == before
    experiment.effective.unlink()
    assert hpc_det("experiment", "set", "max-slots", 1, 8).fails(1, "experiment 1", experiment.effective)


def test_a_length_that_is_trained_already_is_refused_and_nothing_changes(
    hpc_det: Command, create: Create, slurm: Stub
) -> None:
    experiment = create(RANDOM)
    trained(experiment)
    for number in (1, 2, 3):
        staging = Staging(experiment.trial(number).checkpoints, f"uuid-{number}")
        staging.partial.mkdir(parents=True)
        staging.commit(10, {})
    slurm("sbatch", "exit 1")
    before, entries = experiment.effective.read_text(), list(SearchJournal(experiment).new())
    code, out, err = hpc_det("experiment", "continue", 1, "--config", "searcher.max_length.batches=5")
    assert (code, out) == (2, "")
    assert "searcher.max_length: {batches: 5}" in err
    assert not unnamed(err, "10 batches")
    assert (experiment.effective.read_text(), list(SearchJournal(experiment).new())) == (before, entries)
    slurm("sbatch", "echo 4712")
    assert hpc_det("experiment", "continue", 1, "--config", "searcher.max_length.batches=20").code == 0


def test_what_goes_on_is_no_longer_archived(hpc_det: Command, create: Create) -> None:
    experiment = create(RANDOM)
    SearchJournal(experiment).cancel("ada")
    assert hpc_det("experiment", "archive", 1).code == 0
    assert '"id": 1' not in hpc_det("experiment", "list", "--json").out
    assert hpc_det("experiment", "continue", 1).code == 0
    assert '"id": 1' in hpc_det("experiment", "list", "--json").out


# --- fork


def test_a_fork_with_test_trains_one_batch_of_one_trial(create: Create, hpc_det: Command, root: Path) -> None:
    create(RANDOM)
    assert hpc_det("experiment", "fork", 1, "--test").out == "Created experiment 2\n"
    forked = json.loads(ExperimentStore(root).folder(2).effective.read_text())
    assert (forked["searcher"]["name"], forked["searcher"]["max_length"]) == ("single", {"batches": 1})
    assert "HPC_DET_TEST=1" in forked["environment"]["environment_variables"]


def test_a_local_fork_trains_on_one_slot(create: Create, hpc_det: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    create(RANDOM.replace("searcher:", "resources: {slots_per_trial: 2}\nsearcher:"))
    trained: list[Effective] = []
    monkeypatch.setattr("hpc_det.cli.experiment.create.run_here", lambda found, **_: trained.append(found))
    assert hpc_det("experiment", "fork", 1, "--local").code == 0
    assert [found.experiment.resources.slots_per_trial for found in trained] == [1]
