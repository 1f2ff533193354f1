from __future__ import annotations

import random
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_det.errors import HpcDetError
from hpc_det.node.rendezvous import await_rendezvous, free_port, publish, tries
from hpc_det.store.folders import TrialFolder

AWAIT = """
import sys
import time
from pathlib import Path
from hpc_det.node.rendezvous import await_rendezvous

print("waiting", flush=True)
print(await_rendezvous(Path(sys.argv[1])))
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return TrialFolder(tmp_path).rendezvous(1)


def test_a_node_that_came_first_waits_and_reads_what_node_0_publishes(path: Path) -> None:
    command = [sys.executable, "-c", AWAIT, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "waiting\n"
        meeting = publish(path, "10.0.0.7")
        assert waiting.stdout.read() == f"{meeting}\n"
    assert meeting.host == "10.0.0.7"


def test_a_node_that_comes_late_reads_it_at_once(path: Path) -> None:
    meeting = publish(path, "10.0.0.7")
    assert await_rendezvous(path, 1) == meeting


def test_another_attempt_meets_elsewhere(tmp_path: Path) -> None:
    trial = TrialFolder(tmp_path)
    first, second = publish(trial.rendezvous(1), "a"), publish(trial.rendezvous(2), "a")
    assert await_rendezvous(trial.rendezvous(1), 1) == first
    assert first.secret != second.secret


def test_where_node_0_publishes_nothing_the_wait_ends_with_a_hint(path: Path) -> None:
    with pytest.raises(HpcDetError) as error:
        await_rendezvous(path, 0.2)
    assert str(error.value) == f"{path}: node 0 published no rendezvous in 0 s; do all nodes see this folder?"


def test_a_wait_does_not_count_the_time_for_which_its_process_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    looks = tries(100)
    next(looks)
    now[0] += 1000
    next(looks)
    before = now[0]
    assert len(list(looks)) > 60
    assert now[0] - before < 100


def test_the_secret_is_the_owners_alone(path: Path) -> None:
    meeting = publish(path, "10.0.0.7")
    assert len(bytes.fromhex(meeting.secret)) == 16
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_nothing_half_written_is_ever_read(path: Path) -> None:
    path.parent.mkdir()
    path.with_name(".rendezvous.json.part").write_text('{"host": "10.0')
    with pytest.raises(HpcDetError, match="published no rendezvous"):
        await_rendezvous(path, 0.1)


def test_a_port_lies_outside_the_ephemeral_range_and_can_be_bound() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = {free_port() for _ in range(20)}
    assert not any(first <= port <= last or port < 1024 for port in ports)
    assert len(ports) > 1  # two jobs on a node do not race for the same one
    with socket.socket() as server:
        server.bind(("", ports.pop()))
        server.listen()


def test_programs_with_the_same_seed_do_not_race_for_the_same_port_and_draw_the_same_afterwards() -> None:
    chosen, drawn = set(), set()
    for _ in range(20):
        random.seed(0)
        chosen.add(free_port())
        drawn.add(random.random())
    assert len(chosen) > 1
    assert len(drawn) == 1


def test_a_port_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("", free_port()))
        server.listen()
        taken = server.getsockname()[1]
        free = free_port()
        monkeypatch.setattr("hpc_det.node.rendezvous._candidates", lambda: [taken, free])
        assert free_port() == free
        monkeypatch.setattr("hpc_det.node.rendezvous._candidates", lambda: [taken])
        with pytest.raises(HpcDetError, match="no free TCP port"):
            free_port()
