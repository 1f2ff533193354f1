"""A driver whose nodes are suspended with their job, for longer than the timeout of a silent node."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from hpc_det.node.heartbeat import Progress
from hpc_det.node.process import is_stopped
from hpc_det.sgd import TorchTrainer
from hpc_det.sgd.driver.gang import JOIN_S, RankGang
from tests.sgd.local_nodes import LocalNodes
from tests.sgd.trained import Linear
from tests.wait import wait_for

JOB = "7.server"


class Suspendable(LocalNodes):
    """Nodes of a job that the scheduler may have suspended."""

    job_is_suspended = False

    def is_suspended(self, job: str) -> bool:
        assert job == JOB
        return self.job_is_suspended


@pytest.fixture(autouse=True)
def _in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the agents run in a job."""
    monkeypatch.setenv("PBS_JOBID", JOB)


@contextmanager
def stopped(nodes: LocalNodes) -> Iterator[None]:
    """Stop only the agent, as a scheduler does that does not know the sessions of the ranks."""
    os.kill(nodes.agents[0].pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(nodes.agents[0].pid, signal.SIGCONT)


def gang_of(its: TorchTrainer) -> RankGang:
    return its._open_gang._gang


def wait_in_vain(gang: RankGang) -> None:
    """Simulate that the driver has waited for silent nodes until the timeout."""
    gang.nodes.attentive_since -= 1000
    for node in gang.nodes._nodes:
        node.line.heard_at -= 1000  # type: ignore[misc]
        node.excused_at -= 1000
    gang.nodes._drop_silent()


def is_running(gang: RankGang) -> bool:
    gang.poll()
    return not gang.nodes.are_suspended


def test_ranks_stop_and_continue_with_the_agent_of_their_node() -> None:
    nodes = LocalNodes(1, 2)
    with TorchTrainer(training_operator_cls=Linear, num_workers=2, executor=nodes) as its:
        its.train()
        ranks = [rank.pid or 0 for rank in gang_of(its).ranks]
        with stopped(nodes):
            wait_for(lambda: all(map(is_stopped, ranks)))
        wait_for(lambda: not any(map(is_stopped, ranks)))
        assert its.train()["epoch"] == 2
        assert gang_of(its).nodes.generation == 1


def test_a_silent_node_of_a_suspended_job_is_not_lost() -> None:
    nodes = Suspendable(1)
    with TorchTrainer(training_operator_cls=Linear, executor=nodes) as its:
        its.train()
        gang = gang_of(its)
        with stopped(nodes):
            nodes.job_is_suspended = True
            for _ in range(3):
                wait_in_vain(gang)
            assert gang.nodes.are_suspended
            nodes.job_is_suspended = False
            wait_in_vain(gang)  # the job is resumed, but no heartbeat has arrived yet
        wait_for(lambda: is_running(gang))
        assert its.train()["epoch"] == 2
        assert gang.nodes.generation == 1


def test_a_node_that_stays_silent_when_its_job_goes_on_is_lost() -> None:
    nodes = Suspendable(1)
    with TorchTrainer(training_operator_cls=Linear, executor=nodes) as its:
        its.train()
        gang = gang_of(its)
        with stopped(nodes):
            nodes.job_is_suspended = True
            wait_in_vain(gang)
            nodes.job_is_suspended = False
            wait_in_vain(gang)
            assert gang.nodes._nodes
            wait_in_vain(gang)
            assert not gang.nodes._nodes


def test_ranks_of_a_suspended_job_do_not_hang() -> None:
    nodes = Suspendable(1)
    with TorchTrainer(training_operator_cls=Linear, executor=nodes, hang_timeout_s=20) as its:
        its.train()
        watch, gang = gang_of(its)._watch, gang_of(its)
        watch._judge.take(0, Progress("training", 1, warm=True, batch=1))
        with stopped(nodes):
            nodes.job_is_suspended = True
            wait_in_vain(gang)
            for _ in range(30):
                watch._next_look = 0.0
                watch._clock._looked_at -= 2  # seconds in which the driver runs
                watch.look()
        wait_for(lambda: is_running(gang))
        assert its.train()["epoch"] == 2
        assert gang.nodes.generation == 1


def test_ranks_of_a_suspended_job_may_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, late_s = Suspendable(1), [0.0]
    with TorchTrainer(training_operator_cls=Linear, executor=nodes) as its:
        its.train()
        gang = gang_of(its)
        (rank,) = gang.ranks
        line, rank.line = rank.line, None

        def hear(within_s: float) -> None:
            late_s[0] += 2 * JOIN_S
            rank.line = line if late_s[0] > 5 * JOIN_S else None

        with stopped(nodes), monkeypatch.context() as patch:
            nodes.job_is_suspended = True
            wait_in_vain(gang)
            clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s[0])
            patch.setattr("hpc_det.sgd.driver.gang.time", clock)
            patch.setattr(gang.nodes, "hear", hear)
            gang._await_ranks()
        wait_for(lambda: is_running(gang))
        assert its.train()["epoch"] == 2
