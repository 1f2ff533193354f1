"""No input to the ports of a gang's agents disturbs its training: two real agents with ranks without torch."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from hpc_det.launch.watch.peers import key_of
from hpc_det.node.frames import HELLO, Handshake
from hpc_det.node.network import Rendezvous, await_rendezvous
from hpc_det.store.attempt import failures, request_stop
from tests.launch.gang import Gang
from tests.wait import DEADLINE_S

pytestmark = pytest.mark.integration

NONCE = 32


class Target:
    """A gang on two nodes that trains."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        gang.plan("exec $PYTHON rank.py $HPC_DET_NODE_RANK", scheduler="slurm", nodes=2, ranks_per_node=1)
        self._agents = [gang.start_agent(SLURM_NODEID=node) for node in ("0", "1")]
        gang.wait_for_ranks(0, 1)
        self.meeting: Rendezvous = await_rendezvous(gang.trial.rendezvous(1))

    def connect(self) -> socket.socket:
        return socket.create_connection((self.meeting.host, self.meeting.agents_port), DEADLINE_S)

    def trains_on(self) -> None:
        """Fail unless the gang still trains, obeys a stop request, saves on both nodes and exits."""
        assert [agent.poll() for agent in self._agents] == [None, None], self._gang.printed.read_text()
        request_stop(self._gang.trial.stop, attempt=1, reason="pause", source="a test", deadline=None)
        assert [agent.wait(DEADLINE_S) for agent in self._agents] == [0, 0]
        assert self._gang.saved() == {"0": "pause", "1": "pause"}
        assert failures(self._gang.trial, 1) == []
        assert "Traceback" not in self._gang.printed.read_text()


@pytest.fixture
def target(gang: Gang) -> Iterator[Target]:
    target = Target(gang)
    yield target
    target.trains_on()


def is_hung_up(stranger: socket.socket) -> bool:
    """Wait for the end of the connection; return whether at most a nonce came before it."""
    heard = b""
    with suppress(ConnectionError):
        while piece := stranger.recv(4096):
            heard += piece
    return len(heard) <= NONCE


PACKETS = {
    "invalid Unicode": b"\xff\xfe\xff\n" * 30,
    "60,000 brackets": b"[" * 60_000 + b"\n",
    "HTTP": b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n" * 3,
    "JSON": b'{"token": "guess", "node": 1, "time": 0, "problems": []}\n' * 3,
    "nothing": b"",
}


def test_packets_that_are_no_handshake_are_hung_up_on(target: Target) -> None:
    dice = random.Random(1)
    for packet in [*PACKETS.values(), *(dice.randbytes(dice.randrange(4000)) for _ in range(50))]:
        with target.connect() as stranger, suppress(ConnectionError):
            stranger.sendall(packet)
            stranger.shutdown(socket.SHUT_WR)
            assert is_hung_up(stranger)


def test_a_gigabyte_without_an_end_is_hung_up_on(target: Target) -> None:
    """The listener closes the connection long before all of it has arrived."""
    with target.connect() as stranger, pytest.raises(ConnectionError):
        send_gigabyte(stranger)


def send_gigabyte(connection: socket.socket) -> None:
    for _ in range(1024):
        connection.sendall(bytes(2**20))


def test_hundreds_of_idle_and_of_slow_callers_keep_nobody_out(target: Target) -> None:
    with ExitStack() as callers:
        idle = [callers.enter_context(target.connect()) for _ in range(300)]
        for byte in bytes(20):
            for caller in idle[::10]:
                with suppress(ConnectionError):
                    caller.send(bytes([byte]))
            time.sleep(0.01)
        hung_up = [is_hung_up(caller) for caller in idle]  # the last ones when their time is over
        assert all(hung_up)


def test_a_recorded_handshake_and_a_guessed_key_open_nothing(target: Target) -> None:
    """The right key does not either, for a node that is already connected."""
    said = b'{"role": "agent", "node": 1}'
    for key in (b"", bytes(32), key_of(target.meeting.secret[:-1]), key_of(target.meeting.secret)):
        with target.connect() as stranger:
            nonce = stranger.recv(NONCE, socket.MSG_WAITALL)
            proof = Handshake(key, nonce, bytes(NONCE), said).client_proof
            stranger.sendall(HELLO.pack(bytes(NONCE), proof, len(said)) + said)
            assert stranger.recv(NONCE) == b""


def test_a_storm_of_callers(target: Target) -> None:
    def call(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(100):
            with suppress(OSError), target.connect() as stranger:
                stranger.sendall(dice.randbytes(dice.randrange(200)))

    callers = [threading.Thread(target=call, args=[seed]) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
