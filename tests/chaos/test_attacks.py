"""The assumptions of test_network.py: what counts as a contact, what is attacked, and what is replayed."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_det.node.frames import HELLO, NONCE_BYTES
from tests.chaos.attacks import KINDS, REPLAYED_FRAMES, Attacker, Target
from tests.chaos.under_attack import Recordings, _address, attack
from tests.facts import refused
from tests.listening import Listening

HANDSHAKE = HELLO.pack(bytes(32), bytes(32), 3) + b"who"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(60)
        yield made


@pytest.fixture
def closed() -> Target:
    with socket.create_server(("127.0.0.1", 0)) as made:
        host, port = made.getsockname()
    return host, port


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["random bytes", "connections opened and closed", "resets", "HTTP"])
def test_only_accepted_connections_count(kind: str, listener: socket.socket, closed: Target) -> None:
    attacker = Attacker([closed, listener.getsockname()], [])
    for _ in itertools.islice(KINDS[kind](attacker), 5):
        pass
    assert list(attacker.contacts) == [0, 5]


def test_a_listener_that_is_not_attacked_is_an_error(listener: socket.socket, closed: Target, tmp_path: Path) -> None:
    recordings, pids = Recordings(tmp_path / "recordings"), [os.getpid()]
    _, port = listener.getsockname()
    with attack([], pids, {"listener": [port]}, recordings):
        pass
    for ports in ([], [port, closed[1]]):
        with refused(AssertionError, "store"), attack([], pids, {"store": ports}, recordings):
            pass


def test_each_recording_is_replayed_the_oldest_first(listener: socket.socket, tmp_path: Path) -> None:
    recordings = Recordings(tmp_path / "recordings")
    for name, frames in (("2", b"second"), ("1", b"first")):
        (recordings.folder / name).write_bytes(HANDSHAKE + frames)
    attacker = Attacker([listener.getsockname()], recordings.files())
    steps = itertools.islice(KINDS[REPLAYED_FRAMES](attacker), 4)
    (replays := threading.Thread(target=deque, args=(steps,), daemon=True)).start()
    for expected in (HANDSHAKE + b"first", b"first", HANDSHAKE + b"second", b"second"):
        connection, _ = listener.accept()
        with connection:
            connection.sendall(bytes(NONCE_BYTES))
            assert connection.recv(len(expected), socket.MSG_WAITALL) == expected
    replays.join()


def test_a_listener_is_attacked_at_its_own_address() -> None:
    found = [_address(Listening(host, 1)) for host in ("10.0.0.1", "0.0.0.0", "::ffff:10.0.0.1", "::", "fd00::1")]
    assert found == [(host, 1) for host in ("10.0.0.1", "127.0.0.1", "10.0.0.1", "127.0.0.1", "fd00::1")]
