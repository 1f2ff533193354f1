"""Agents that stay on their nodes between attempts, in a job that is a real process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from hpc_det.launch.job.agents import Agents
from hpc_det.launch.orders import ORDERS, Order, ToJob
from hpc_det.node.json_files import read_json, write_json
from hpc_det.node.network import Rendezvous
from tests.launch.gang import Gang, is_there
from tests.processes import agents, ancestors, words
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.integration

T = TypeVar("T")
FOUR = {"name": "random", "max_trials": 4}
WAITS = "until [ -e done ]; do sleep 0.05; done"
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


def test_the_agent_of_a_job_on_one_node_is_forked_from_it(gang: Gang) -> None:
    gang.plan(WAITS)
    job = gang.start_job()
    wait_for(lambda: agents(gang.trial.path))
    (agent,) = agents(gang.trial.path)
    assert ancestors(agent)[0] == job.pid
    assert not was_executed(agent)
    (gang.code / "done").touch()
    assert job.wait(timeout=DEADLINE_S) == 0


def test_a_job_with_threads_executes_its_agent(gang: Gang) -> None:
    # A hook that the job calls in a thread when it starts.
    waits = ["sh", "-c", f"cd {gang.code}; {WAITS}"]
    hook = {"command": waits, "webhook": None, "mail": None, "states": ["RUNNING"]}
    write_json(gang.experiment.effective, {**(read_json(gang.experiment.effective) or {}), "notify": [hook]})
    gang.plan(WAITS)
    job = gang.start_job()
    wait_for(lambda: agents(gang.trial.path))
    (agent,) = agents(gang.trial.path)
    assert was_executed(agent)
    (gang.code / "done").touch()
    assert job.wait(timeout=DEADLINE_S) == 0


def was_executed(agent: int) -> bool:
    """Return whether an agent was executed: the environment that Linux shows is that of the last execution."""
    return any(word.startswith(f"{ORDERS}=") for word in words(agent, "environ"))


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
    assert gang.start_agent(1, HPC_DET_ORDERS="127.0.0.1:9:0").wait(60) == 0
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


# --- the job's end of the line, with agents in threads

MEETING = Rendezvous(host="10.0.0.7", port=15000, secret="00", agents_port=15001)


class TwoNodes:
    """The agents of two nodes; what starts them writes the job's address to a file and waits."""

    def __init__(self, gang: Gang) -> None:
        self._address = gang.code / "address"
        launcher = ["sh", "-c", f'echo "${ORDERS}" >{self._address}.part; mv {self._address}.part {self._address}']
        plan = gang.plan("true", nodes=2, ranks_per_node=1)
        self.agents = Agents(launcher, replace(plan, job_nodes=1), has_queue=False)
        self.agents.begin(Order(trial=str(gang.trial.path), attempt=1, worker=0))
        wait_for(self._address.exists)
        self._pool = ThreadPoolExecutor()
        self._connected: list[ToJob] = []

    def until_done(self, *calls: Callable[[], T]) -> list[T]:
        """Make these calls in threads while the job handles messages; return their results."""
        futures = [self._pool.submit(call) for call in calls]

        def are_done() -> bool:
            self.agents.turn()
            return all(future.done() for future in futures)

        wait_for(are_done)
        return [future.result() for future in futures]

    def connect(self, node: int) -> ToJob:
        (found,) = self.until_done(lambda: ToJob.connected({ORDERS: self._address.read_text().strip()}, node))
        assert found is not None
        self._connected.append(found)
        return found

    def close(self) -> None:
        for each in self._connected:
            each.close()
        self._pool.shutdown()
        self.agents.dismiss()


@pytest.fixture
def two_nodes(gang: Gang, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoNodes]:
    # In the process of the tests it would end processes of other tests.
    monkeypatch.setattr("hpc_det.launch.job.agents.end_other_sessions", lambda: None)
    nodes = TwoNodes(gang)
    yield nodes
    nodes.close()


@pytest.mark.parametrize("is_late", [False, True])
def test_the_job_passes_the_rendezvous_of_node_0_on(two_nodes: TwoNodes, is_late: bool) -> None:
    first = two_nodes.connect(0)
    second = None if is_late else two_nodes.connect(1)
    first.publish(1, MEETING)
    second = second or two_nodes.connect(1)
    assert two_nodes.until_done(lambda: second.rendezvous(1, DEADLINE_S)) == [MEETING]


def test_a_rendezvous_of_another_node_or_attempt_is_not_passed_on(two_nodes: TwoNodes) -> None:
    first, second = two_nodes.connect(0), two_nodes.connect(1)
    second.publish(1, replace(MEETING, port=1))
    first.publish(2, replace(MEETING, port=2))
    first.publish(1, MEETING)
    assert two_nodes.until_done(lambda: second.rendezvous(1, DEADLINE_S)) == [MEETING]


def test_an_agent_without_the_secret_is_not_connected(two_nodes: TwoNodes, gang: Gang) -> None:
    address = (gang.code / "address").read_text().strip().rpartition(":")[0]
    assert two_nodes.until_done(lambda: ToJob.connected({ORDERS: f"{address}:00"}, 0)) == [None]
