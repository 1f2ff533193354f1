"""Requeue and successors with stubs of Slurm's commands; tests/e2e/test_slurm.py uses a real Slurm."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hpc_det.launch.job.resubmit import Exclusions, Resubmission, excluded_hosts, excluded_nodes
from hpc_det.node.json_files import read_json, write_json
from hpc_det.plan.job_plan import JobArray
from hpc_det.schedulers.slurm.scheduler import Slurm as SlurmScheduler
from hpc_det.search.journal import SearchJournal
from hpc_det.store.attempt import Failure, failure_now, note_failure
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from tests.facts import unnamed
from tests.launch.gang import Gang
from tests.plan.plans import job_plan
from tests.stub import Stub
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.integration

PREEMPTED = "JobId=7 JobState=RUNNING Reason=None PreemptTime=2026-11-20T10:42:00 EndTime=2026-11-20T11:42:00"


class Slurm:
    """Stubs of Slurm's commands that record each call; jobs get the ids 8, 9, ..."""

    def __init__(self, stub: Stub, folder: Path) -> None:
        self._calls = folder / "calls"
        self._calls.touch()
        note = f'echo "$(basename "$0") $*" >> {self._calls}'
        stub("sbatch", f'{note}; echo $((7 + $(grep -c ^sbatch {self._calls}))); echo "$PATH" >> {folder}/paths')
        stub("scontrol", f"{note}; echo '{PREEMPTED}'")
        stub("scancel", note)
        stub("squeue", f"{note}; echo '8|PENDING|Dependency'")
        self.paths = folder / "paths"

    def calls(self, command: str) -> list[str]:
        """Return the arguments of each call of the command."""
        calls = (line.partition(" ") for line in self._calls.read_text().splitlines())
        return [arguments for name, _, arguments in calls if name == command]


@pytest.fixture
def slurm(stub: Stub, tmp_path: Path) -> Slurm:
    return Slurm(stub, tmp_path)


def job(number: int) -> dict[str, str]:
    return {"SLURM_JOB_ID": str(number), "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "node1"}


def preempt(gang: Gang, number: int) -> int:
    """Run job `number` until its ranks are up, send it SIGTERM, and return its exit code."""
    process = gang.start_job(**job(number))
    gang.wait_for_ranks(0)
    gang.forget_ranks()
    os.kill(process.pid, signal.SIGTERM)
    return process.wait(timeout=DEADLINE_S)


def test_a_successor_waits_for_the_end_of_the_job_from_its_begin_on(gang: Gang, slurm: Slurm) -> None:
    gang.plan_ranks(0, scheduler="slurm", resume="successor")
    assert preempt(gang, 7) == 0
    script = gang.experiment.script()
    assert slurm.calls("sbatch") == [f"--parsable --dependency=afterany:7 {script}"]
    assert "update JobId=7 Requeue=0" in slurm.calls("scontrol"), "only the successor continues from here"
    assert (slurm.calls("scancel"), gang.ends()) == ([], [("preempted", "requeue")])
    assert gang.search().present == {0: "8"}, "others leave the work to the successor"

    gang.plan("true --trial", scheduler="slurm", resume="successor")
    write_json(gang.trial.outcome, {"attempt": 2, "kind": "finished", "steps": 100})
    assert gang.run_job(**job(8))[0] == 0
    assert slurm.calls("sbatch")[1:] == [f"--parsable --dependency=afterany:8 {script}"]
    assert slurm.calls("scancel") == ["9"], "nothing is left to do for it"


def test_a_successor_is_submitted_where_the_temporary_folder_of_the_job_cannot_be_written(
    gang: Gang, slurm: Slurm, stub: Stub
) -> None:
    stub("sbatch", 'mktemp -p "$TMPDIR" >&2 && echo 8')
    gang.plan("true --trial", scheduler="slurm", resume="successor")
    gang.run_job(**job(7), TMPDIR="/nonexistent")
    assert (read_json(gang.experiment.next_jobs(1, 0)) or {})["jobs"] == ["7", "8"]


def test_a_job_notes_that_it_submits_its_successor(gang: Gang, slurm: Slurm, stub: Stub, tmp_path: Path) -> None:
    """The record is for a reader after a SIGKILL of the job before sbatch's answer."""
    noted = gang.experiment.next_jobs(1, 0)
    stub("sbatch", f"cp {noted} {tmp_path}/noted; echo 8")
    gang.plan_ranks(0, scheduler="slurm", resume="successor")
    assert preempt(gang, 7) == 0
    assert read_json(tmp_path / "noted") == {"jobs": ["7"], "submitting": True}
    assert read_json(noted) == {"jobs": ["7", "8"]}


def test_a_successor_that_is_slow_to_submit_is_no_part_of_a_gang_that_ends(
    gang: Gang, slurm: Slurm, stub: Stub
) -> None:
    stub("sbatch", f"echo x >> {gang.code}/asked; while ! [ -e {gang.code}/go ]; do sleep 0.01; done; echo 8")
    gang.plan("[ $HPC_DET_NUMBER = 1 ] && exit 3; touch go", scheduler="slurm", resume="successor", max_restarts=1)
    assert gang.run_job(**job(7))[0] == 0
    assert (gang.code / "asked").read_text() == "x\n"
    assert slurm.calls("scancel") == ["8"]


def test_of_two_jobs_that_begin_as_one_worker_at_the_same_moment_the_first_goes_on(
    gang: Gang, slurm: Slurm, stub: Stub
) -> None:
    gang.plan("touch started", scheduler="slurm", resume="resubmit")
    SearchJournal(gang.experiment).ask(0, "7")
    stub("squeue", f"cd {gang.code}; touch asked; while ! [ -e go ]; do sleep 0.01; done; echo '7|NODE_FAIL|None'")
    process = gang.start_job(**job(8))
    wait_for((gang.code / "asked").exists)
    SearchJournal(gang.experiment).claim(0, "9", after="7")
    (gang.code / "go").touch()
    assert process.wait(timeout=DEADLINE_S) == 1
    assert unnamed(gang.printed.read_text(), "job 9") == []
    assert (gang.search().present, gang.journal.events()) == ({0: "9"}, [])


def test_a_job_that_was_believed_gone_leaves_the_trial_to_the_one_that_goes_on(
    gang: Gang, slurm: Slurm, tmp_path: Path
) -> None:
    """The scheduler took its node for lost, but the node still runs."""
    gang.plan(
        "touch up; while ! [ -e go ]; do sleep 0.01; done; exit 3", scheduler="slurm", resume="chain", max_restarts=9
    )
    write_json(gang.experiment.next_jobs(1, 0), {"jobs": ["7", "8"]})
    process = gang.start_job(**job(7))
    wait_for((gang.code / "up").exists)
    SearchJournal(gang.experiment).claim(0, "8", after="7")
    gang.journal.started(2, "8")
    (gang.code / "go").touch()
    assert process.wait(timeout=DEADLINE_S) == 1
    assert (gang.journal.last_attempt(), gang.journal.open_attempt(), gang.ends()) == (2, 2, [])
    assert slurm.calls("scancel") == []


def test_a_job_that_finds_nothing_to_do_queues_no_other(gang: Gang, slurm: Slurm) -> None:
    gang.plan("true", scheduler="slurm", resume="resubmit")
    assert gang.run_job(**job(7))[0] == 0
    gang.plan("touch started", scheduler="slurm", resume="successor")
    assert gang.run_job(**job(8))[0] == 0
    assert slurm.calls("sbatch") == []
    assert not (gang.code / "started").exists()


def test_a_stop_signal_before_the_job_listens_does_not_end_it(gang: Gang, slurm: Slurm, stub: Stub) -> None:
    stub("srun", 'while [[ $1 == -* ]]; do shift; done; exec "$@"')
    wait = f"cd {gang.code}; touch up; while ! [ -e go ]; do sleep 0.01; done"
    gang.plan("true", scheduler="slurm", resume="successor", setup=(wait,))
    gang.env |= job(7)
    process = gang.start_script()
    wait_for((gang.code / "up").exists)
    os.killpg(process.pid, signal.SIGTERM)
    (gang.code / "go").touch()
    assert process.wait(timeout=DEADLINE_S) == 0
    assert gang.ends() == [("finished", "done")]


def test_a_requeued_job_keeps_the_successor_that_it_has(gang: Gang, slurm: Slurm) -> None:
    gang.plan_ranks(0, scheduler="slurm", resume="successor")
    assert [preempt(gang, 7), preempt(gang, 7)] == [0, 0]
    assert len(slurm.calls("sbatch")) == 1


def test_a_successor_that_somebody_has_cancelled_is_replaced(gang: Gang, slurm: Slurm, stub: Stub) -> None:
    stub("squeue", "echo '8|CANCELLED|None'")
    gang.plan_ranks(0, scheduler="slurm", resume="successor")
    assert preempt(gang, 7) == 0
    assert len(slurm.calls("sbatch")) == 2
    assert gang.search().present == {0: "9"}


def test_resubmit_queues_the_next_job_when_one_ends(gang: Gang, slurm: Slurm) -> None:
    gang.plan_ranks(0, scheduler="slurm", resume="resubmit")
    process = gang.start_job(**job(7))
    gang.wait_for_ranks(0)
    assert slurm.calls("sbatch") == []
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=DEADLINE_S) == 0
    assert len(slurm.calls("sbatch")) == 1
    assert read_json(gang.experiment.next_jobs(1, 0)) == {"jobs": ["7", "8"]}


def test_what_follows_an_element_of_an_array_knows_itself(
    gang: Gang, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    gang.plan_ranks(0, scheduler="slurm", resume="resubmit")
    write_json(gang.experiment.array(), asdict(JobArray(first=0, count=3)))
    for name, value in {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_ID": "6"}.items():
        monkeypatch.setenv(name, value)
    follower = Resubmission(gang.experiment, 1).submit()
    assert slurm.calls("sbatch") == [f"--parsable --dependency=afterany:7_2 --array=2 {gang.experiment.script()}"]
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "8")
    assert follower == SlurmScheduler().job_id(os.environ) == "8_2"
    assert read_json(gang.experiment.next_jobs(1, 2)) == {"jobs": ["7_2", "8_2"]}


def test_requeue_keeps_the_job(gang: Gang, slurm: Slurm) -> None:
    gang.plan_ranks(0, scheduler="slurm", resume="requeue")
    assert preempt(gang, 7) == 0
    assert (slurm.calls("sbatch"), slurm.calls("scontrol")[-1]) == ([], "requeue 7")


def test_where_nodes_lack_scontrol_another_job_is_submitted(gang: Gang, slurm: Slurm, stub: Stub) -> None:
    stub("scontrol", "echo 'scontrol: no such thing' >&2; exit 127")
    gang.plan_ranks(0, scheduler="slurm", resume="requeue")
    assert preempt(gang, 7) == 0
    assert len(slurm.calls("sbatch")) == 1
    assert gang.search().present == {0: "8"}


def test_a_chain_goes_on_until_it_is_used_up(gang: Gang, slurm: Slurm) -> None:
    gang.plan_ranks(0, scheduler="slurm", resume="chain", chain_length=1)
    write_json(gang.experiment.next_jobs(1, 0), {"jobs": ["7", "8"]})
    assert preempt(gang, 7) == 0
    assert preempt(gang, 8) == 1
    assert slurm.calls("sbatch") == []
    (problem,) = (event["problem"] for event in gang.journal.events() if event["event"] == "problem")
    assert unnamed(problem, "1 job") == []


def test_a_site_that_refuses_jobs_from_nodes_is_asked_again_at_the_end(gang: Gang, slurm: Slurm, stub: Stub) -> None:
    stub("sbatch", "echo 'sbatch: error: Access denied' >&2; exit 1")
    gang.plan_ranks(0, scheduler="slurm", resume="successor")
    assert preempt(gang, 7) == 1
    (problem,) = (event["problem"] for event in gang.journal.events() if event["event"] == "problem")
    assert "Access denied" in problem


def test_the_path_of_the_jobs_does_not_grow(gang: Gang, slurm: Slurm) -> None:
    plan = gang.plan("true", scheduler="slurm", resume="successor")
    python_folder = str(Path(plan.python).parent)
    gang.run_job(**job(7), PATH=f"{python_folder}:{os.environ['PATH']}")
    assert slurm.paths.read_text().strip() == os.environ["PATH"]


@pytest.mark.parametrize("resume", ["requeue", "successor", "resubmit"])
def test_a_job_that_slurmctld_has_lost_in_a_crash_is_followed_by_one_that_does_not_wait_for_it(
    resubmission: Callable[..., Resubmission], slurm: Slurm, stub: Stub, tmp_path: Path, resume: str
) -> None:
    stub(
        "sbatch",
        f"""echo "sbatch $*" >>{tmp_path}/calls
        case $* in *afterany:7*) ;; *) echo 8; exit;; esac
        echo 'sbatch: error: Batch job submission failed: Job dependency problem' >&2; exit 1""",
    )
    for command in ("scontrol", "squeue"):
        stub(command, "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert resubmission(resume).submit() == "8"
    refused, accepted = slurm.calls("sbatch")
    assert "afterany:7" in refused
    assert "afterany" not in accepted


# --- a scheduler that gives no answer

AWAY = "Unable to contact slurm controller (connect failure)"
TIMED_OUT = "Batch job submission failed: Socket timed out on send/recv operation"


@pytest.fixture
def resubmission(gang: Gang, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Resubmission]:
    """Return a function that makes the Resubmission of job 7, the last of an array if `count` is above 1."""

    def made(resume: str, count: int = 1) -> Resubmission:
        gang.plan("true", scheduler="slurm", resume=resume)
        write_json(gang.experiment.array(), asdict(JobArray(first=0, count=count)))
        write_json(gang.experiment.job(1), {"job_id": "7"})
        array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(count - 1)} if count > 1 else {}
        for name, value in {"SLURM_JOB_ID": "7", **array}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("hpc_det.schedulers.scheduler.AGAIN_S", 0.01)
        monkeypatch.setattr("hpc_det.schedulers.own_jobs.SETTLES_S", 0.01)
        return Resubmission(gang.experiment, 1)

    return made


def test_a_job_waits_with_its_requeue_for_a_scheduler_that_is_away(
    resubmission: Callable[..., Resubmission], slurm: Slurm, stub: Stub, tmp_path: Path
) -> None:
    stub(
        "scontrol",
        f"""echo "scontrol $*" >>{tmp_path}/calls
        [ $(grep -c ^scontrol {tmp_path}/calls) -le 2 ] && echo '{AWAY}' >&2 && exit 1
        echo '{PREEMPTED}'""",
    )
    assert resubmission("requeue").submit() == "7"
    assert slurm.calls("scontrol")[-1] == "requeue 7"
    assert slurm.calls("sbatch") == []


def test_a_job_that_slurm_has_put_back_meanwhile_is_not_requeued_once_more(
    resubmission: Callable[..., Resubmission], slurm: Slurm, stub: Stub, tmp_path: Path
) -> None:
    """It may already run on other nodes."""
    stub("scontrol", f"echo \"scontrol $*\" >>{tmp_path}/calls; echo 'JobId=7 JobState=RUNNING Restarts=1'")
    assert resubmission("requeue").submit() == "7"
    assert not any("requeue" in call for call in slurm.calls("scontrol"))


@pytest.mark.parametrize(("count", "job"), [(1, "8"), (3, "8_2")])
@pytest.mark.parametrize("is_queued", [True, False])
@pytest.mark.parametrize("resume", ["resubmit", "requeue"])
def test_a_job_that_may_be_queued_although_nobody_said_so_is_not_submitted_twice(
    gang: Gang,
    resubmission: Callable[..., Resubmission],
    slurm: Slurm,
    stub: Stub,
    tmp_path: Path,
    count: int,
    job: str,
    is_queued: bool,
    resume: str,
) -> None:
    """The site also refuses to requeue it."""
    stub("scontrol", "echo 'slurm_requeue error: Access denied' >&2; exit 1")
    stub(
        "sbatch",
        f"""echo "sbatch $*" >>{tmp_path}/calls
        [ -e {tmp_path}/asked ] && echo 8 && exit
        touch {tmp_path}/asked; echo '{TIMED_OUT}' >&2; exit 1""",
    )
    others = "9_1" if count > 1 else ""
    rows = " ".join([others, job if is_queued else ""])
    stub(
        "squeue",
        f"""case $* in *--Format=*) ;; *) echo '{job}|PENDING|Dependency'; exit;; esac
        cd {tmp_path}
        [ -e asked ] && ! [ -e answers ] && touch answers && echo '{AWAY}' >&2 && exit 1
        [ -e asked ] && ! [ -e late ] && touch late && exit
        for word; do m=${{word#*JobArrayID:}}; m=${{m%%,*}}; done
        for id in {rows}; do
            echo -n "$id${{m}}n$m$(id -un)${{m}}low${{m}}PENDING${{m}}Priority${{m}}N/A${{m}}N/A"
            echo "${{m}}0${{m}}9${{m}}cpu=1$m{gang.experiment.path}${{m}}(null)$m"
        done""",
    )
    assert resubmission(resume, count).submit() == job
    assert len(slurm.calls("sbatch")) == (1 if is_queued else 2)
    own = "7" if count == 1 else "7_2"
    assert read_json(gang.experiment.next_jobs(1, count - 1)) == {"jobs": [own, job]}


@pytest.fixture
def experiment(tmp_path: Path) -> ExperimentFolder:
    return on_cluster(tmp_path, 1, "alpha")


def on_cluster(root: Path, number: int, cluster: str) -> ExperimentFolder:
    experiment = ExperimentStore(root).folder(number)
    experiment.trial().path.mkdir(parents=True)
    write_json(experiment.cluster, {"name": cluster})
    return experiment


def exclusions(experiment: ExperimentFolder, **plan: Any) -> Exclusions:
    return Exclusions(experiment.trial(), job_plan(**plan))


def ill(host: str) -> Failure:
    return Failure(rank=None, host=host, time=1.0, message="2 of 4 GPUs", unhealthy=True)


def test_an_ill_node_is_excluded_for_all_experiments_of_its_cluster(
    experiment: ExperimentFolder, tmp_path: Path
) -> None:
    for failure in (ill("node3"), failure_now(4, "collateral")):
        note_failure(experiment.trial(), 1, failure)
    exclusions(experiment, nodes=4).of_ill_nodes(1)
    (node,) = excluded_nodes(experiment)
    assert (node.host, node.why, node.until - node.since) == ("node3", "2 of 4 GPUs", 24 * 3600)
    assert excluded_hosts(on_cluster(tmp_path, 2, "alpha")) == ("node3",)
    assert excluded_hosts(on_cluster(tmp_path, 3, "beta")) == ()


def test_what_most_of_a_gang_complains_of_is_no_matter_of_single_nodes(experiment: ExperimentFolder) -> None:
    for host in ("node1", "node2", "node3"):
        note_failure(experiment.trial(), 1, ill(host))
    exclusions(experiment, nodes=4).of_ill_nodes(1)
    assert excluded_hosts(experiment) == ()


def test_the_only_node_of_a_gang_may_be_ill(experiment: ExperimentFolder) -> None:
    note_failure(experiment.trial(), 1, ill("node1"))
    exclusions(experiment, nodes=1).of_ill_nodes(1)
    assert excluded_hosts(experiment) == ("node1",)


def test_an_exclusion_ends(experiment: ExperimentFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    note_failure(experiment.trial(), 1, ill("node1"))
    monkeypatch.setattr("time.time", lambda: 1000.0)
    exclusions(experiment, nodes=1, exclude_nodes_for_min=1).of_ill_nodes(1)
    monkeypatch.setattr("time.time", lambda: 1059.0)
    assert excluded_hosts(experiment) == ("node1",)
    monkeypatch.setattr("time.time", lambda: 1061.0)
    assert excluded_hosts(experiment) == ()
    monkeypatch.setattr("time.time", lambda: 1059.0)
    assert excluded_hosts(experiment) == ()


def test_no_time_is_no_exclusion(experiment: ExperimentFolder) -> None:
    note_failure(experiment.trial(), 1, ill("node1"))
    exclusions(experiment, nodes=1, exclude_nodes_for_min=0).of_ill_nodes(1)
    assert excluded_hosts(experiment) == ()


@pytest.mark.parametrize(("log", "excluded"), [("rank-5.log", ("node2",)), ("job.log", ()), ("rank-9.log", ())])
def test_a_log_names_the_node_of_its_rank_for_this_experiment_alone(
    experiment: ExperimentFolder, tmp_path: Path, log: str, excluded: tuple[str, ...]
) -> None:
    nodes = experiment.trial().nodes(1)
    nodes.parent.mkdir()
    write_json(nodes, ["node1", "node2"])
    exclusions(experiment, nodes=2, ranks_per_node=4).of_node_with_log(1, experiment.trial().logs / log, "ECC")
    assert excluded_hosts(experiment) == excluded
    assert excluded_hosts(on_cluster(tmp_path, 2, "alpha")) == ()
