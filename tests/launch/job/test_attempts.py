"""Attempts of a trial in a job that is a real process: the journal, and the decisions from recorded facts."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from hpc_det.launch.job import attempts
from hpc_det.launch.job.agents import LOOK_S, Agents
from hpc_det.node.json_files import write_json
from hpc_det.node.process import SignalPipe, start_ticks
from hpc_det.requeue import Action, AttemptEnd, Cause, Decision
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Exit
from hpc_det.store.attempt import failure_now, note_failure, read_stop, request_stop
from tests.facts import each_names, unnamed
from tests.labs.slurm import SlurmLab
from tests.launch.gang import EFFECTIVE, Gang, children, is_there
from tests.launch.watch.suspension import Suspension
from tests.stub import Stub
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.integration

NOTES_A_FAILURE = """
import os
from hpc_det.store.attempt import Attempt
from hpc_det.store.attempt import failure_now, note_failure

attempt = Attempt.from_env(os.environ)
text = "model_def.py: no class 'MyTrial'"
note_failure(attempt.trial, attempt.number, failure_now(1, text, user_error=True, traceback="Traceback of rank 1"))
raise SystemExit(1)
"""

GONE = f"{2**22}-1@{socket.gethostname()}"
"""Id of a job that has ended."""


def failures(gang: Gang) -> list[str | None]:
    return [event["failure"] for event in gang.journal.events() if event["event"] == "ended"]


# --- the ends of an attempt


def test_exit_0_is_a_finished_trial(gang: Gang) -> None:
    gang.plan("echo trained")
    code, output = gang.run_job()
    assert code == 0
    assert gang.ends() == [("finished", "done")]
    assert output.splitlines()[0].endswith("attempt 1 begins")
    assert "trained" in output.splitlines()
    assert output.splitlines()[-1].endswith("done: finished")


def test_the_end_of_an_attempt_has_the_nodes_of_the_gang(gang: Gang) -> None:
    gang.plan("true", ranks_per_node=1)
    gang.run_job()
    (end,) = [event for event in gang.journal.events() if event["event"] == "ended"]
    assert end["nodes"] == [socket.gethostname()]


IDLE = """
class PyTorchTrial: ...
class MyTrial(PyTorchTrial): ...
"""


@pytest.mark.parametrize("code", [IDLE, "print('trained')"])
def test_a_script_that_ends_without_a_training_is_noted_and_finished(gang: Gang, code: str) -> None:
    (gang.code / "model_def.py").write_text(code)
    write_json(gang.experiment.effective, {**EFFECTIVE, "entrypoint": "python3 model_def.py"})
    gang.plan("exec $PYTHON model_def.py", ranks_per_node=1)
    _, output = gang.run_job()
    assert gang.ends() == [("finished", "done")]
    assert unnamed(output, "note: ", "module:Class" if code != IDLE else "model_def:MyTrial") == []
    problems = [event["problem"] for event in gang.journal.events() if event["event"] == "problem"]
    assert len(problems) == (code == IDLE)


def test_a_finished_script_with_a_report_is_not_noted(gang: Gang) -> None:
    gang.trial.metrics.write_text(f"{json.dumps({'kind': 'training', 'steps': 5, 'attempt': 1, 'time': 1.0})}\n")
    gang.plan("true", ranks_per_node=1)
    _, output = gang.run_job()
    assert "note: " not in output


def test_what_killed_writers_have_left_is_removed_when_an_attempt_begins(gang: Gang) -> None:
    gang.plan("echo trained")
    left = gang.trial.stop.with_name(f".{gang.trial.stop.name}.{'a' * 32}")
    left.touch()
    os.utime(left, (0, 0))
    gang.run_job()
    assert not left.exists()


def test_a_failure_is_restarted_as_often_as_allowed_and_then_given_up(gang: Gang) -> None:
    gang.plan("echo x >>runs; exit 3", max_restarts=2)
    code, output = gang.run_job()
    assert code == 1
    assert gang.ends() == [("failed", "restart"), ("failed", "restart"), ("failed", "give up")]
    assert (gang.code / "runs").read_text() == "x\nx\nx\n"
    blamed, *again = failures(gang)
    assert again == [blamed] * 2
    assert unnamed(str(blamed), "entrypoint", socket.gethostname(), "exit code 3", gang.trial.job_log) == []
    assert output.count(str(blamed)) == 3
    assert unnamed(output.splitlines()[-1], "give up", "failure 3", "max_restarts", 2) == []


def test_an_error_that_comes_back_is_reported_once_with_the_command_that_ends_the_trial(gang: Gang) -> None:
    gang.plan("exit 3", max_restarts=3)
    gang.run_job()
    command = f"hpc-det trial kill {gang.experiment.id}/{gang.trial.id}"
    reasons = [event["why"] for event in gang.journal.events() if event["event"] == "ended"]
    assert [command in why for why in reasons] == [False, True, False, False]


def test_a_log_policy_cancels_retries_and_names_the_line(gang: Gang) -> None:
    """The policy is matched with the log of this attempt alone: an earlier one may have failed for another reason."""
    cancels = {"name": "OOM", "pattern": "out of memory", "action": "cancel_retries"}
    policies = [cancels, {"name": None, "pattern": "^second", "action": None}]
    write_json(gang.experiment.effective, {**EFFECTIVE, "log_policies": policies})
    gang.plan("[ $HPC_DET_NUMBER = 1 ] || echo second: GPU 0 out of memory; exit 3", max_restarts=5)
    code, output = gang.run_job()
    assert code == 1
    assert gang.ends() == [("failed", "restart"), ("failed", "give up")]
    assert unnamed(output.splitlines()[-1], "give up", "log policy 'OOM'") == []
    problems = [event["problem"] for event in gang.journal.events() if event["event"] == "problem"]
    line = "second: GPU 0 out of memory"
    each_names(problems, ["log policy 'OOM'", line], ["log policy '^second'", line])


def test_a_trial_that_fails_once_may_finish_in_its_second_attempt(gang: Gang) -> None:
    gang.plan("[ $HPC_DET_NUMBER = 2 ]", max_restarts=1)
    assert gang.run_job()[0] == 0
    assert gang.ends() == [("failed", "restart"), ("finished", "done")]


def test_an_entrypoint_that_a_signal_ends_has_failed(gang: Gang) -> None:
    gang.plan("kill -KILL $$")
    assert gang.run_job()[0] == 1
    assert gang.ends() == [("failed", "give up")]
    assert unnamed(str(failures(gang)[0]), "SIGKILL") == []


def test_an_entrypoint_that_does_not_exist_is_named_in_the_journal(gang: Gang) -> None:
    gang.plan(["no-such-program"])
    code, output = gang.run_job()
    assert code == 1
    assert unnamed(str(failures(gang)[0]), "entrypoint: no-such-program: ", os.strerror(errno.ENOENT)) == []
    assert "Traceback" not in output


def test_the_users_error_is_not_tried_again(gang: Gang) -> None:
    (gang.code / "fails.py").write_text(NOTES_A_FAILURE)
    gang.plan("$PYTHON fails.py", max_restarts=5)
    code, output = gang.run_job()
    assert code == 1
    assert gang.ends() == [("failed", "give up")]
    (failure,) = failures(gang)
    assert unnamed(str(failure), "rank 1", socket.gethostname(), "model_def.py: no class 'MyTrial'") == []
    assert unnamed(output, "Traceback", "rank 1") == []


LAUNCHERS = {"none": "exec $PYTHON", "direct": "exec $PYTHON -m hpc_det.launch.direct"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("code", "fact"),
    [("import no_such_module", "no_such_module"), ("def f(:", "SyntaxError"), ("from os import x_y", "x_y")],
)
def test_a_script_whose_code_cannot_be_loaded_is_started_once(gang: Gang, launcher: str, code: str, fact: str) -> None:
    (gang.code / "train.py").write_text(f"{code}\n")
    gang.plan(f"echo x >>runs; {LAUNCHERS[launcher]} train.py", max_restarts=5)
    assert gang.run_job()[0] == 1
    assert gang.ends() == [("failed", "give up")]
    assert (gang.code / "runs").read_text() == "x\n"
    assert unnamed(str(failures(gang)[0]), socket.gethostname(), fact) == []


def test_a_script_that_does_not_exist_is_started_once(gang: Gang) -> None:
    gang.plan("exec $PYTHON no_such_file.py", max_restarts=5)
    assert gang.run_job()[0] == 1
    assert gang.ends() == [("failed", "give up")]
    assert unnamed(str(failures(gang)[0]), "exit code 2", "no_such_file.py") == []


def test_an_import_that_fails_after_the_trial_has_reported_is_tried_again(gang: Gang) -> None:
    gang.plan("exec $PYTHON -c 'import no_such_module'", max_restarts=1)
    report = {"kind": "training", "steps": 5, "attempt": 1, "time": 1.0}
    gang.trial.metrics.write_text(f"{json.dumps(report)}\n")
    assert gang.run_job()[0] == 1
    assert gang.ends() == [("failed", "restart"), ("failed", "give up")]


def test_a_kill_after_an_import_error_that_was_caught_is_tried_again(gang: Gang) -> None:
    caught = "try: import nothere\nexcept ImportError: traceback.print_exc()\nsys.stderr.flush()\n"
    (gang.code / "train.py").write_text(f"import os, sys, traceback\n{caught}os.kill(os.getpid(), 9)")
    gang.plan((sys.executable, "train.py"), max_restarts=1)
    assert gang.run_job()[0] == 1
    assert gang.ends() == [("failed", "restart"), ("failed", "give up")]


def test_output_at_exit_hides_no_import_that_fails(gang: Gang) -> None:
    (gang.code / "train.py").write_text("import atexit\natexit.register(lambda: print('bye'))\nimport nothere")
    gang.plan((sys.executable, "train.py"), max_restarts=2)
    assert gang.run_job()[0] == 1
    assert gang.ends() == [("failed", "give up")]
    assert unnamed(str(failures(gang)[0]), "exit code 1", "nothere") == []


def test_a_library_that_this_node_cannot_load_is_tried_again(gang: Gang) -> None:
    gang.plan("echo 'ImportError: libx.so: cannot open shared object file' >&2; exit 1", max_restarts=1)
    assert gang.run_job()[0] == 1
    assert gang.ends() == [("failed", "restart"), ("failed", "give up")]


def test_of_a_launcher_whose_ranks_share_a_log_the_cause_of_the_failed_rank_is_named(gang: Gang) -> None:
    rank = [sys.executable, "-m", "hpc_det.launch.launchers.rank", "script", sys.executable, "train.py"]
    (gang.code / "train.py").write_text("raise ValueError('loss is nan')")
    gang.plan(f"RANK=0 {' '.join(rank)}", ranks_per_node=1)
    assert gang.run_job()[0] == 1
    assert unnamed(str(failures(gang)[0]), "rank 0", "exit code 1", "ValueError: loss is nan") == []


def test_who_killed_a_program_of_the_entrypoint_is_named_as_far_as_it_is_known(gang: Gang) -> None:
    (gang.code / "train.py").write_text("import os, time; open('up', 'w').write(str(os.getpid())); time.sleep(60)")
    gang.plan("$PYTHON train.py; exit $?")
    job = gang.start_job()
    wait_for(lambda: (gang.code / "up").exists() and (gang.code / "up").read_text())
    pid = int((gang.code / "up").read_text())
    time.sleep(1)  # the agent looks at the programs five times a second at most
    os.kill(pid, signal.SIGKILL)
    assert job.wait(timeout=DEADLINE_S) == 1
    facts = [137, "SIGKILL", f"process {pid} (", "train.py", "OOM killer ended no process on this node"]
    assert unnamed(str(failures(gang)[0]), *facts) == []


def test_a_killed_rank_is_named_and_the_next_attempt_begins_with_nobody_left(gang: Gang) -> None:
    gang.plan_ranks(0, 1, argument="deaf", max_restarts=1)
    job = gang.start_job()
    first = gang.wait_for_ranks(0, 1)
    gang.forget_ranks()
    os.kill(first[0], signal.SIGKILL)
    second = gang.wait_for_ranks(0, 1)
    assert not any(map(is_there, first))
    os.kill(second[1], signal.SIGKILL)
    assert job.wait(timeout=DEADLINE_S) == 1
    assert not any(map(is_there, second))
    assert gang.ends() == [("failed", "restart"), ("failed", "give up")]
    facts = [
        [f"rank {rank}", socket.gethostname(), f"process {pids[rank]}"] for rank, pids in enumerate((first, second))
    ]
    each_names(map(str, failures(gang)), *facts)


def test_a_killed_agent_is_a_failure_and_leaves_no_process(gang: Gang) -> None:
    """`stranger` is in another session and does not notice the end of the agent."""
    gang.plan("setsid sleep 60 & echo $! >stranger; $PYTHON rank.py 0")
    job = gang.start_job()
    (rank,) = gang.wait_for_ranks(0)
    stranger = int((gang.code / "stranger").read_text())
    (agent,) = children(job.pid)
    os.kill(agent, signal.SIGKILL)
    assert job.wait(timeout=DEADLINE_S) == 1
    assert not any(map(is_there, (rank, stranger)))
    assert gang.ends() == [("failed", "give up")]


# --- stopping


def test_term_to_a_local_job_cancels_it_after_the_ranks_have_saved(gang: Gang) -> None:
    gang.plan_ranks(0, 1)
    job = gang.start_job()
    gang.wait_for_ranks(0, 1)
    job.terminate()
    assert job.wait(timeout=DEADLINE_S) == 0
    assert gang.saved() == {"0": "cancel", "1": "cancel"}
    assert gang.ends() == [("cancelled", "done")]


def test_control_c_cancels_a_local_job_though_its_agent_hears_it_too(gang: Gang) -> None:
    """A terminal sends INT to every process of the group."""
    gang.plan_ranks(0, 1)
    job = gang.start_job()
    gang.wait_for_ranks(0, 1)
    os.killpg(job.pid, signal.SIGINT)
    assert job.wait(timeout=DEADLINE_S) == 0
    assert sorted(gang.saved()) == ["0", "1"]
    assert gang.ends() == [("cancelled", "done")]


def test_an_agent_that_hears_a_signal_is_preempted_and_the_local_job_goes_on(gang: Gang) -> None:
    gang.plan_ranks(0, 1)
    job = gang.start_job()
    gang.wait_for_ranks(0, 1)
    gang.forget_ranks()
    (agent,) = children(job.pid)
    os.kill(agent, signal.SIGTERM)
    gang.wait_for_ranks(0, 1)
    assert gang.saved() == {"0": "signal", "1": "signal"}
    assert gang.ends() == [("preempted", "requeue")]
    assert gang.journal.open_attempt() == 2
    job.terminate()
    assert job.wait(timeout=DEADLINE_S) == 0
    assert gang.ends()[1:] == [("cancelled", "done")]


def test_a_kill_request_ends_ranks_that_listen_to_nothing_at_once(gang: Gang) -> None:
    """The agent is suspended, so the job itself must end the ranks."""
    gang.plan_ranks(0, 1, argument="deaf")
    job = gang.start_job()
    pids = gang.wait_for_ranks(0, 1)
    (agent,) = children(job.pid)
    os.kill(agent, signal.SIGSTOP)
    request_stop(gang.trial.stop, attempt=1, reason="kill", source="hpc-det experiment kill")
    job.terminate()
    assert job.wait(timeout=DEADLINE_S) == 0
    assert not any(map(is_there, pids))
    assert gang.saved() == {}
    assert gang.ends() == [("cancelled", "done")]
    assert failures(gang) == [None]


def test_a_script_that_is_killed_has_not_finished(gang: Gang) -> None:
    gang.plan("touch up; sleep 60")
    job = gang.start_job()
    wait_for((gang.code / "up").exists)
    request_stop(gang.trial.stop, attempt=None, reason="kill", source="a test")
    job.terminate()
    assert job.wait(timeout=DEADLINE_S) == 0
    assert gang.ends() == [("cancelled", "done")]


@pytest.mark.parametrize("reason", ["cancel", "kill"])
def test_a_request_that_was_made_before_the_first_attempt_starts_nothing(gang: Gang, reason: str) -> None:
    gang.plan("touch ran")
    request_stop(gang.trial.stop, attempt=None, reason=reason, source="a test")  # type: ignore[arg-type]
    assert gang.run_job()[0] == 0
    assert gang.ends() == [("cancelled", "done")]
    assert not (gang.code / "ran").exists()


def test_a_trial_that_finishes_though_it_was_asked_to_stop_has_finished(gang: Gang) -> None:
    gang.plan("touch up; while ! [ -e go ]; do sleep 0.01; done")
    job = gang.start_job()
    wait_for((gang.code / "up").exists)
    job.terminate()
    wait_for(gang.trial.stop.exists)
    write_json(gang.trial.outcome, {"attempt": 1, "kind": "finished"})
    (gang.code / "go").touch()
    assert job.wait(timeout=DEADLINE_S) == 0
    assert gang.ends() == [("finished", "done")]


def test_a_failure_on_the_way_out_after_a_stop_request_is_not_held_against_the_trial(gang: Gang) -> None:
    gang.plan("touch up; while ! [ -e go ]; do sleep 0.01; done; exit 3", max_restarts=5)
    job = gang.start_job()
    wait_for((gang.code / "up").exists)
    job.terminate()
    wait_for(gang.trial.stop.exists)
    (gang.code / "go").touch()
    assert job.wait(timeout=DEADLINE_S) == 0
    assert gang.ends() == [("cancelled", "done")]


def test_a_failure_before_the_stop_request_is_a_failure(gang: Gang) -> None:
    gang.plan("touch up; while ! [ -e go ]; do sleep 0.01; done; exit 3")
    job = gang.start_job()
    wait_for((gang.code / "up").exists)
    note_failure(gang.trial, 1, failure_now(1, "ValueError"))
    job.terminate()
    wait_for(gang.trial.stop.exists)
    (gang.code / "go").touch()
    assert job.wait(timeout=DEADLINE_S) == 1
    assert gang.ends() == [("failed", "give up")]
    assert failures(gang) == [f"rank 1 on {socket.gethostname()}: ValueError"]


# --- starting again


def test_a_second_start_of_a_finished_job_starts_nothing(gang: Gang) -> None:
    gang.plan("echo x >>runs")
    gang.run_job()
    journal = gang.trial.journal.read_text()
    assert gang.run_job() == (0, "")
    assert unnamed(gang.printed.read_text().splitlines()[-1], "worker 0") == []
    assert (gang.code / "runs").read_text() == "x\n"
    assert gang.trial.journal.read_text() == journal


def test_a_second_start_of_a_job_that_was_given_up_starts_nothing(gang: Gang) -> None:
    gang.plan("echo x >>runs; false")
    assert [gang.run_job()[0], gang.run_job()[0]] == [1, 0]
    assert (gang.code / "runs").read_text() == "x\n"
    assert gang.search().trials[1].ended is Exit.FAILED


@pytest.mark.parametrize(
    ("cause", "action", "code", "how"),
    [
        (Cause.FINISHED, Action.DONE, 0, Exit.COMPLETED),
        (Cause.CANCELLED, Action.DONE, 0, Exit.CANCELLED),
        (Cause.FAILED, Action.GIVE_UP, 1, Exit.FAILED),
    ],
)
def test_a_job_that_was_killed_before_it_told_the_search_of_the_end_tells_it_now(
    gang: Gang, cause: Cause, action: Action, code: int, how: Exit
) -> None:
    gang.plan("touch ran")
    SearchJournal(gang.experiment).ask(0, GONE)
    gang.journal.started(1, GONE)
    gang.journal.ended(1, AttemptEnd(cause=cause, steps=0), Decision(action, cause.value), None)
    found, output = gang.run_job()
    assert found == code
    assert unnamed(output.splitlines()[-1], action.value, cause.value) == []
    assert (gang.search().trials[1].ended, gang.search().present) == (how, {})
    assert not (gang.code / "ran").exists()


@pytest.mark.parametrize(("kind", "end"), [("finished", ("finished", "done")), ("waiting", ("waiting", "wait"))])
def test_a_job_that_was_killed_after_the_ranks_were_done_ends_the_attempt_as_they_did(
    gang: Gang, kind: str, end: tuple[str, str]
) -> None:
    gang.plan("touch ran")
    SearchJournal(gang.experiment).ask(0, GONE)
    gang.journal.started(1, GONE)
    write_json(gang.trial.outcome, {"attempt": 1, "kind": kind, "steps": 100, "saved": True})
    assert gang.run_job()[0] == 0
    assert gang.ends()[0] == end
    assert (gang.code / "ran").exists() == (kind == "waiting"), "the search wants more of that one"


def test_an_attempt_that_nobody_ended_lost_its_node_and_the_next_one_begins(gang: Gang) -> None:
    gang.plan("true")
    gang.journal.started(1, GONE)
    assert gang.run_job()[0] == 0
    assert gang.ends() == [("node lost", "requeue"), ("finished", "done")]
    assert [event["late"] for event in gang.journal.events() if event["event"] == "ended"] == [True, False]
    assert gang.journal.last_attempt() == 2


@pytest.mark.parametrize(
    ("reason", "ends"),
    [
        ("signal", [("preempted", "requeue"), ("finished", "done")]),
        ("time limit", [("time limit", "requeue"), ("finished", "done")]),
        ("cancel", [("cancelled", "done")]),
        ("kill", [("cancelled", "done")]),
    ],
)
def test_an_attempt_without_an_end_and_with_a_stop_request(gang: Gang, reason: str, ends: list[object]) -> None:
    gang.plan("true")
    gang.journal.started(1, GONE)
    request_stop(gang.trial.stop, attempt=1, reason=reason, source="a test")  # type: ignore[arg-type]
    assert gang.run_job()[0] == 0
    assert gang.ends() == ends


def test_failures_of_earlier_starts_of_the_job_count(gang: Gang) -> None:
    gang.plan("false", max_restarts=1)
    gang.journal.started(1, GONE)
    end = AttemptEnd(cause=Cause.FAILED, steps=0)
    gang.journal.ended(1, end, Decision(Action.RESTART, "failure 1 of 1"), None)
    assert gang.run_job()[0] == 1
    assert gang.ends()[1:] == [("failed", "give up")]


def test_a_stop_request_of_an_earlier_attempt_is_over(gang: Gang) -> None:
    gang.plan("true")
    request_stop(gang.trial.stop, attempt=7, reason="kill", source="long ago")
    assert gang.run_job()[0] == 0
    assert gang.ends() == [("finished", "done")]


def test_an_outcome_of_an_earlier_attempt_is_not_taken_for_this_ones(gang: Gang) -> None:
    write_json(gang.trial.outcome, {"attempt": 1, "kind": "finished"})
    gang.journal.started(1, GONE)
    gang.journal.ended(1, AttemptEnd(cause=Cause.PREEMPTED, steps=0), Decision(Action.REQUEUE, "preempted"), None)
    gang.plan("exit 3")
    assert gang.run_job()[0] == 1
    assert gang.ends()[1] == ("failed", "give up")


# --- under Slurm's commands

PREEMPTED = "JobId=4711 JobState=RUNNING EndTime=2026-11-20T12:00:00 PreemptTime=2026-11-20T11:59:30"


def scontrol(folder: Path, job: str) -> str:
    return f'echo "$@" >>{folder}/asked\n[ $1 = show ] && echo "{job}"\nexit 0'


@pytest.fixture
def slurm_job(stub: Stub, tmp_path: Path) -> dict[str, str]:
    """Return the environment of a Slurm job with a stub of `scontrol` that records its arguments."""
    stub("scontrol", scontrol(tmp_path, PREEMPTED))
    return {"SLURM_JOB_ID": "4711", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "node1"}


def test_a_preempted_job_goes_back_into_the_queue_and_on_from_there(
    gang: Gang, slurm_job: dict[str, str], tmp_path: Path
) -> None:
    gang.plan_ranks(0, 1, scheduler="slurm")
    job = gang.start_job(**slurm_job)
    gang.wait_for_ranks(0, 1)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=DEADLINE_S) == 0
    assert gang.saved() == {"0": "signal", "1": "signal"}
    assert gang.ends() == [("preempted", "requeue")]
    assert (tmp_path / "asked").read_text().splitlines()[-1] == "requeue 4711"

    gang.plan("true", scheduler="slurm")
    assert gang.run_job(**slurm_job)[0] == 0
    assert gang.ends() == [("preempted", "requeue"), ("finished", "done")]


def test_a_job_that_is_out_of_time_soon_has_its_ranks_save_without_any_signal(
    gang: Gang, slurm_job: dict[str, str], stub: Stub, tmp_path: Path
) -> None:
    ends_at = datetime.now() + timedelta(seconds=60)
    shows = f"JobId=4711 JobState=RUNNING EndTime={ends_at:%Y-%m-%dT%H:%M:%S}"
    stub("scontrol", scontrol(tmp_path, shows))
    gang.plan_ranks(0, 1, scheduler="slurm", time_limit_min=60)
    job = gang.start_job(**slurm_job)
    assert job.wait(timeout=DEADLINE_S) == 0
    assert gang.saved() == {"0": "time limit", "1": "time limit"}
    assert gang.ends() == [("time limit", "requeue")]
    stop = read_stop(gang.trial.stop, 1)
    assert stop is not None
    assert stop.deadline == int(ends_at.timestamp())
    assert (tmp_path / "asked").read_text().splitlines()[-1] == "requeue 4711"


def test_a_failure_on_slurm_starts_again_on_the_same_nodes(
    gang: Gang, slurm_job: dict[str, str], tmp_path: Path
) -> None:
    gang.plan("[ $HPC_DET_NUMBER = 2 ]", scheduler="slurm", max_restarts=1)
    assert gang.run_job(**slurm_job)[0] == 0
    assert gang.ends() == [("failed", "restart"), ("finished", "done")]
    assert not (tmp_path / "asked").exists()


WAITS_FOR_A_LOST_NODE = """
import sys, time
from pathlib import Path
from hpc_det.store.attempt import Failure, note_failure
from hpc_det.store.folders import TrialFolder

trial, attempt = TrialFolder(Path(sys.argv[1])), int(sys.argv[2])
note_failure(trial, attempt, Failure(rank=None, host="node2", time=time.time() - 60, message="lost", node_lost=True))
time.sleep(600)
"""
"""Like an srun that keeps running after the first node's agent has reported a lost node."""


@pytest.mark.long
def test_a_job_does_not_wait_with_srun_for_a_lost_node_and_goes_back_uncharged_to_others(
    gang: Gang, slurm_job: dict[str, str], tmp_path: Path
) -> None:
    gang.plan("true", scheduler="slurm", nodes=2, max_restarts=0)
    job = gang.start_job(agent=[sys.executable, "-c", WAITS_FOR_A_LOST_NODE], **slurm_job)
    assert job.wait(timeout=DEADLINE_S) == 0
    assert gang.ends() == [("node lost", "requeue")]
    each_names(map(str, failures(gang)), ["node2", "lost"])
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[-2:] == ["requeue 4711", "update JobId=4711 ExcNodeList=node2"]


CANNOT_REACH = """
echo "srun: error: Task launch for StepId=4711.0 failed on node node2: Communication connection failure" >&2
echo "srun: error: Application launch failed: Communication connection failure" >&2
exit 233
"""
"""Behaves like the srun of Slurm 22.05 for a node that is switched off."""


def test_a_node_on_which_srun_could_start_no_agent_is_lost(
    gang: Gang, slurm_job: dict[str, str], tmp_path: Path
) -> None:
    gang.plan("true", scheduler="slurm", nodes=2, max_restarts=0)
    job = gang.start_job(agent=["sh", "-c", CANNOT_REACH], **slurm_job)
    assert job.wait(timeout=DEADLINE_S) == 0
    assert gang.ends() == [("node lost", "requeue")]
    assert (tmp_path / "asked").read_text().splitlines()[-1] == "update JobId=4711 ExcNodeList=node2"


IS_CALLED_DOWN = """
echo "srun: error: Node failure on node2" >&2
exit 0
"""
"""Behaves like the srun of Slurm 22.05 for a node whose slurmd died while its processes live."""


@pytest.mark.parametrize("entrypoint", ["true", "true --trial model_def:Trial"])
def test_an_attempt_on_a_node_that_slurm_calls_down_is_neither_finished_nor_charged(
    gang: Gang, slurm_job: dict[str, str], tmp_path: Path, entrypoint: str
) -> None:
    gang.plan(entrypoint, scheduler="slurm", nodes=2, max_restarts=0)
    job = gang.start_job(agent=["sh", "-c", IS_CALLED_DOWN], **slurm_job)
    assert job.wait(timeout=DEADLINE_S) == 0
    assert gang.ends() == [("node lost", "requeue")]
    assert (tmp_path / "asked").read_text().splitlines()[-1] == "update JobId=4711 ExcNodeList=node2"
    stop = read_stop(gang.trial.stop, 1)
    assert stop is not None
    assert stop.reason == "signal", "its ranks live on there, and would write beside those of the next attempt"
    assert read_stop(gang.trial.stop, 2) is None


FINDS_NOBODY = """
echo "srun: error: Unable to confirm allocation for job 4711: Unable to contact slurm controller (connect failure)" >&2
exit 1
"""


def test_an_attempt_that_slurm_did_not_answer_goes_back_uncharged(
    gang: Gang, slurm_job: dict[str, str], tmp_path: Path
) -> None:
    gang.plan("true", scheduler="slurm", nodes=2, max_restarts=0)
    job = gang.start_job(agent=["sh", "-c", FINDS_NOBODY], **slurm_job)
    assert job.wait(timeout=DEADLINE_S) == 0
    assert gang.ends() == [("scheduler away", "requeue")]
    assert (tmp_path / "asked").read_text().splitlines()[-1] == "requeue 4711", "no node is blamed"


def test_an_entrypoint_whose_srun_slurm_did_not_answer_is_not_charged(gang: Gang, slurm_job: dict[str, str]) -> None:
    gang.plan(FINDS_NOBODY, scheduler="slurm", max_restarts=0)
    assert gang.start_job(**slurm_job).wait(timeout=DEADLINE_S) == 0
    assert gang.ends() == [("scheduler away", "requeue")]


def test_a_job_that_cannot_go_back_says_so_in_the_journal_and_fails(
    gang: Gang, slurm_job: dict[str, str], stub: Stub
) -> None:
    stub("scontrol", "echo 'Requeue is disabled for job 4711' >&2; exit 1")
    gang.plan_ranks(0, scheduler="slurm")
    job = gang.start_job(**slurm_job)
    gang.wait_for_ranks(0)
    job.terminate()
    assert job.wait(timeout=DEADLINE_S) == 1
    (problem,) = (event["problem"] for event in gang.journal.events() if event["event"] == "problem")
    assert unnamed(problem, "scontrol", "exit code 1", "Requeue is disabled for job 4711") == []


# --- the scripts


def test_the_local_script_runs_a_trial_and_logs_into_its_folder(gang: Gang) -> None:
    gang.plan("echo trained with $FROM_SETUP", setup=("export FROM_SETUP='a setup line'",))
    job = gang.start_script()
    assert job.wait(timeout=DEADLINE_S) == 0
    assert gang.printed.read_text() == ""
    assert gang.ends() == [("finished", "done")]
    assert "trained with a setup line" in gang.trial.job_log.read_text().splitlines()
    (started,) = (event for event in gang.journal.events() if event["event"] == "started")
    assert started["job_id"].startswith(f"{job.pid}-")


@pytest.mark.slurm
def test_the_slurm_script_starts_an_agent_on_every_node(slurm_lab: SlurmLab) -> None:
    gang = Gang(slurm_lab.folder(), Path("/tmp"))
    gang.plan("echo rank group $HPC_DET_NODE_RANK trained on $(hostname)", scheduler="slurm", nodes=3)
    job_id = slurm_lab.run("sbatch", "--parsable", gang.write_script()).strip()
    slurm_lab.wait_for_state(job_id, "COMPLETED")
    assert gang.ends() == [("finished", "done")]
    lines = [line for line in gang.trial.job_log.read_text().splitlines() if line.startswith("rank group")]
    assert sorted(lines) == [f"rank group {node} trained on node{node + 1}" for node in range(3)]


def test_a_second_job_of_a_trial_that_runs_already_starts_nothing(gang: Gang) -> None:
    """The script may have been started by hand too early; two jobs must not write one trial."""
    gang.plan("touch started")
    own = f"{os.getpid()}-{start_ticks(os.getpid())}@{socket.gethostname()}"
    SearchJournal(gang.experiment).ask(0, own)
    gang.journal.started(1, own)
    code, _ = gang.run_job()
    assert code == 1
    assert unnamed(gang.printed.read_text(), f"job {own}") == []
    assert not (gang.code / "started").exists()
    assert gang.journal.history() == []
    assert gang.journal.last_attempt() == 1
    assert gang.search().present == {0: own}


def test_after_a_node_was_lost_the_time_in_which_the_job_is_suspended_does_not_count(
    gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = Agents([], gang.plan("true"), has_queue=False)
    suspension = Suspension(monkeypatch)
    tried = attempts.Attempts(gang.trial, 0, agents, SignalPipe(()), [])
    assert not tried._waits_in_vain(1)
    note_failure(gang.trial, 1, failure_now(None, "lost", node_lost=True))
    assert not tried._waits_in_vain(1)
    suspension.lasts()
    assert not tried._waits_in_vain(1)
    for _ in range(4):
        suspension.lasts(2 * LOOK_S)  # longer than usual, but this process ran
        left = tried._waits_in_vain(1)
    assert left
