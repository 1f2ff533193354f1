"""Outages of a real Slurm: running trainings continue or resume bit for bit, and no restart is charged.

No job is submitted twice, none is forgotten, and no experiment is shown as over while its job lives.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack

import pytest

from hpc_det.store import metrics
from hpc_det.store.journal import Journal
from tests.chaos.failing_lab import (
    REQUEUE_POLICIES,
    TWO_SLOTS,
    FailingLab,
    nodes_of,
    result_of,
    start_hpc_det,
    terminate,
)
from tests.chaos.table import Tally
from tests.e2e.conftest import run_undisturbed
from tests.e2e.story import DIRECT, HERE, WAITS_AT, Story, hpc_det
from tests.labs.slurm import SlurmLab
from tests.wait import DEADLINE_S, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.chaos]

NEW = ("experiment", "create", HERE / "story.yaml", HERE / "trial", "--config", DIRECT, "--config", TWO_SLOTS)
TRAINS = ("hyperparameters.batch_s=0.5", WAITS_AT.format(35))
"""Slow, so that it still trains when a test causes an outage; from batch 35 it waits for the test."""
JOBS = {"requeue": {1: 1, 2: 1, 3: 1}, "successor": {1: 2, 2: 3}, "resubmit": {1: 1, 2: 2}}
"""Number of jobs that an experiment submits, by policy and number of attempts. Each attempt submits a successor; the
last one is cancelled.
"""
Outage = Callable[[FailingLab, str], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return run_undisturbed(tmp_path_factory, TWO_SLOTS, DIRECT)


@pytest.fixture
def lab(slurm_lab: SlurmLab, state_folder: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingLab]:
    lab = FailingLab(slurm_lab, monkeypatch)
    yield lab
    lab.close()


@pytest.mark.parametrize("outage", [FailingLab.without, FailingLab.with_stopped], ids=["killed", "stopped"])
def test_commands_report_that_slurmctld_is_away_and_leave_nothing_half_done(
    lab: FailingLab, undisturbed: Story, tally: Tally, outage: Outage
) -> None:
    what = "slurmctld killed" if outage is FailingLab.without else "slurmctld stopped"
    pausing = lab.begin(WAITS_AT.format(10))
    paused = Story.of(int(hpc_det(*NEW, "--cluster", "successor-1", "--paused").stdout.split()[-1]))
    pausing.until_batch(10)
    training = lab.begin(*TRAINS)
    waits = start_hpc_det("experiment", "wait", training.number)
    training.until_batch(5)
    with outage(lab, "slurmctld"):
        before = training.batches_reported
        looked = _results(
            {
                "list": ("experiment", "list", "--json"),
                "describe": ("experiment", "describe", training.number, "--json"),
                "job list": ("job", "list"),
            }
        )
        changed = _results(
            {
                "pause": ("experiment", "pause", pausing.number),
                "activate": ("experiment", "activate", paused.number),
                "create": (*NEW, "--cluster", "successor-1"),
            }
        )
        fails = {"list": 0, "describe": 0, "pause": 0, "job list": 1, "activate": 1, "create": 1}
        for command, done in (looked | changed).items():
            with tally.trying(f"{what}: hpc-det commands"):
                assert done.returncode == fails[command], (command, done)
                assert "Unable to contact" in done.stderr or "timed out" in done.stderr, (command, done)
        states = {listed["id"]: listed["state"] for listed in json.loads(looked["list"].stdout)}
        assert states[training.number] == json.loads(looked["describe"].stdout)["state"] == "RUNNING"
        assert states[paused.number] == "PAUSED"
        pausing.until_ended(1)
        with tally.trying(f"{what}: gangs train on"):
            training.until_batch(before + 2)
    for experiment in lab.experiments():
        assert Story.of(experiment.id).describe()["state"] not in ("ERROR", "CANCELED")
    with tally.trying(f"{what}: every job is known afterwards"):
        lab.check_all_jobs_are_known()
    for experiment in lab.experiments():  # the fourth one was left by create
        if experiment.id not in (training.number, pausing.number):
            _train_to_the_end(Story.of(experiment.id), undisturbed)
            _check_jobs(lab, Story.of(experiment.id))
    _train_to_the_end(pausing, undisturbed)
    assert pausing.causes == ["paused", "finished"]
    terminate(training)
    assert result_of(waits).returncode == 0
    with tally.trying(f"{what}: bit-equal"):
        assert training.causes == ["preempted", "finished"]
        assert training.same_as(undisturbed)
    _check_jobs(lab, training)
    lab.check_all_jobs_are_known()


def _results(commands: Mapping[str, tuple[object, ...]]) -> dict[str, subprocess.CompletedProcess[str]]:
    """Return the results of commands that run at the same time."""
    running = {name: start_hpc_det(*arguments) for name, arguments in commands.items()}
    return {name: result_of(process) for name, process in running.items()}


def _train_to_the_end(story: Story, undisturbed: Story) -> None:
    if story.describe()["state"] == "PAUSED":
        hpc_det("experiment", "activate", story.number)
    story.wait()
    assert story.same_as(undisturbed)


def _check_end(lab: FailingLab, story: Story, undisturbed: Story, causes: list[str], policy: str = "successor") -> None:
    """Assert that it trains to the end, bit for bit, in attempts that end by `causes`, without superfluous jobs."""
    story.wait()
    assert story.causes == causes, story.logged
    assert story.same_as(undisturbed)
    _check_jobs(lab, story, policy)


def _check_jobs(lab: FailingLab, story: Story, policy: str = "successor") -> None:
    """Assert that Slurm received as many jobs as the attempts need."""
    jobs = lab.jobs_of(story.trial.experiment())
    assert len(jobs) == JOBS[policy][len(story.causes)], (jobs, story.causes)


def test_jobs_that_are_preempted_while_slurmctld_is_away_come_back_under_every_policy(
    lab: FailingLab, undisturbed: Story, tally: Tally
) -> None:
    stories = {policy: lab.begin(WAITS_AT.format(10), policy=policy) for policy in REQUEUE_POLICIES}
    for story in stories.values():
        story.until_batch(10)
    with lab.without("slurmctld"):
        for story in stories.values():
            terminate(story)
        for story in stories.values():
            story.until_ended(1)
        story = stories["resubmit"]
        story.until(lambda: "gives no answer" in story.logged + _job_log(story))
        for story in stories.values():
            assert story.describe()["state"] in ("RUNNING", "QUEUED"), story.logged
    for policy, story in stories.items():
        with tally.trying("slurmctld killed: preempted jobs come back, bit-equal"):
            _check_end(lab, story, undisturbed, ["preempted", "finished"], policy)
    lab.check_all_jobs_are_known()


def _job_log(story: Story) -> str:
    return "".join(log.read_text() for log in story.trial.experiment().jobs.glob("*.log"))


def test_a_job_that_starts_while_slurmctld_is_away_is_charged_no_restart(
    lab: FailingLab, undisturbed: Story, tally: Tally
) -> None:
    folder = lab.lab.folder()
    story = lab.begin(setup=f"touch {folder}/here; while [ ! -e {folder}/go ]; do sleep 0.05; done")
    wait_for((folder / "here").exists, DEADLINE_S)
    lab.wait_until_saved(story.job_id)
    with lab.without("slurmctld"):
        (folder / "go").touch()
        story.until_ended(1)
    with tally.trying("slurmctld killed: jobs start, bit-equal and uncharged"):
        _check_end(lab, story, undisturbed, ["scheduler away", "finished"])
    lab.check_all_jobs_are_known()


def test_experiments_live_from_creation_to_end_without_slurmdbd(
    lab: FailingLab, undisturbed: Story, tally: Tally
) -> None:
    """Without accounting; squeue, sbatch, scancel and scontrol ask slurmctld alone."""
    training = {policy: lab.begin(*TRAINS, policy=policy) for policy in REQUEUE_POLICIES}
    for story in training.values():
        story.until_batch(5)
    with lab.without("slurmdbd"):
        with pytest.raises(RuntimeError):
            lab.lab.run("sacct")
        before = {policy: story.batches_reported for policy, story in training.items()}
        created = lab.begin()
        paused = Story.of(int(hpc_det(*NEW, "--cluster", "successor-1", "--paused").stdout.split()[-1]))
        killed = lab.begin(WAITS_AT.format(10))
        killed.until_batch(10)
        commands = {
            "list": ("experiment", "list", "--json"),
            "describe": ("experiment", "describe", training["requeue"].number, "--json"),
            "job list": ("job", "list"),
            "activate": ("experiment", "activate", paused.number),
            "kill": ("experiment", "kill", killed.number),
        }
        for command, done in _results(commands).items():
            with tally.trying("slurmdbd killed: hpc-det commands"):
                assert (done.returncode, done.stderr) == (0, ""), (command, done)
        for policy, story in training.items():
            with tally.trying("slurmdbd killed: gangs train on"):
                story.until_batch(before[policy] + 2)
                assert story.describe()["state"] == "RUNNING"
            terminate(story)
        for policy, story in training.items():
            with tally.trying("slurmdbd killed: preempted jobs come back and end, bit-equal"):
                _check_end(lab, story, undisturbed, ["preempted", "finished"], policy)
        for story in (created, paused):
            with tally.trying("slurmdbd killed: new experiments, bit-equal"):
                _check_end(lab, story, undisturbed, ["finished"])
        killed.until_ended(1)
        assert killed.describe()["state"] == "CANCELED"
        lab.check_all_jobs_are_known()


def test_a_gang_survives_the_slurmd_of_its_node(lab: FailingLab, undisturbed: Story, tally: Tally) -> None:
    story = lab.begin(*TRAINS)
    story.until_batch(5)
    with ExitStack() as outages, tally.trying("slurmd killed: gangs train on"):
        for node in nodes_of(story):
            outages.enter_context(lab.without_slurmd(node))
        before = story.batches_reported
        story.until_batch(before + 2)
        assert story.describe()["state"] == "RUNNING"
    terminate(story)
    with tally.trying("slurmd killed and back: bit-equal"):
        _check_end(lab, story, undisturbed, ["preempted", "finished"])
    lab.check_all_jobs_are_known()


def test_a_gang_that_slurm_takes_for_lost_and_starts_elsewhere_leaves(
    lab: FailingLab, undisturbed: Story, tally: Tally
) -> None:
    """Its slurmd is dead and its node is down, so Slurm has requeued the job; but its processes live, and train."""
    story = lab.begin(*TRAINS, policy="requeue", slots_per_node=2)
    story.until_batch(5)
    (node,) = nodes_of(story)
    with lab.without_slurmd(node):
        lab.mark_down(node)
        waits = start_hpc_det("experiment", "wait", story.number)
        _until_attempt(story, 2)
        with tally.trying("slurmd killed, node marked down, gang alive: bit-equal, one writer"):
            _check_end_on_another_node(lab, story, undisturbed, waits)


def test_a_gang_that_stood_still_while_slurm_started_it_elsewhere_writes_nothing(
    lab: FailingLab, undisturbed: Story, tally: Tally
) -> None:
    """This happens on a node whose file server hangs, or on a virtual machine that is moved: the gang continues in the
    middle of a batch, and does not know of the other gang.
    """
    story = lab.begin(*TRAINS, policy="requeue", slots_per_node=2)
    story.until_batch(12)
    (node,) = nodes_of(story)
    with lab.without_slurmd(node):
        with lab.with_frozen_jobs(node):
            reported = _reports(story, 1)
            lab.mark_down(node)
            waits = start_hpc_det("experiment", "wait", story.number)
            story.until(lambda: _reports(story, 2))
        with tally.trying("node frozen until its gang trains elsewhere: bit-equal, one writer"):
            _check_end_on_another_node(lab, story, undisturbed, waits)
            assert _reports(story, 1) == reported


def _until_attempt(story: Story, number: int) -> None:
    story.until(lambda: Journal(story.trial.journal).last_attempt() >= number)


def _check_end_on_another_node(lab: FailingLab, story: Story, undisturbed: Story, waits: subprocess.Popen[str]) -> None:
    assert result_of(waits).returncode == 0, story.logged
    # When a frozen srun continues, it may cancel the step of the next attempt, which has the same number.
    *lost, last = story.causes
    assert (last, {*lost}, len(lost) <= 2) == ("finished", {"node lost"}, True), story.logged
    wait_for(lambda: not story.job_pids(), DEADLINE_S, lambda: story.logged)
    writers = [line["attempt"] for line in metrics.each(story.trial.metrics)]
    assert writers == sorted(writers), "the first attempt reported after the second one had begun"
    assert story.same_as(undisturbed)
    _check_jobs(lab, story, "requeue")
    lab.check_all_jobs_are_known()


def _reports(story: Story, attempt: int) -> list[metrics.Record]:
    return [line for line in metrics.each(story.trial.metrics) if line["attempt"] == attempt]


def test_a_gang_survives_a_network_that_is_gone_for_seconds(lab: FailingLab, undisturbed: Story, tally: Tally) -> None:
    """Repeated short outages: the length of each silence of a node counts, not their sum."""
    story = lab.begin(*TRAINS)
    story.until_batch(5)
    with tally.trying("network of a node cut for 5 s, four times within 26 s: the gang survives"):
        for node in nodes_of(story) * 2:
            with lab.cut_off(node):
                time.sleep(5)
            time.sleep(1.5)
        before = story.batches_reported
        story.until_batch(before + 2)
        terminate(story)
        _check_end(lab, story, undisturbed, ["preempted", "finished"])


def test_a_gang_whose_first_node_is_cut_off_comes_back(lab: FailingLab, undisturbed: Story, tally: Tally) -> None:
    """The job's own process lives, but reaches no scheduler."""
    story = lab.begin(*TRAINS, policy="requeue")
    story.until_batch(5)
    with lab.cut_off(nodes_of(story)[0]):
        story.until_ended(1)
        assert story.describe()["state"] in ("RUNNING", "QUEUED")
    with tally.trying("network of a node cut until it counts as lost: bit-equal and uncharged"):
        _check_end(lab, story, undisturbed, ["node lost", "finished"], "requeue")
    lab.check_all_jobs_are_known()
