"""The site's own troubles on a real Slurm: what trains goes on or comes back bit for bit, and nobody is charged for it.

Nothing is submitted twice, no job is forgotten, and no experiment is shown as over while its job lives.
"""

from __future__ import annotations

import json
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return told(tmp_path_factory, TWO_SLOTS, DIRECT)


@pytest.fixture
def site(slurm_lab: SlurmLab, state_folder: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    site = Site(slurm_lab, monkeypatch)
    yield site
    site.close()


def test_commands_say_that_slurmctld_is_away_and_leave_nothing_half_done(
    site: Site, undisturbed: Story, tally: Tally
) -> None:
    training, pausing = (site.begin(WAITS_AT.format(10)) for _ in range(2))
    rests = Story.of(int(hpc_det(*NEW, "--cluster", "successor-1", "--paused").stdout.split()[-1]))
    for story in (training, pausing):
        story.until_batch(10)
    waits = begun("experiment", "wait", training.number)
    with site.without("slurmctld"):
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
            with tally.trying("slurmctld dead: hpc-det commands"):
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
    with tally.trying("slurmctld dead: jobs known afterwards"):
        assert site.forgets_nothing()
    for experiment in site.experiments():  # what create and activate have left runs, and is no surprise
        if experiment.id not in (training.number, pausing.number):
            _to_its_end(Story.of(experiment.id), undisturbed)
    _to_its_end(pausing, undisturbed)
    assert pausing.causes == ["paused", "finished"]
    terminate(training)
    assert ended(waits).returncode == 0
    with tally.trying("slurmctld dead: gangs trained on, bit-equal"):
        assert training.causes == ["preempted", "finished"]
        assert training.same_as(undisturbed)
    assert site.forgets_nothing()


def _to_its_end(story: Story, undisturbed: Story) -> None:
    if story.describe()["state"] == "PAUSED":
        hpc_det("experiment", "activate", story.number)
    story.wait()
    assert story.same_as(undisturbed)


def test_jobs_that_are_stopped_while_slurmctld_is_away_come_back_on_every_way(
    site: Site, undisturbed: Story, tally: Tally
) -> None:
    stories = {way_back: site.begin(WAITS_AT.format(10), way_back=way_back) for way_back in WAYS_BACK}
    for story in stories.values():
        story.until_batch(10)
    with site.without("slurmctld"):
        for story in stories.values():
            terminate(story)
        for story in stories.values():
            story.until_ended(1)
        story = stories["resubmit"]
        story.until(lambda: "gives no answer" in story.logged + _job_log(story))
        for story in stories.values():
            assert story.describe()["state"] in ("RUNNING", "QUEUED"), story.logged
    for way_back, story in stories.items():
        with tally.trying("slurmctld dead: preempted jobs came back, bit-equal"):
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


def test_a_gang_whose_first_node_is_cut_off_comes_back(site: Site, undisturbed: Story, tally: Tally) -> None:
    """The job's own process is there, and reaches no scheduler."""
    story = site.begin(WAITS_AT.format(10), way_back="requeue")
    story.until_batch(10)
    with site.cut_off(nodes_of(story)[0]):
        story.until_ended(1)
        assert story.describe()["state"] in ("RUNNING", "QUEUED")
    with tally.trying("network of a node cut until it counts as lost: bit-equal and uncharged"):
        story.wait()
        assert story.causes == ["node lost", "finished"], story.logged
        assert story.same_as(undisturbed)
    assert site.forgets_nothing()
