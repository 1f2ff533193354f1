"""Requests between the launchers of a gang's nodes, and requests that they refuse."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_det.errors import HpcDetError
from hpc_det.launch.launchers import nodes
from hpc_det.launch.launchers.nodes import FollowingLauncher, host_name, node_of, run_on
from hpc_det.node.files import share
from hpc_det.node.frames import NONCE_BYTES
from hpc_det.node.json_files import write_json
from hpc_det.node.key import derived
from hpc_det.node.lines import connect
from hpc_det.store.attempt import Attempt
from tests.node.relay import relay
from tests.store.test_attempt import ATTEMPT
from tests.wait import DEADLINE_S, wait_for


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """Return an attempt whose folder is writable, for a launcher that waits on node 1."""
    attempt = replace(ATTEMPT, folder=str(tmp_path), address="127.0.0.1")
    attempt.trial.rendezvous(attempt.number).parent.mkdir()
    return attempt


class Waiting:
    """A launcher on node 1 that waits for requests in a thread."""

    def __init__(self, attempt: Attempt) -> None:
        self.code: int | None = None
        self.launcher = FollowingLauncher(attempt)
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()
        wait_for(attempt.trial.launcher(attempt.number, 1).exists)

    def end(self) -> None:
        """End the launcher as node 0 does."""
        line = connect(*self.launcher.address, derived(ATTEMPT.secret.encode(), "launchers"), {}, DEADLINE_S)
        line.send({"end": 0})
        self.thread.join()
        line.close()

    def _serve(self) -> None:
        self.code = self.launcher.serve()


def test_the_address_of_a_launcher_is_private_in_a_shared_experiment(attempt: Attempt) -> None:
    share(attempt.trial.rendezvous(attempt.number).parent, os.getegid())
    waiting = Waiting(attempt)
    waiting.end()
    assert attempt.trial.launcher(attempt.number, 1).stat().st_mode & 0o077 == 0


@pytest.fixture
def waiting(attempt: Attempt) -> Iterator[Waiting]:
    waiting = Waiting(attempt)
    yield waiting
    waiting.end()


@pytest.mark.integration
def test_a_command_runs_on_the_other_node_and_its_exit_code_comes_back(attempt: Attempt, waiting: Waiting) -> None:
    assert run_on(attempt, 1, f"echo $((40 + 2)) >{attempt.folder}/said; exit 3") == 3
    assert Path(attempt.folder, "said").read_text() == "42\n"


@pytest.mark.integration
def test_whoever_does_not_know_the_secret_is_refused(
    attempt: Attempt, waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = replace(attempt, secret="guessed")
    with monkeypatch.context() as patch:
        patch.setattr(nodes, "_CONNECT_S", 0.5)
        with pytest.raises(HpcDetError):
            run_on(stranger, 1, f"touch {attempt.folder}/intruder")
    assert not Path(attempt.folder, "intruder").exists()
    assert run_on(attempt, 1, "true") == 0


@pytest.mark.integration
def test_an_overheard_request_is_worth_nothing_later(attempt: Attempt, waiting: Waiting) -> None:
    at = attempt.trial.launcher(attempt.number, 1)
    where: dict[str, Any] = json.loads(at.read_text())
    with relay(waiting.launcher.address) as wire:
        write_json(at, where | {"host": wire.host, "port": wire.port})
        run_on(attempt, 1, f"echo ran >>{attempt.folder}/ran")
    with socket.create_connection(waiting.launcher.address) as host:
        host.sendall(wire.recorded["to listener"])
        with suppress(ConnectionError):
            assert len(host.recv(4096, socket.MSG_WAITALL)) <= NONCE_BYTES
    assert Path(attempt.folder, "ran").read_text() == "ran\n"
    write_json(at, where)


@pytest.mark.integration
@pytest.mark.parametrize("said", [b"", b"\n", b"GET / HTTP/1.0\r\n\r\n", b'{"request": 1}\n', b"[" * 60_000])
def test_nonsense_disturbs_nobody(attempt: Attempt, waiting: Waiting, said: bytes) -> None:
    with socket.create_connection(waiting.launcher.address) as connection, suppress(ConnectionError):
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
    assert run_on(attempt, 1, "true") == 0


@pytest.mark.integration
def test_a_command_ends_when_the_asking_side_is_gone(attempt: Attempt, waiting: Waiting) -> None:
    sleeps = [sys.executable, "-m", "hpc_det.launch.launchers.nodes", host_name(1), "sleep 60"]
    with subprocess.Popen(sleeps, env=os.environ | attempt.to_env()) as asking:
        wait_for(lambda: waiting.launcher.children)
        asking.kill()
    (child,) = waiting.launcher.children.values()
    assert child.wait(timeout=DEADLINE_S) == -signal.SIGKILL


def test_the_secret_lies_in_no_file_that_tells_where_a_launcher_listens(attempt: Attempt, waiting: Waiting) -> None:
    record = attempt.trial.launcher(attempt.number, 1)
    assert attempt.secret not in record.read_text()
    assert record.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("node", [1, 2, 255, 256, 4095])
def test_mpiruns_names_of_nodes_are_numbers_again(node: int) -> None:
    assert node_of(host_name(node)) == node


def test_node_0_is_mpiruns_own() -> None:
    assert host_name(0) == "localhost"


def test_a_launcher_that_comes_late_finds_that_the_gang_has_ended(attempt: Attempt) -> None:
    write_json(attempt.trial.launcher(attempt.number, 0), {"ended": 3})
    assert FollowingLauncher(attempt).serve() == 3
