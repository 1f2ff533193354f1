"""Workers as real processes, with scripts as trials: they share a search, fail, are stopped, killed and replaced."""

from __future__ import annotations

import os
import re
import signal
import stat
from pathlib import Path

import pytest

from hpc_det.checkpoint.committed import committed
from hpc_det.launch.job import attempts
from hpc_det.launch.job.agents import Agents
from hpc_det.launch.job.attempts import Attempts
from hpc_det.node.json_files import write_json
from hpc_det.node.process import SignalPipe, start_ticks
from hpc_det.requeue import Action, AttemptEnd, Cause, Decision
from hpc_det.schedulers.shared_answers import SharedAnswers
from hpc_det.schedulers.slurm.scheduler import Slurm
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Exit, Work
from hpc_det.store.attempt import failure_now, note_failure, read_stop, request_stop
from hpc_det.store.journal import Journal
from tests.facts import unnamed
from tests.launch.gang import Gang, is_there, workers
from tests.schedulers.slurm.squeue_on_paper import KNOWS_NONE
from tests.stub import Stub
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.integration

TRIAL = "${HPC_DET_FOLDER##*/}"
"""The number of a trial, as a shell expression."""
FOUR = {"name": "random", "max_trials": 4}
INVALID = """
import os
from hpc_det.store.attempt import Attempt
from hpc_det.launch.job import attempts
from hpc_det.launch.job.attempts import Attempts
from hpc_det.store.attempt import failure_now, note_failure

attempt = Attempt.from_env(os.environ)
if attempt.trial.id == 2:
    note_failure(attempt.trial, attempt.number, failure_now(0, "InvalidHP", user_error=True, invalid_hp=True))
    raise SystemExit(1)
"""


REPORTS_AND_FAILS = """
import os
from hpc_det.store.attempt import Attempt
from hpc_det.search.journal import SearchJournal

attempt = Attempt.from_env(os.environ)
search = SearchJournal(attempt.trial.experiment())
work = search.state().open.get(attempt.worker)
if attempt.trial.id == 1:
    if work.trial == 1:
        search.report(attempt.worker, work, 0.5)
    raise SystemExit(1)
"""


def ends(gang: Gang) -> dict[int, Exit | None]:
    return {number: trial.ended for number, trial in gang.search().trials.items()}


def causes(gang: Gang, trial: int) -> list[tuple[str, str]]:
    events = Journal(gang.experiment.trial(trial).journal).events()
    return [(event["cause"], event["action"]) for event in events if event["event"] == "ended"]


def log(gang: Gang, trial: int) -> list[str]:
    return gang.experiment.trial(trial).job_log.read_text().splitlines()


# --- side by side


def test_two_workers_of_one_job_train_four_trials_two_at_a_time(gang: Gang) -> None:
    gang.search_for(**FOUR)
    both = "touch up-$n; while [ $n -le 2 ] && ! [ -e up-1 -a -e up-2 ]; do sleep 0.01; done"
    gang.plan(f"n={TRIAL}; {both}; echo trial $n was trained by worker $HPC_DET_WORKER")
    job = gang.start_job(2)
    assert job.wait(timeout=DEADLINE_S) == 0
    assert ends(gang) == dict.fromkeys(range(1, 5), Exit.COMPLETED)
    state = gang.search()
    assert (state.finished, state.present, state.open) == (True, {}, {})
    for trial in range(1, 5):
        lines = [line for line in log(gang, trial) if line.startswith("trial ")]
        assert len(lines) == 1, "each trial has a log of its own"
        assert lines[0].startswith(f"trial {trial} was trained by worker ")
        assert causes(gang, trial) == [("finished", "done")]
    printed = gang.printed.read_text()
    assert "trained" not in printed
    assert all(f"trial {trial} until 100" in printed for trial in range(1, 5))
    assert set(re.findall(r"worker \d", printed)) == {"worker 0", "worker 1"}


def test_a_trial_that_fails_for_good_does_not_end_the_others(gang: Gang) -> None:
    gang.search_for(**FOUR)
    gang.plan(f"[ {TRIAL} != 2 ]", max_restarts=1)
    code, _ = gang.run_job()
    assert code == 1
    assert ends(gang) == {1: Exit.COMPLETED, 2: Exit.FAILED, 3: Exit.COMPLETED, 4: Exit.COMPLETED}
    assert causes(gang, 2) == [("failed", "restart"), ("failed", "give up")]


def test_a_trial_with_invalid_hyperparameters_is_replaced(gang: Gang) -> None:
    gang.search_for(**FOUR)
    (gang.code / "invalid.py").write_text(INVALID)
    gang.plan("$PYTHON invalid.py", max_restarts=5)
    gang.run_job()
    assert ends(gang) == {1: Exit.COMPLETED, 2: Exit.INVALID_HP, **dict.fromkeys((3, 4, 5), Exit.COMPLETED)}
    assert causes(gang, 2) == [("failed", "give up")]


def test_a_gang_that_fails_after_its_report_has_reported_all_the_same(gang: Gang) -> None:
    gang.search_for(**FOUR)
    (gang.code / "reports.py").write_text(REPORTS_AND_FAILS)
    gang.plan("$PYTHON reports.py", max_restarts=1)
    code, _ = gang.run_job()
    assert code == 1
    assert causes(gang, 1) == [("failed", "restart"), ("failed", "give up")]
    assert ends(gang) == {1: None, **dict.fromkeys((2, 3, 4), Exit.COMPLETED)}
    state = gang.search()
    assert (state.finished, state.present, state.trials[1].value) == (True, {}, 0.5)


def test_a_trial_that_is_killed_alone_ends_and_its_worker_goes_on(gang: Gang) -> None:
    gang.search_for(**FOUR)
    gang.plan(f"[ {TRIAL} != 2 ] || {{ touch second; sleep 60; }}")
    job = gang.start_job()
    wait_for((gang.code / "second").exists)
    request_stop(gang.experiment.trial(2).stop, attempt=None, reason="kill", source="ada")
    assert job.wait(timeout=DEADLINE_S) == 0
    assert ends(gang) == {2: Exit.CANCELLED, **dict.fromkeys((1, 3, 4), Exit.COMPLETED)}
    assert causes(gang, 2) == [("cancelled", "done")]
    assert gang.search().cancelled is None


SAVES = """
import os
from hpc_det.store.attempt import Attempt
from tests.checkpoint.saved import saved

trial = Attempt.from_env(os.environ).trial
for steps in (10, 20, 30):
    saved(trial.checkpoints, steps)
"""


def test_two_workers_leave_what_the_policy_keeps_over_all_trials(gang: Gang) -> None:
    gang.search_for(**FOUR)
    (gang.code / "saves.py").write_text(SAVES)
    gang.plan(f"PYTHONPATH={Path(__file__).parents[3]} $PYTHON saves.py")
    assert gang.start_job(2).wait(timeout=DEADLINE_S) == 0
    left = {trial.id: [item.steps for item in committed(trial.checkpoints)] for trial in gang.experiment.trials()}
    assert left == {1: [30], 2: [30], 3: [30], 4: [30]}


def test_a_store_that_cannot_be_reached_is_said_and_fails_nobody(gang: Gang) -> None:
    write_json(gang.experiment.storage, {"url": "nowhere://bucket"})
    gang.plan("true")
    assert gang.start_job().wait(timeout=DEADLINE_S) == 0
    said = gang.printed.read_text()
    assert unnamed(said, "checkpoint_storage: ", "nowhere://bucket/1") == []
    assert ends(gang) == {1: Exit.COMPLETED}


def test_a_signal_to_the_job_cancels_the_experiment_after_all_gangs_have_saved(gang: Gang) -> None:
    gang.search_for(**FOUR)
    gang.plan(f"$PYTHON rank.py {TRIAL} --trial")
    job = gang.start_job(2)
    pids = gang.wait_for_ranks(1, 2)
    job.terminate()
    assert job.wait(timeout=DEADLINE_S) == 0
    assert gang.saved() == {"1": "cancel", "2": "cancel"}
    assert not any(map(is_there, pids))
    assert ends(gang) == {1: Exit.CANCELLED, 2: Exit.CANCELLED}
    state = gang.search()
    assert (state.cancelled, state.finished, state.present) == ("a signal to the job", True, {})


def test_a_worker_that_is_given_a_trial_just_before_a_cancellation_does_not_begin_it(gang: Gang) -> None:
    """`cancel` writes stop requests into the folders of known trials, but this trial has no folder yet."""
    gang.search_for(**FOUR)
    search = SearchJournal(gang.experiment)
    gang.plan("touch started")
    search.ask(0, f"{2**22}-1@{os.uname().nodename}")
    search.cancel("ada")
    assert gang.run_job()[0] == 0
    assert not (gang.code / "started").exists()
    assert causes(gang, 1) == [("cancelled", "done")]
    assert gang.search().present == {}


def test_a_worker_that_is_killed_goes_on_with_its_own_trial_once_its_gang_is_gone(gang: Gang) -> None:
    gang.search_for(**FOUR)
    gang.plan(f"$PYTHON rank.py {TRIAL} deaf --trial; touch ended-{TRIAL}")
    job = gang.start_job(2)
    first = gang.wait_for_ranks(1, 2)
    gang.forget_ranks()
    killed = next(pid for pid in workers(job.pid) if is_below(first[0], pid))
    worker = gang.search().trials[1].worker
    os.kill(killed, signal.SIGKILL)
    (again,) = gang.wait_for_ranks(1)
    assert not is_there(first[0]), "two gangs must not write one trial"
    assert is_there(first[1]), "the other worker is not affected"
    assert gang.search().trials[1].worker == worker
    assert len(causes(gang, 1)) == 1
    assert causes(gang, 1)[0][1] == "requeue"
    SearchJournal(gang.experiment).cancel("the end of the test")
    for trial in (1, 2):
        request_stop(gang.experiment.trial(trial).stop, attempt=None, reason="kill", source="the end of the test")
    assert job.wait(timeout=DEADLINE_S) == 0
    assert not is_there(again)


def is_below(pid: int, ancestor: int) -> bool:
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if pid == ancestor:
            return True
    return False


def test_a_worker_that_cannot_go_on_gives_its_work_back(gang: Gang) -> None:
    gang.plan("true")
    gang.trial.job_log.mkdir()
    assert gang.start_job().wait(timeout=DEADLINE_S) == 1
    assert "IsADirectoryError" in gang.printed.read_text()
    state = gang.search()
    assert (state.open, state.present, state.finished) == ({}, {}, False)
    gang.trial.job_log.rmdir()
    assert gang.run_job()[0] == 0
    assert ends(gang) == {1: Exit.COMPLETED}


def test_what_a_job_writes_is_its_owners_alone(gang: Gang) -> None:
    """A batch job's umask is 022."""
    former = os.umask(0o022)
    try:
        gang.search_for(**FOUR)
        gang.plan(f"$PYTHON rank.py {TRIAL} & $PYTHON rank.py {TRIAL}0 & wait; false", max_restarts=0)
        job = gang.start_job(2)
        gang.wait_for_ranks(1, 2)
        job.terminate()
        job.wait(timeout=DEADLINE_S)
    finally:
        os.umask(former)
    for folder in (gang.experiment.trial(2).path, gang.experiment.search):
        for path in folder.rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


# --- several trials in turn


@pytest.fixture
def alive() -> str:
    """Return the id of a running job: that of this process."""
    return f"{os.getpid()}-{start_ticks(os.getpid())}@{os.uname().nodename}"


def test_a_trial_whose_former_gang_still_saves_begins_when_that_is_gone(gang: Gang, alive: str) -> None:
    """The search assigns a trial to the next worker as soon as rank 0 of its former gang has reported."""
    gang.plan("touch started")
    gang.journal.started(1, alive, worker=5)
    job = gang.start_job()
    wait_for(lambda: gang.trial.job_log.exists() and "worker 5" in gang.trial.job_log.read_text())
    assert not (gang.code / "started").exists()
    gang.journal.ended(1, AttemptEnd(cause=Cause.WAITING, steps=8), Decision(Action.WAIT, "waiting"), None)
    assert job.wait(timeout=DEADLINE_S) == 0
    assert gang.ends() == [("waiting", "wait"), ("finished", "done")]


def test_a_local_job_that_is_told_to_end_while_it_waits_cancels(gang: Gang, alive: str) -> None:
    gang.plan("touch started")
    gang.journal.started(1, alive, worker=5)
    job = gang.start_job()
    wait_for(lambda: gang.trial.job_log.exists() and "worker 5" in gang.trial.job_log.read_text())
    job.terminate()
    gang.journal.ended(1, AttemptEnd(cause=Cause.WAITING, steps=8), Decision(Action.WAIT, "waiting"), None)
    assert job.wait(timeout=DEADLINE_S) == 0
    assert not (gang.code / "started").exists()
    assert gang.ends() == [("waiting", "wait"), ("cancelled", "done")]


def test_a_former_gang_whose_job_has_ended_is_not_waited_for(gang: Gang) -> None:
    gang.plan("true")
    gang.journal.started(1, f"{2**22}-1@{os.uname().nodename}", worker=5)
    assert gang.run_job()[0] == 0
    assert gang.ends() == [("node lost", "requeue"), ("finished", "done")]


def test_a_former_gang_of_unknown_state_is_waited_for_as_long_as_a_save_may_take(
    gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "NO_NEWS_S", 0)
    monkeypatch.setattr(Attempts, "_run", lambda self: Action.DONE)
    agents = Agents([], gang.plan("true"), has_queue=False)
    gang.journal.started(1, "1-1@elsewhere", worker=5)
    signals = SignalPipe([signal.SIGCHLD])
    assert Attempts(gang.trial, 0, agents, signals, []).run() is Action.DONE
    signals.close()


def test_a_signal_that_comes_while_the_end_of_a_former_gang_is_seen_is_heard_before_the_next_one_begins(
    gang: Gang, slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = Agents(["none can be started"], gang.plan("true", scheduler="slurm"), has_queue=True)
    signals = SignalPipe([signal.SIGTERM])
    monkeypatch.setenv("SLURM_JOB_ID", slurm["SLURM_JOB_ID"])
    monkeypatch.setattr(Journal, "open_job", lambda journal: signal.raise_signal(signal.SIGTERM))
    assert Attempts(gang.trial, 0, agents, signals, []).run() is Action.REQUEUE
    signals.close()


def test_a_worker_that_begins_again_ends_the_attempt_that_it_could_not_end(gang: Gang) -> None:
    """It was killed between the report of rank 0 and the end of the gang; it now works on another trial."""
    gang.search_for(**FOUR)
    search = SearchJournal(gang.experiment)
    search.ask(0, f"{2**22}-1@{os.uname().nodename}")
    search.report(0, Work(1, 100), 0.5)
    gang.journal.started(1, f"{2**22}-1@{os.uname().nodename}", worker=0)
    gang.plan("true")
    assert gang.run_job()[0] == 0
    assert gang.ends() == [("node lost", "requeue")]
    assert [causes(gang, trial) for trial in (2, 3, 4)] == [[("finished", "done")]] * 3


# --- under Slurm's commands


@pytest.fixture
def slurm(stub: Stub, tmp_path: Path) -> dict[str, str]:
    """Return the environment of a Slurm job with stubs of `scontrol` and `squeue` that record their arguments
    and print a file.
    """
    for name in ("scontrol", "squeue"):
        stub(name, f'echo "{name} $@" >>{tmp_path}/asked\ncat {tmp_path}/{name}')
    (tmp_path / "scontrol").write_text("JobState=RUNNING EndTime=2026-11-20T12:00:00 PreemptTime=2026-11-20T11:59:30\n")
    (tmp_path / "squeue").write_text("4711_0|RUNNING|None\n")
    return {"SLURM_JOB_ID": "4711", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "node1"}


def asked(tmp_path: Path, command: str) -> list[str]:
    path = tmp_path / "asked"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.startswith(command)]


ELEMENT = {"SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "0"}


def test_a_preempted_job_with_several_workers_is_requeued_once_and_each_goes_on_with_its_trial(
    gang: Gang, slurm: dict[str, str], tmp_path: Path
) -> None:
    gang.search_for(**FOUR)
    gang.plan(f"$PYTHON rank.py {TRIAL} --trial", scheduler="slurm")
    job = gang.start_job(2, **slurm)
    gang.wait_for_ranks(1, 2)
    before = dict(gang.search().open)
    job.terminate()
    assert job.wait(timeout=DEADLINE_S) == 0
    assert gang.saved() == {"1": "signal", "2": "signal"}
    assert asked(tmp_path, "scontrol requeue") == ["scontrol requeue 4711"]
    state = gang.search()
    assert (state.open, state.present, state.cancelled) == (before, {0: "4711", 1: "4711"}, None)

    gang.plan("true", scheduler="slurm")
    assert gang.start_job(2, **slurm).wait(timeout=DEADLINE_S) == 0
    for trial in (1, 2):
        assert causes(gang, trial) == [("preempted", "requeue"), ("finished", "done")]
    assert ends(gang) == dict.fromkeys(range(1, 5), Exit.COMPLETED)


def test_workers_that_are_about_to_start_hear_of_a_preemption(
    gang: Gang, slurm: dict[str, str], tmp_path: Path
) -> None:
    gang.search_for(**FOUR)
    gang.plan(f"$PYTHON rank.py {TRIAL} --trial", scheduler="slurm")
    job = gang.start_job(2, **slurm)
    wait_for(lambda: len(workers(job.pid)) == 2)
    job.terminate()
    assert job.wait(timeout=DEADLINE_S) == 0
    assert asked(tmp_path, "scontrol requeue") == ["scontrol requeue 4711"]
    assert set(gang.search().open) == {0, 1}


def test_a_worker_that_starts_again_hears_of_an_earlier_preemption(
    gang: Gang, slurm: dict[str, str], tmp_path: Path
) -> None:
    gang.search_for(**FOUR)
    gang.plan(f"$PYTHON rank.py {TRIAL} --trial", scheduler="slurm")
    job = gang.start_job(2, **slurm)
    gang.wait_for_ranks(1, 2)
    job.send_signal(signal.SIGSTOP)
    os.kill(workers(job.pid)[0], signal.SIGKILL)
    job.terminate()
    job.send_signal(signal.SIGCONT)
    assert job.wait(timeout=DEADLINE_S) == 0
    assert asked(tmp_path, "scontrol requeue") == ["scontrol requeue 4711"]
    assert set(gang.search().open) == {0, 1}


def test_a_job_that_its_owner_cancels_begins_no_other_trial(gang: Gang, slurm: dict[str, str], tmp_path: Path) -> None:
    """Another trial would be killed with the job at the end of the grace time."""
    gang.search_for(**FOUR)
    gang.plan(f"touch began-{TRIAL}; $PYTHON rank.py {TRIAL} --trial", scheduler="slurm")
    (tmp_path / "scontrol").write_text("JobState=CANCELLED Reason=None\n")
    job = gang.start_job(**slurm)
    gang.wait_for_ranks(1)
    job.terminate()
    assert job.wait(timeout=DEADLINE_S) == 0
    assert not (gang.code / "began-2").exists()
    state = gang.search()
    assert (ends(gang), state.present, state.finished) == ({1: Exit.CANCELLED}, {}, False)


@pytest.mark.parametrize("how", ["finishes", "fails"])
def test_a_preemption_that_comes_too_late_for_an_attempt_is_heard_before_the_next_one(
    gang: Gang, slurm: dict[str, str], tmp_path: Path, how: str
) -> None:
    """An attempt that starts now would be killed at the end of the grace time."""
    gang.search_for(**FOUR)
    gang.plan(f"touch began-{TRIAL}; while ! [ -e go ]; do sleep 0.01; done; [ {how} = finishes ]", scheduler="slurm")
    first = gang.experiment.trial(1)
    job = gang.start_job(**slurm)
    wait_for((gang.code / "began-1").exists)
    if how == "fails":
        note_failure(first, 1, failure_now(0, "ValueError"))
    else:
        write_json(first.outcome, {"attempt": 1, "kind": "finished"})
    job.terminate()
    wait_for(lambda: read_stop(first.stop, 1))
    (gang.code / "go").touch()
    assert job.wait(timeout=DEADLINE_S) == 0
    assert asked(tmp_path, "scontrol requeue") == ["scontrol requeue 4711"]
    assert not (gang.code / "began-2").exists()
    assert causes(gang, 1)[0][0] == {"finishes": "finished", "fails": "failed"}[how]


def test_control_c_that_comes_too_late_for_a_trial_cancels_the_others(gang: Gang) -> None:
    gang.search_for(**FOUR)
    gang.plan(f"touch began-{TRIAL}; while ! [ -e go ]; do sleep 0.01; done")
    job = gang.start_job()
    wait_for((gang.code / "began-1").exists)
    write_json(gang.experiment.trial(1).outcome, {"attempt": 1, "kind": "finished"})
    job.send_signal(signal.SIGINT)
    wait_for(gang.experiment.trial(1).stop.exists)
    (gang.code / "go").touch()
    assert job.wait(timeout=DEADLINE_S) == 0
    assert not (gang.code / "began-2").exists()
    assert gang.search().cancelled == "a signal to the job"


def test_an_element_of_an_array_is_the_worker_of_its_place(gang: Gang, slurm: dict[str, str]) -> None:
    gang.plan("true", scheduler="slurm")
    seventh = {**ELEMENT, "SLURM_ARRAY_TASK_ID": "7"}
    assert gang.run_job(**slurm, **seventh)[0] == 0
    assert "worker 7: trial 1 until 100" in gang.printed.read_text()


def test_a_worker_takes_the_work_of_another_one_whose_job_is_gone(
    gang: Gang, slurm: dict[str, str], tmp_path: Path
) -> None:
    gang.search_for(name="random", max_trials=2)
    gang.plan("true", scheduler="slurm")
    assert SearchJournal(gang.experiment).ask(3, "4711_3") == Work(1, 100)
    (tmp_path / "squeue").write_text("4711_0|RUNNING|None\n4711_3|NODE_FAIL|None\n")
    assert gang.run_job(**slurm, **ELEMENT)[0] == 0
    assert unnamed(gang.printed.read_text(), "worker 3", "job 4711_3") == []
    assert [line.split("--jobs=")[1].split()[0] for line in asked(tmp_path, "squeue")] == ["4711"]
    state = gang.search()
    assert (ends(gang), state.finished, state.present) == ({1: Exit.COMPLETED, 2: Exit.COMPLETED}, True, {})


@pytest.mark.parametrize(
    "answer", ["4711_3|RUNNING|None", "4711_3|PENDING|BeginTime", "4711_3|COMPLETING|None", "4711_3|TELEPORTING|None"]
)
def test_a_worker_whose_job_is_still_there_keeps_its_work(
    gang: Gang, slurm: dict[str, str], tmp_path: Path, answer: str
) -> None:
    gang.search_for(name="random", max_trials=2)
    gang.plan("true", scheduler="slurm")
    SearchJournal(gang.experiment).ask(3, "4711_3")
    (tmp_path / "squeue").write_text(f"{answer}\n")
    assert gang.run_job(**slurm, **ELEMENT)[0] == 0
    assert gang.search().open == {3: Work(1, 100)}
    assert ends(gang) == {1: None, 2: Exit.COMPLETED}


def test_a_scheduler_that_gives_no_answer_loses_nobody(gang: Gang, slurm: dict[str, str], tmp_path: Path) -> None:
    gang.search_for(name="random", max_trials=2)
    gang.plan("true", scheduler="slurm")
    SearchJournal(gang.experiment).ask(3, "4711_3")
    (tmp_path / "squeue").unlink()
    assert gang.run_job(**slurm, **ELEMENT)[0] == 0
    assert gang.search().open == {3: Work(1, 100)}


def test_a_successor_does_not_believe_what_was_heard_of_the_job_before_it_ended(
    gang: Gang, slurm: dict[str, str], tmp_path: Path
) -> None:
    gang.plan("true", scheduler="slurm")
    SearchJournal(gang.experiment).ask(0, "4710")
    SharedAnswers(gang.experiment.root(), Slurm()).status(["4710"], lambda command: "4710|RUNNING|None\n")
    (tmp_path / "squeue").write_text("4710|NODE_FAIL|None\n")
    assert gang.run_job(**slurm)[0] == 0
    assert gang.ends() == [("finished", "done")]


def test_the_scheduler_is_not_asked_where_nobody_else_has_work(
    gang: Gang, slurm: dict[str, str], tmp_path: Path
) -> None:
    gang.search_for(**FOUR)
    gang.plan("true", scheduler="slurm")
    assert gang.run_job(**slurm)[0] == 0
    assert asked(tmp_path, "squeue") == []


@pytest.mark.parametrize("answer", ["echo '4711_5|NODE_FAIL|None'", "echo '4711_5|PENDING|BeginTime'", KNOWS_NONE])
def test_a_former_gang_whose_job_is_not_running_is_not_waited_for(
    gang: Gang, slurm: dict[str, str], stub: Stub, answer: str
) -> None:
    gang.plan("true", scheduler="slurm")
    gang.journal.started(1, "4711_5", worker=5)
    stub("squeue", answer)
    assert gang.run_job(**slurm, **ELEMENT)[0] == 0
    assert gang.ends() == [("node lost", "requeue"), ("finished", "done")]


def test_a_slurm_job_that_is_told_to_go_while_it_waits_for_a_former_gang_goes_at_once(
    gang: Gang, slurm: dict[str, str], tmp_path: Path
) -> None:
    gang.plan("touch started", scheduler="slurm")
    gang.journal.started(1, "4711_5", worker=5)
    (tmp_path / "squeue").write_text("4711_5|RUNNING|None\n")
    job = gang.start_job(**slurm, **ELEMENT)
    wait_for(lambda: gang.trial.job_log.exists() and "worker 5" in gang.trial.job_log.read_text())
    job.terminate()
    assert job.wait(timeout=DEADLINE_S) == 0
    assert asked(tmp_path, "scontrol requeue") == ["scontrol requeue 4711_0"]
    assert gang.search().open == {0: Work(1, 100)}
    assert gang.ends() == []
