"""Agents that stay on their nodes between attempts, in a job that is a real process."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from hpc_det.launch.orders import ORDERS
from tests.launch.gang import Gang, is_there
from tests.processes import agents
from tests.wait import wait_for

pytestmark = pytest.mark.integration

FOUR = {"name": "random", "max_trials": 4}
WRITES_ITS_AGENT = "echo $PPID >>agents"
WRITES_ITS_FORK_SERVER = """
import os, torch
from pathlib import Path
stat = Path(f"/proc/{os.getppid()}/stat").read_text()
fork_server = stat.rpartition(")")[2].split()[1]
with open("servers", "a") as file:
    file.write(f"{fork_server}\\n")
raise SystemExit(3)
"""


def lines(path: Path) -> list[str]:
    return path.read_text().split()


def test_one_agent_runs_all_attempts_of_a_job(gang: Gang) -> None:
    gang.plan(f"{WRITES_ITS_AGENT}; exit 3", max_restarts=2)
    gang.run_job()
    assert gang.ends() == [("failed", "restart"), ("failed", "restart"), ("failed", "give up")]
    assert len(lines(gang.code / "agents")) == 3
    assert len({*lines(gang.code / "agents")}) == 1


def test_one_fork_server_imports_torch_for_all_attempts(gang: Gang) -> None:
    (gang.code / "train.py").write_text(WRITES_ITS_FORK_SERVER)
    gang.plan([sys.executable, "-m", "hpc_det.launch.direct", "train.py"], ranks_per_node=1, max_restarts=2)
    gang.run_job()
    servers = lines(gang.code / "servers")
    assert len(servers) == 3
    assert len({*servers}) == 1
    assert not is_there(int(servers[0]))


def test_one_agent_runs_the_trials_of_a_search_and_each_prints_to_its_own_log(gang: Gang) -> None:
    gang.search_for(**FOUR)
    gang.plan(f"{WRITES_ITS_AGENT}; echo printed in ${{HPC_DET_FOLDER##*/}}", ranks_per_node=1)
    gang.start_job().wait(60)
    assert len(lines(gang.code / "agents")) == 4
    assert len({*lines(gang.code / "agents")}) == 1
    for number in range(1, 5):
        printed = [line for line in gang.experiment.trial(number).job_log.read_text().splitlines() if "printed" in line]
        assert printed == [f"printed in {number}"]


def test_forked_ranks_of_a_search_print_to_the_log_of_their_trial(gang: Gang) -> None:
    gang.search_for(**FOUR)
    (gang.code / "train.py").write_text("import os, torch\nraise SystemExit(3)\n")
    gang.plan([sys.executable, "-m", "hpc_det.launch.direct", "train.py"], ranks_per_node=1)
    gang.start_job().wait(60)
    assert [gang.experiment.trial(number).rank_log(1, 0).exists() for number in range(1, 5)] == [True] * 4


def test_the_files_of_an_attempt_on_the_node_are_deleted_before_the_next(gang: Gang) -> None:
    keeps = 'folder=$(dirname "$HPC_DET_SOCKET"); ls "$folder" >>seen; mkdir "$folder/left"; exit 3'
    gang.plan(keeps, ranks_per_node=1, max_restarts=1)
    gang.run_job()
    assert lines(gang.code / "seen") == ["agent", "agent"]


def test_an_agent_that_was_killed_is_replaced(gang: Gang) -> None:
    gang.plan(f"{WRITES_ITS_AGENT}; test -e killed || {{ touch killed; kill -9 $PPID; sleep 60; }}", max_restarts=1)
    gang.run_job()
    assert gang.ends()[-1] == ("finished", "done")
    assert len({*lines(gang.code / "agents")}) == 2


def test_an_agent_that_cannot_reach_the_job_runs_its_first_attempt(gang: Gang) -> None:
    gang.plan("touch trained", ranks_per_node=1)
    assert gang.start_agent(**{ORDERS: "127.0.0.1:9:0"}).wait(60) == 0
    assert (gang.code / "trained").exists()


def test_the_secret_of_the_line_is_not_in_the_environment_of_the_entrypoint(gang: Gang) -> None:
    gang.plan(f'test -z "${ORDERS}"', ranks_per_node=1)
    gang.run_job()
    assert gang.ends() == [("finished", "done")]


def test_agents_end_with_a_killed_job(gang: Gang) -> None:
    gang.plan_ranks(0, ranks_per_node=1, max_restarts=1)
    job = gang.start_job()
    gang.wait_for_ranks(0)
    (agent,) = agents(gang.trial.path)
    os.kill(job.pid, signal.SIGKILL)
    wait_for(lambda: not is_there(agent))
