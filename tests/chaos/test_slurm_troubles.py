"""The site's own troubles on a real Slurm: what trains goes on or comes back bit for bit, and nobody is charged for it.

Nothing is submitted twice, no job is forgotten, and no experiment is shown as over while its job lives.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator

import pytest

from hpc_det.store.journal import Journal
from tests.chaos.site import TWO_SLOTS, WAYS_BACK, Site, begun, ended, nodes_of, terminate
from tests.chaos.table import Tally
from tests.e2e.conftest import told
from tests.e2e.story import DIRECT, HERE, WAITS_AT, Story, hpc_det
from tests.lab.slurm import SlurmLab
from tests.wait import DEADLINE_S, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.chaos]

NEW = ("experiment", "create", HERE / "story.yaml", HERE / "trial", "--config", DIRECT, "--config", TWO_SLOTS)
HOW = pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "standing still"])
SHOWN = {signal.SIGKILL: "slurmctld dead", signal.SIGSTOP: "slurmctld stands still"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return told(tmp_path_factory, TWO_SLOTS, DIRECT)


@pytest.fixture
def site(slurm_lab: SlurmLab, state_folder: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    site = Site(slurm_lab, monkeypatch)
    yield site
    site.close()


@HOW
def test_commands_say_that_slurmctld_is_away_and_leave_nothing_half_done(
    site: Site, undisturbed: Story, tally: Tally, how: signal.Signals
) -> None:
    training, pausing = (site.begin(WAITS_AT.format(10)) for _ in range(2))
    rests = Story.of(int(hpc_det(*NEW, "--cluster", "successor-1", "--paused").stdout.split()[-1]))
    for story in (training, pausing):
        story.until_batch(10)
    waits = begun("experiment", "wait", training.number)
    with site.without("slurmctld", how):
        asked = {
            what: begun(*arguments)
            for what, arguments in {
                "list": ("experiment", "list", "--json"),
                "describe": ("experiment", "describe", training.number, "--json"),
                "job list": ("job", "list"),
                "pause": ("experiment", "pause", pausing.number),
                "activate": ("experiment", "activate", rests.number),
                "create": (*NEW, "--cluster", "successor-1"),
            }.items()
        }
        done = {what: ended(process) for what, process in asked.items()}
        states = {listed["id"]: listed["state"] for listed in json.loads(done["list"].stdout)}
        for what, fails in {"list": 0, "describe": 0, "pause": 0, "job list": 1, "activate": 1, "create": 1}.items():
            with tally.trying(f"{SHOWN[how]}: hpc-det commands"):
                assert done[what].returncode == fails, (what, done[what])
                assert "Unable to contact" in done[what].stderr or "timed out" in done[what].stderr, (what, done[what])
        assert states[training.number] == json.loads(done["describe"].stdout)["state"] == "RUNNING"
        assert states[rests.number] == "PAUSED"
        pausing.until_ended(1)
    for experiment in site.experiments():
        assert json.loads(hpc_det("experiment", "describe", experiment.id, "--json").stdout)["state"] not in (
            "ERROR",
            "CANCELED",
        )
    with tally.trying(f"{SHOWN[how]}: jobs known afterwards"):
        assert site.forgets_nothing()
    for experiment in site.experiments():  # what create and activate have left runs, and is no surprise
        if experiment.id not in (training.number, pausing.number):
            _to_its_end(Story.of(experiment.id), undisturbed)
    _to_its_end(pausing, undisturbed)
    assert pausing.causes == ["paused", "finished"]
    terminate(training)
    assert ended(waits).returncode == 0
    with tally.trying(f"{SHOWN[how]}: gangs trained on, bit-equal"):
        assert training.causes == ["preempted", "finished"]
        assert training.same_as(undisturbed)
    assert site.forgets_nothing()


def _to_its_end(story: Story, undisturbed: Story) -> None:
    if story.describe()["state"] == "PAUSED":
        hpc_det("experiment", "activate", story.number)
    story.wait()
    assert story.same_as(undisturbed)


@HOW
def test_jobs_that_are_stopped_while_slurmctld_is_away_come_back_on_every_way(
    site: Site, undisturbed: Story, tally: Tally, how: signal.Signals
) -> None:
    stories = {way_back: site.begin(WAITS_AT.format(10), way_back=way_back) for way_back in WAYS_BACK}
    for story in stories.values():
        story.until_batch(10)
    with site.without("slurmctld", how):
        for story in stories.values():
            terminate(story)
        for story in stories.values():
            story.until_ended(1)
        story = stories["resubmit"]
        story.until(lambda: "gives no answer" in story.logged + _job_log(story))
        for story in stories.values():
            assert story.describe()["state"] in ("RUNNING", "QUEUED"), story.logged
    for way_back, story in stories.items():
        with tally.trying(f"{SHOWN[how]}: preempted jobs came back, bit-equal"):
            story.wait()
            assert story.causes == ["preempted", "finished"], story.logged
            assert story.same_as(undisturbed)
            if way_back == "resubmit":
                assert len(site.jobs_of(story.trial.experiment())) == 2
    assert site.forgets_nothing()


def _job_log(story: Story) -> str:
    return "".join(log.read_text() for log in story.trial.experiment().jobs.glob("*.log"))


def test_a_job_that_begins_while_slurmctld_is_away_costs_no_restart(
    site: Site, undisturbed: Story, tally: Tally
) -> None:
    folder = site.lab.folder()
    story = site.begin(setup=f"touch {folder}/here; while [ ! -e {folder}/go ]; do sleep 0.05; done")
    wait_for((folder / "here").exists, DEADLINE_S)
    with site.without("slurmctld"):
        (folder / "go").touch()
        story.until_ended(1)
    with tally.trying("slurmctld dead: jobs that begin, bit-equal and uncharged"):
        story.wait()
        assert story.causes == ["scheduler away", "finished"], story.logged
        assert story.same_as(undisturbed)
    assert site.forgets_nothing()


def test_a_search_goes_on_while_slurmctld_restarts(site: Site, tally: Tally) -> None:
    overrides = ["searcher.name=random", "searcher.max_trials=4", "searcher.max_concurrent_trials=2"]
    story = site.begin(*overrides, "searcher.max_length={batches: 16}", "hyperparameters.batch_s=0.1", slots_per_node=2)
    trials = [story.trial.experiment().trial(number) for number in range(1, 5)]
    wait_for(lambda: Journal(trials[0].journal).history() or Journal(trials[1].journal).history(), DEADLINE_S)
    with site.without("slurmctld"), tally.trying("slurmctld dead: a search begins its next trials"):
        wait_for(lambda: all(trial.journal.exists() for trial in trials), DEADLINE_S)
    story.wait()
    with tally.trying("slurmctld dead: a search comes to its end"):
        ends = [[end.cause.value for end in Journal(trial.journal).history()] for trial in trials]
        assert ends == [["finished"]] * 4
    assert site.forgets_nothing()


def test_without_accounting_daemon_all_goes_on(site: Site, undisturbed: Story, tally: Tally) -> None:
    with site.without("slurmdbd"), tally.trying("slurmdbd dead: created, preempted and finished, bit-equal"):
        story = site.begin(WAITS_AT.format(10))
        story.until_batch(10)
        terminate(story)
        story.wait()
        assert story.causes == ["preempted", "finished"]
        assert story.same_as(undisturbed)
        assert json.loads(hpc_det("experiment", "list", "--json").stdout)[0]["state"] == "COMPLETED"
    assert site.forgets_nothing()


def test_a_gang_survives_the_slurmd_of_its_node(site: Site, undisturbed: Story, tally: Tally) -> None:
    story = site.begin(WAITS_AT.format(10))
    story.until_batch(10)
    first, second = nodes_of(story)
    with site.without_slurmd(first), site.without_slurmd(second):
        assert story.describe()["state"] == "RUNNING"
    terminate(story)
    with tally.trying("slurmd killed and back: bit-equal"):
        story.wait()
        assert story.causes == ["preempted", "finished"], story.logged
        assert story.same_as(undisturbed)
    assert site.forgets_nothing()


def test_a_gang_that_slurm_believes_gone_and_starts_elsewhere_writes_no_more(
    site: Site, undisturbed: Story, tally: Tally
) -> None:
    """Its slurmd is dead and its node down, so Slurm has put the job back; nobody has ended the gang."""
    story = site.begin(WAITS_AT.format(10), way_back="requeue", slots_per_node=2)
    story.until_batch(10)
    (node,) = nodes_of(story)
    with site.without_slurmd(node):
        site.call_down(node)
        waits = begun("experiment", "wait", story.number)
        story.until(lambda: Journal(story.trial.journal).last_attempt() == 2)
        with tally.trying("slurmd dead and node down, its gang lives: bit-equal"):
            assert ended(waits).returncode == 0, story.logged
            assert story.causes[0] == "node lost"
            assert story.causes[-1] == "finished"
            assert story.same_as(undisturbed)
            wait_for(lambda: not story.job_pids(), DEADLINE_S, lambda: story.logged)
    assert site.forgets_nothing()


def test_a_gang_survives_a_cable_that_is_pulled_for_seconds(site: Site, undisturbed: Story, tally: Tally) -> None:
    story = site.begin("hyperparameters.batch_s=0.2")
    story.until_batch(5)
    for node in nodes_of(story):
        with tally.trying("network of a node cut for 5 s: the gang survives"):
            with site.cut_off(node):
                time.sleep(5)
            story.until_batch(min(story.batches_reported + 2, 40))
    story.wait()
    assert story.causes == ["finished"], story.logged
    assert story.same_as(undisturbed)


@pytest.mark.parametrize("place", [0, 1], ids=["the job's own node", "another node"])
def test_a_gang_whose_node_is_cut_off_comes_back(site: Site, undisturbed: Story, tally: Tally, place: int) -> None:
    story = site.begin(WAITS_AT.format(10), way_back=("requeue", "resubmit")[place])
    story.until_batch(10)
    with site.cut_off(nodes_of(story)[place]):
        story.until_ended(1)
        assert story.describe()["state"] in ("RUNNING", "QUEUED")
    with tally.trying("network of a node cut until it counts as lost: bit-equal and uncharged"):
        story.wait()
        assert story.causes == ["node lost", "finished"], story.logged
        assert story.same_as(undisturbed)
    assert site.forgets_nothing()
