"""The agent's end of the line to the job, while it waits for its next order."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import pytest

from hpc_det.launch.orders import ORDERS, Order, ToJob
from hpc_det.node.lines import Line, line_over
from hpc_det.node.process import STOP_SIGNALS, SignalPipe

FIRST, SECOND = (Order(trial="/runs/1/trials/1", attempt=number, worker=0) for number in (1, 2))


@pytest.fixture
def signals() -> Iterator[SignalPipe]:
    pipe = SignalPipe(STOP_SIGNALS)
    yield pipe
    pipe.close()


@pytest.fixture
def ends() -> Iterator[tuple[Line, Line]]:
    """The job's end and the agent's end of a line."""
    job, agent = socket.socketpair()
    with job, agent:
        yield line_over(job), line_over(agent)


def heads(line: Line, count: int) -> list[dict[str, object]]:
    return [message.head for message in (line.receive() for _ in range(count)) if message]


def test_the_end_of_an_attempt_is_reported_and_the_next_order_returned(
    ends: tuple[Line, Line], signals: SignalPipe
) -> None:
    job, agent = ends
    job.send(SECOND.message())
    assert ToJob(agent).next(FIRST, 3, signals) == SECOND
    assert heads(job, 2) == [{"hello": True}, {"ended": 1, "code": 3}]


def test_a_stop_signal_between_two_attempts_is_reported(ends: tuple[Line, Line], signals: SignalPipe) -> None:
    job, agent = ends
    os.kill(os.getpid(), signal.SIGUSR1)
    job.send(SECOND.message())
    assert ToJob(agent).next(FIRST, 0, signals) == SECOND
    assert heads(job, 3)[2] == {"signal": "SIGUSR1"}


def test_the_end_of_the_line_dismisses_the_agent(ends: tuple[Line, Line], signals: SignalPipe) -> None:
    job, agent = ends
    waits = ToJob(agent)
    job.connection.shutdown(socket.SHUT_RDWR)
    assert waits.next(FIRST, 0, signals) is None


def test_the_address_of_the_job_is_removed_from_the_environment() -> None:
    environment = {ORDERS: "127.0.0.1:9:00", "PATH": "/bin"}
    assert ToJob.connected(environment, 0) is None
    assert environment == {"PATH": "/bin"}


def test_an_order_is_the_same_after_the_way_through_arguments() -> None:
    assert Order.of(FIRST.arguments) == FIRST
