"""The launcher without torch, under a real agent."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time

import pytest

from hpc_det.launch.direct import rank_environment
from hpc_det.node.json_files import read_json, write_json
from hpc_det.store.attempt import Failure, first_failure, request_stop
from tests.facts import unnamed
from tests.launch.gang import Gang, children, is_there
from tests.machine import slowness, smallest
from tests.store.test_attempt import ATTEMPT
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.integration

WAITS = """
import os, signal, sys, time
rank = os.environ["RANK"]
print("rank", rank, "of", os.environ["WORLD_SIZE"])
ANSWER
open(f"rank-{rank}.part", "w").write(str(os.getpid()))
os.rename(f"rank-{rank}.part", f"rank-{rank}.up")
while True:
    time.sleep(60)
"""
SAVES = """
def save(*_):
    open(f"rank-{rank}.saved", "w").write("TERM")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
IMPATIENT = """
import sys
from hpc_det.launch import direct
direct.LEAVE_TOGETHER_S = 0.1
sys.exit(direct.main(["train.py"]))
"""
LIMIT_S = 0.1
"""Seconds within which the death of a rank ends the gang, on an otherwise idle machine."""


def plan(gang: Gang, answer: str = "", *, ranks: int = 2, **changes: object) -> None:
    """Plan a script that each rank runs: it writes a file and waits. `answer`: its reaction to a stop, in Python."""
    (gang.code / "train.py").write_text(WAITS.replace("ANSWER", answer))
    launch(gang, "train.py", ranks_per_node=ranks, **changes)


def launch(gang: Gang, *words: str, **changes: object) -> None:
    gang.plan([sys.executable, "-m", "hpc_det.launch.direct", *words], **changes)


def failure(gang: Gang) -> Failure:
    found = first_failure(gang.trial, 1)
    assert found is not None
    return found


def said(gang: Gang, rank: int) -> list[str]:
    return gang.trial.rank_log(1, rank).read_text().splitlines()


# --- the ranks


def test_a_rank_is_told_what_torchrun_tells_it() -> None:
    assert rank_environment(ATTEMPT, 2) == {
        "RANK": "6",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "6",
        "ROLE_WORLD_SIZE": "8",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "15001",
        "TORCHELASTIC_RUN_ID": "3",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def test_each_rank_has_a_log_and_looks_names_up_with_patience_for_one_second(gang: Gang) -> None:
    launch(gang, "sh", "-c", "echo $RANK of $WORLD_SIZE: $RES_OPTIONS; echo $0 >&2", "a word")
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 0
    assert [said(gang, rank) for rank in (0, 1)] == [
        [f"{rank} of 2: timeout:1 attempts:1", "a word"] for rank in (0, 1)
    ]
    assert gang.printed.read_text() == ""


def test_a_script_that_comes_to_its_end_has_finished(gang: Gang) -> None:
    launch(gang, "true")
    code, _ = gang.run_job()
    assert (code, gang.ends()) == (0, [("finished", "done")])


def test_overrides_have_nothing_to_override(gang: Gang) -> None:
    launch(gang, "--max-restarts=2", "--", "train.py")
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 1
    assert failure(gang).user_error
    first, usage = failure(gang).message.splitlines()
    assert unnamed(first, "hpc_det.launch.direct: ", "--max-restarts=2") == []
    assert usage.startswith("usage:")


def test_a_command_that_there_is_not_is_the_users_error(gang: Gang) -> None:
    launch(gang, "no-such-program", "--lr", "1")
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 1
    assert unnamed(failure(gang).message, "entrypoint: no-such-program: ", os.strerror(errno.ENOENT)) == []
    assert failure(gang).user_error


# --- ranks that end


def test_the_first_rank_that_fails_is_named_with_its_last_words_and_ends_the_others(gang: Gang) -> None:
    fails = "if rank == '1':\n    while not os.path.exists('rank-0.up'): pass\n    print('out of luck'); sys.exit(7)"
    plan(gang, fails)
    agent = gang.start_agent()
    (other,) = gang.wait_for_ranks(0)
    assert agent.wait(timeout=DEADLINE_S) == 1
    assert not is_there(other)
    assert (failure(gang).rank, failure(gang).lost) == (1, False)
    assert unnamed(failure(gang).message, "exit code 7", "out of luck", gang.trial.rank_log(1, 1)) == []


def test_its_exit_code_is_the_launchers(gang: Gang) -> None:
    (gang.code / "train.py").write_text("import os; os._exit(int(os.environ['RANK']) * 7)")
    gang.plan("$PYTHON -m hpc_det.launch.direct train.py; echo $? >code", ranks_per_node=2)
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 0
    assert (gang.code / "code").read_text() == "7\n"


def test_a_killed_rank_ends_launcher_agent_and_peers_within_a_tenth_of_a_second(gang: Gang) -> None:
    plan(gang, DEAF, ranks=3)

    def end_s() -> float:
        agent = gang.start_agent()
        pids = gang.wait_for_ranks(0, 1, 2)
        gang.forget_ranks()
        (launcher,) = children(agent.pid)
        began = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        assert agent.wait() == 1  # with a timeout, wait() would poll at growing intervals
        taken_s = time.monotonic() - began
        assert not any(map(is_there, (launcher, *pids)))
        return taken_s / slowness()

    assert smallest(end_s, LIMIT_S) < LIMIT_S
    assert (failure(gang).rank, failure(gang).lost) == (1, True)
    assert unnamed(failure(gang).message, "SIGKILL") == []


def test_ranks_end_with_a_launcher_that_was_killed(gang: Gang) -> None:
    plan(gang, DEAF)
    agent = gang.start_agent()
    pids = gang.wait_for_ranks(0, 1)
    os.kill(children(agent.pid)[0], signal.SIGKILL)
    assert agent.wait(timeout=DEADLINE_S) == 1
    assert not any(map(is_there, pids))


def test_ranks_end_with_an_agent_that_was_killed(gang: Gang) -> None:
    plan(gang, DEAF)
    agent = gang.start_agent()
    pids = gang.wait_for_ranks(0, 1)
    agent.kill()
    wait_for(lambda: not any(map(is_there, pids)))


# --- stops


def test_a_script_hears_of_a_stop_saves_and_is_to_go_on(gang: Gang) -> None:
    plan(gang, SAVES)
    agent = gang.start_agent()
    gang.wait_for_ranks(0, 1)
    agent.send_signal(signal.SIGUSR2)
    assert agent.wait(timeout=DEADLINE_S) == 0
    assert gang.saved() == {"0": "TERM", "1": "TERM"}
    assert read_json(gang.trial.outcome) == {"attempt": 1, "kind": "stopped", "steps": 1, "saves": 1}


JOINS = """
import signal
from hpc_det.node.agent_socket import report_exit, say_hello
from hpc_det.node.lines import connect_local
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
line = connect_local(os.environ["HPC_DET_SOCKET"])
say_hello(line, int(rank), os.getpid())
open(f"rank-{rank}.part", "w").write(str(os.getpid()))
os.rename(f"rank-{rank}.part", f"rank-{rank}.up")
while "stop" not in line.receive().head:
    pass
time.sleep(0.5)
open(f"rank-{rank}.saved", "w").write("agent")
report_exit(line, 0)
sys.exit(0)
"""


def test_a_script_that_is_connected_to_the_agent_gets_no_signal(gang: Gang) -> None:
    plan(gang, JOINS)
    agent = gang.start_agent()
    gang.wait_for_ranks(0, 1)
    agent.send_signal(signal.SIGUSR2)
    assert agent.wait(timeout=DEADLINE_S) == 0
    assert gang.saved() == {"0": "agent", "1": "agent"}
    assert read_json(gang.trial.outcome) is None


def test_a_script_that_was_preempted_is_started_again_and_finishes(gang: Gang) -> None:
    plan(gang, f"if os.path.exists('rank-0.saved'): sys.exit(0)\n{SAVES}", ranks=1)
    job = gang.start_job()
    gang.wait_for_ranks(0)
    (agent,) = children(job.pid)
    os.kill(agent, signal.SIGTERM)
    assert job.wait(timeout=DEADLINE_S) == 0
    assert gang.ends() == [("preempted", "requeue"), ("finished", "done")]


def test_a_script_without_an_answer_ends_by_the_signal_and_has_saved_nothing(gang: Gang) -> None:
    plan(gang)
    write_json(gang.trial.outcome, {"attempt": 0, "kind": "stopped", "steps": 4, "saves": 4})
    agent = gang.start_agent()
    gang.wait_for_ranks(0, 1)
    agent.terminate()
    assert agent.wait(timeout=DEADLINE_S) == 0
    assert read_json(gang.trial.outcome) == {"attempt": 1, "kind": "stopped", "steps": 4, "saves": 4}
    assert first_failure(gang.trial, 1) is None


def test_a_script_that_does_not_listen_is_ended_before_the_deadline(gang: Gang) -> None:
    plan(gang, DEAF)
    agent = gang.start_agent()
    pids = gang.wait_for_ranks(0, 1)
    request_stop(gang.trial.stop, attempt=1, reason="time limit", source="a test", deadline=time.time())
    assert agent.wait(timeout=DEADLINE_S) == 0
    assert not any(map(is_there, pids))


def test_of_a_grace_time_that_is_short_a_script_has_the_half(gang: Gang) -> None:
    plan(gang, DEAF, ranks=1, grace_time_s=2)
    agent = gang.start_agent()
    gang.wait_for_ranks(0)
    began = time.time()
    agent.terminate()
    assert agent.wait() == 0
    assert time.time() - began >= 1


def test_a_rank_that_waits_for_a_peer_which_has_left_is_ended(gang: Gang) -> None:
    plan(gang, f"if rank == '0': {DEAF}")
    (gang.code / "launcher.py").write_text(IMPATIENT)
    gang.plan([sys.executable, "launcher.py"])
    agent = gang.start_agent()
    pids = gang.wait_for_ranks(0, 1)
    agent.terminate()
    assert agent.wait(timeout=DEADLINE_S) == 0
    assert not any(map(is_there, pids))
