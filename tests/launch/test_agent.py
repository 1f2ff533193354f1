"""One agent per node, as a real process with tiny ranks."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import sys
import time
from itertools import count
from pathlib import Path

import pytest

from hpc_det.node.json_files import write_json
from hpc_det.node.process import STOP_SIGNALS
from hpc_det.store.attempt import Failure, first_failure, read_stop, request_stop
from tests.facts import unnamed
from tests.launch.gang import Gang, children, is_there
from tests.machine import smallest
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.integration


def failure(gang: Gang, attempt: int = 1) -> Failure:
    found = first_failure(gang.trial, attempt)
    assert found is not None
    return found


def environment(gang: Gang, name: str = "env") -> dict[str, str]:
    items = (gang.code / name).read_bytes().decode().split("\0")[:-1]
    return dict(item.split("=", 1) for item in items)


# --- the entrypoint


def test_exit_0_is_the_entrypoints_exit_0(gang: Gang) -> None:
    gang.plan("true")
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 0
    assert first_failure(gang.trial, 1) is None


def test_any_other_exit_code_is_1_and_noted(gang: Gang) -> None:
    gang.plan("exit 3")
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 1
    assert unnamed(failure(gang).message, "exit code 3", gang.trial.job_log) == []
    assert (failure(gang).rank, failure(gang).lost) == (None, False)


def test_the_last_words_of_an_entrypoint_are_noted(gang: Gang) -> None:
    log = gang.trial.job_log
    log.write_text("an earlier attempt\n")
    gang.plan(f"echo ModuleNotFoundError: No module named torchx >>{log}; echo >>{log}; exit 1")
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 1
    assert unnamed(failure(gang).message, "exit code 1", "ModuleNotFoundError: No module named torchx", log) == []


def test_words_of_an_earlier_attempt_are_not_an_entrypoints_last(gang: Gang) -> None:
    gang.trial.job_log.write_text("an earlier attempt\n")
    gang.plan("exit 3")
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 1
    assert unnamed(failure(gang).message, "exit code 3", gang.trial.job_log) == []
    assert "an earlier attempt" not in failure(gang).message


def test_an_entrypoint_that_a_signal_ends_is_noted_with_its_name(gang: Gang) -> None:
    gang.plan("kill -SEGV $$")
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 1
    assert unnamed(failure(gang).message, "SIGSEGV", gang.trial.job_log) == []


def test_an_entrypoint_that_does_not_exist_is_named_without_a_traceback(gang: Gang) -> None:
    gang.plan(["no-such-program", "--lr", "1"])
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 1
    assert "Traceback (most recent" not in gang.printed.read_text()
    assert unnamed(failure(gang).message, "entrypoint: no-such-program: ", os.strerror(errno.ENOENT)) == []


def test_words_of_a_list_reach_the_entrypoint_without_a_shell(gang: Gang) -> None:
    words = ["$(touch X)", "a b", "it's", ";", "*", ""]
    gang.plan(["/bin/sh", "-c", 'printf "%s|" "$@" >words', "sh", *words])
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 0
    assert (gang.code / "words").read_text() == "|".join(words) + "|"
    assert not (gang.code / "X").exists()


def test_it_runs_in_the_snapshot_with_the_plans_variables_and_can_import_from_there(gang: Gang) -> None:
    gang.plan("env -0 >env; pwd >cwd", environment=("A=b=c", "B=$(touch X)", "A=last"))
    assert gang.start_agent(PYTHONPATH="/site/lib", A="outer").wait(timeout=DEADLINE_S) == 0
    found = environment(gang)
    assert (found["A"], found["B"]) == ("last", "$(touch X)")
    assert found["PYTHONPATH"] == f"{gang.code}{os.pathsep}/site/lib"
    assert (gang.code / "cwd").read_text() == f"{gang.code}\n"


def test_where_the_plan_asks_for_it_every_python_below_finds_hpc_det_as_determined_and_ray(gang: Gang) -> None:
    show = "$PYTHON -c 'import determined, ray; print(determined.__file__, ray.__file__)' >found"
    gang.plan(show)
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 1
    gang.plan(show, environment=(f"PYTHON={sys.executable}", "HPC_DET_COMPAT=determined,ray"))
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 0
    determined, ray = (gang.code / "found").read_text().split()
    assert determined.endswith("/hpc_det/compat/path/determined/__init__.py")
    assert ray.endswith("/hpc_det/compat/path_ray/ray/__init__.py")


def test_there_it_sets_determineds_variables_too(gang: Gang) -> None:
    spec = {"experiment_id": 1, "trial_id": 1, "trial_seed": 5, "hparams": {"lr": 0.1}, "config": {}}
    write_json(gang.trial.trial, spec)
    for variables in ((), ("HPC_DET_COMPAT=determined", "DET_TRIAL_SEED=7")):
        gang.plan("env -0 >env", environment=variables)
        assert gang.start_agent().wait(timeout=DEADLINE_S) == 0
        found = environment(gang)
        expected = {"DET_HPARAMS": '{"lr": 0.1}', "DET_TRIAL_SEED": "7"} if variables else {}
        assert {name: found[name] for name in ("DET_HPARAMS", "DET_TRIAL_SEED") if name in found} == expected


def test_a_value_of_the_plan_that_means_nothing_is_the_users_error(gang: Gang) -> None:
    gang.plan("true", environment=("HPC_DET_COMPAT=horovod",))
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 1
    assert unnamed(failure(gang).message, "HPC_DET_COMPAT: ", "'horovod'", "'determined'") == []
    assert failure(gang).user_error


def test_threads_and_look_ups_are_limited_unless_the_user_says_otherwise(
    gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    gang.plan("env -0 >env", cpus_per_rank=3, environment=("RES_OPTIONS=mine",))
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 0
    assert environment(gang)["OMP_NUM_THREADS"] == "3"
    assert environment(gang)["RES_OPTIONS"] == "mine"


@pytest.mark.parametrize(("slot_type", "visible"), [("cpu", ""), ("gpu", "0,1")])
def test_ranks_learn_what_a_slot_is_and_see_gpus_only_where_it_is_one(
    gang: Gang, monkeypatch: pytest.MonkeyPatch, slot_type: str, visible: str
) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)  # tests of engines, which set it, run in this process too
    gang.plan("env -0 >env", slot_type=slot_type)
    assert gang.start_agent(CUDA_VISIBLE_DEVICES="0,1").wait(timeout=DEADLINE_S) == 0
    assert environment(gang)["HPC_DET_SLOT_TYPE"] == slot_type
    assert environment(gang)["CUDA_VISIBLE_DEVICES"] == visible
    assert ("DS_ACCELERATOR" in environment(gang)) is (slot_type == "cpu")


def test_what_an_entrypoint_leaves_running_is_ended_with_it(gang: Gang) -> None:
    gang.plan("setsid sleep 60 & echo $! >pid")
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 0
    assert not is_there(int((gang.code / "pid").read_text()))


def test_nothing_of_the_agent_stays_on_the_node(gang: Gang) -> None:
    gang.plan("ls -ld $HPC_DET_SOCKET ${HPC_DET_SOCKET%/*} >modes")
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 0
    modes = [line.split()[0] for line in (gang.code / "modes").read_text().splitlines()]
    assert sorted(modes) == ["drwx------", "srw-------"]
    assert list(Path(gang.env["TMPDIR"]).iterdir()) == []


# --- signals and stop requests


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_agent_makes_every_rank_save_and_leave(gang: Gang, number: signal.Signals) -> None:
    gang.plan_ranks(0, 1)
    agent = gang.start_agent()
    gang.wait_for_ranks(0, 1)
    agent.send_signal(number)
    assert agent.wait(timeout=DEADLINE_S) == 0
    assert gang.saved() == {"0": "signal", "1": "signal"}
    request = read_stop(gang.trial.stop, 1)
    assert request is not None
    assert (request.reason, request.source) == ("signal", f"{number.name} on {socket.gethostname()}")
    assert read_stop(gang.trial.stop, 2) is None


def test_ranks_save_though_the_disk_of_the_run_folder_is_full(gang: Gang) -> None:
    gang.plan_ranks(0)
    agent = gang.start_agent()
    gang.wait_for_ranks(0)
    resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (0, 0))
    agent.terminate()
    assert agent.wait(timeout=DEADLINE_S) == 0
    assert gang.saved() == {"0": "signal"}
    assert not gang.trial.stop.exists()


def test_a_signal_before_any_rank_is_up_is_not_lost(gang: Gang) -> None:
    gang.plan("touch up; while ! [ -e go ]; do sleep 0.01; done; exec $PYTHON rank.py 0", ranks_per_node=1)
    agent = gang.start_agent()
    wait_for((gang.code / "up").exists)
    agent.terminate()
    wait_for(gang.trial.stop.exists)
    (gang.code / "go").touch()
    assert agent.wait(timeout=DEADLINE_S) == 0
    assert gang.saved() == {"0": "signal"}


def test_the_entrypoint_outlives_signals_that_reach_all_processes_of_the_job(gang: Gang) -> None:
    """With proctrack/linuxproc, Slurm's signals reach all processes of the job; the agent handles them."""
    gang.plan("touch up; while ! [ -e go ]; do sleep 0.01; done; touch survived")
    agent = gang.start_agent()
    wait_for((gang.code / "up").exists)
    (entrypoint,) = children(agent.pid)
    for number in STOP_SIGNALS:
        os.kill(entrypoint, number)
    agent.terminate()
    wait_for(gang.trial.stop.exists)
    (gang.code / "go").touch()
    assert agent.wait(timeout=DEADLINE_S) == 0
    assert (gang.code / "survived").exists()


def test_a_request_in_the_run_folder_reaches_the_ranks_without_a_signal(gang: Gang) -> None:
    gang.plan_ranks(0, 1)
    agent = gang.start_agent()
    gang.wait_for_ranks(0, 1)
    request_stop(gang.trial.stop, attempt=1, reason="cancel", source="a test")
    assert agent.wait(timeout=DEADLINE_S) == 0
    assert gang.saved() == {"0": "cancel", "1": "cancel"}


def test_a_request_for_another_attempt_stops_nobody(gang: Gang) -> None:
    gang.plan_ranks(0)
    request_stop(gang.trial.stop, attempt=1, reason="kill", source="a test")
    agent = gang.start_agent(2)
    gang.wait_for_ranks(0)
    agent.terminate()
    assert agent.wait(timeout=DEADLINE_S) == 0
    assert gang.saved() == {"0": "signal"}


def test_a_kill_request_ends_ranks_that_listen_to_nothing(gang: Gang) -> None:
    gang.plan_ranks(0, 1, argument="deaf")
    agent = gang.start_agent()
    pids = gang.wait_for_ranks(0, 1)
    request_stop(gang.trial.stop, attempt=1, reason="kill", source="a test")
    agent.terminate()
    assert agent.wait(timeout=DEADLINE_S) == 1
    assert gang.saved() == {}
    assert not any(map(is_there, pids))
    assert first_failure(gang.trial, 1) is None


# --- ranks that are lost


def test_a_killed_rank_is_named_and_the_node_ends_at_once(gang: Gang) -> None:
    gang.plan_ranks(0, 1)
    attempts = count(1)

    def end_s() -> float:
        attempt = next(attempts)
        agent = gang.start_agent(attempt)
        pids = gang.wait_for_ranks(0, 1)
        gang.forget_ranks()
        began = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        wait_for(lambda: not any(map(is_there, pids)))
        taken_s = time.monotonic() - began
        assert agent.wait(timeout=DEADLINE_S) == 1
        found = failure(gang, attempt)
        assert (found.rank, found.lost) == (1, True)
        assert unnamed(found.message, f"process {pids[1]}") == []
        return taken_s

    assert smallest(end_s, limit=1) < 1


def test_a_rank_that_leaves_with_an_error_ends_the_node_without_being_called_lost(gang: Gang) -> None:
    (gang.code / "fails.py").write_text(
        "import os, sys\n"
        "from hpc_det.store.attempt import Attempt\n"
        "from hpc_det.node.agent_socket import say_hello\n"
        "from hpc_det.node.lines import connect_local\n"
        "line = connect_local(Attempt.from_env(os.environ).socket)\n"
        "say_hello(line, 1, os.getpid())\n"
        "line.send({'exit': 1})\n"
        "sys.exit(1)\n"
    )
    gang.plan("setsid -w $PYTHON rank.py 0 & while ! [ -e rank-0.up ]; do sleep 0.01; done; $PYTHON fails.py; wait")
    agent = gang.start_agent()
    (pid,) = gang.wait_for_ranks(0)
    assert agent.wait(timeout=DEADLINE_S) == 1
    assert not is_there(pid)
    assert first_failure(gang.trial, 1) is None  # recording the failure is the rank's task


FAILS = """
import os, sys, time
from pathlib import Path
from hpc_det.store.attempt import Attempt
from hpc_det.node.agent_socket import report_exit, say_hello
from hpc_det.node.lines import connect_local
from hpc_det.store.attempt import failure_now, note_failure

attempt = Attempt.from_env(os.environ)
line = connect_local(attempt.socket)
say_hello(line, 0, os.getpid())
while not Path("go").exists():
    time.sleep(0.01)
note_failure(attempt.trial, 1, failure_now(0, "its own mistake"))
report_exit(line, 1)
sys.exit(1)
"""
"""Rank 0 fails when the file "go" exists."""

CRASHES = """
import os, subprocess, termios, time
from fcntl import ioctl
from hpc_det.store.attempt import Attempt
from hpc_det.node.agent_socket import say_hello
from hpc_det.node.lines import connect_local

line = connect_local(Attempt.from_env(os.environ).socket)
say_hello(line, 1, os.getpid())
while any(ioctl(line.connection, termios.TIOCOUTQ, bytes(4))):  # the agent has not read it
    time.sleep(0.01)
subprocess.Popen(["sleep", "60"], pass_fds=[line.connection.fileno()])
os.abort()
"""
"""Rank 1 crashes while another process holds its end of the line open."""


def test_a_rank_that_fails_is_the_cause_though_its_launcher_ends_the_others_before_the_agent_looks(gang: Gang) -> None:
    (gang.code / "fails.py").write_text(FAILS)
    gang.plan("setsid -w $PYTHON rank.py 1 deaf & $PYTHON fails.py; kill -9 $(cat rank-1.up); wait")
    agent = gang.start_agent()
    (peer,) = gang.wait_for_ranks(1)
    agent.send_signal(signal.SIGSTOP)
    (gang.code / "go").touch()
    wait_for(lambda: first_failure(gang.trial, 1))
    end = time.monotonic() + 0.5
    while is_there(peer) and time.monotonic() < end:
        time.sleep(0.01)
    agent.send_signal(signal.SIGCONT)
    assert agent.wait(timeout=DEADLINE_S) == 1
    assert (failure(gang).rank, failure(gang).lost) == (0, False)


def test_a_rank_whose_loss_only_other_nodes_have_felt_yet_is_the_cause(gang: Gang) -> None:
    (gang.code / "rank0.py").write_text(FAILS)
    (gang.code / "rank1.py").write_text(CRASHES)
    gang.plan(
        "$PYTHON rank$HPC_DET_NODE_RANK.py; touch ended-$HPC_DET_NODE_RANK; sleep 60",
        scheduler="slurm",
        nodes=2,
        ranks_per_node=1,
    )
    agents = [gang.start_agent(SLURM_NODEID=node) for node in ("0", "1")]
    wait_for((gang.code / "ended-1").exists)
    (gang.code / "go").touch()
    assert [agent.wait(timeout=DEADLINE_S) for agent in agents] == [1, 1]
    assert (failure(gang).rank, failure(gang).lost) == (1, True)


def test_a_rank_whose_agent_was_killed_leaves_by_itself(gang: Gang) -> None:
    gang.plan_ranks(0, 1)
    agent = gang.start_agent()
    pids = gang.wait_for_ranks(0, 1)
    agent.kill()
    agent.wait()
    wait_for(lambda: not any(map(is_there, pids)))
    assert (gang.code / "rank-0.orphaned").exists()


def test_an_agent_whose_starter_was_killed_ends_its_ranks(gang: Gang) -> None:
    gang.plan_ranks(0, argument="deaf")
    job = gang.start_job()
    (pid,) = gang.wait_for_ranks(0)
    job.kill()
    job.wait()
    wait_for(lambda: not is_there(pid))


def test_an_agent_that_does_not_know_its_starter_yet_ends_with_it(gang: Gang) -> None:
    gang.plan("true")
    job = gang.start_job(agent=("sh", "-c", 'touch "$0/up"; exec sleep 60'))
    wait_for((gang.trial.path / "up").exists)
    (agent,) = children(job.pid)
    job.kill()
    job.wait()
    wait_for(lambda: not is_there(agent))


# --- two nodes


def test_two_nodes_meet_where_node_0_says(gang: Gang) -> None:
    gang.plan("env -0 >env-$HPC_DET_NODE_RANK", scheduler="slurm", nodes=2, ranks_per_node=4)
    second, first = (gang.start_agent(SLURM_NODEID=node) for node in ("1", "0"))
    assert [agent.wait(timeout=DEADLINE_S) for agent in (first, second)] == [0, 0]
    environments = [environment(gang, f"env-{node}") for node in (0, 1)]
    same = ("HPC_DET_MASTER_ADDR", "HPC_DET_MASTER_PORT", "HPC_DET_SECRET", "HPC_DET_NODES", "HPC_DET_NUMBER")
    assert [environments[0][name] for name in same] == [environments[1][name] for name in same]
    assert [env["HPC_DET_NODE_RANK"] for env in environments] == ["0", "1"]
    assert environments[0]["HPC_DET_SOCKET"] != environments[1]["HPC_DET_SOCKET"]


def test_a_signal_on_one_node_reaches_the_ranks_of_the_other(gang: Gang) -> None:
    gang.plan("exec $PYTHON rank.py $HPC_DET_NODE_RANK", scheduler="slurm", nodes=2, ranks_per_node=1)
    agents = [gang.start_agent(SLURM_NODEID=node) for node in ("0", "1")]
    gang.wait_for_ranks(0, 1)
    agents[1].send_signal(signal.SIGTERM)
    assert [agent.wait(timeout=DEADLINE_S) for agent in agents] == [0, 0]
    assert gang.saved() == {"0": "signal", "1": "signal"}
