"""Addresses, ports, and where the ranks of an attempt meet."""

from __future__ import annotations

import random
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_det.errors import HpcDetError, UsageError
from hpc_det.node.network import address_towards, await_rendezvous, free_port, own_address, publish, tries
from hpc_det.store.attempt import first_failure
from hpc_det.store.folders import TrialFolder
from tests.facts import refused, unnamed
from tests.launch.gang import Gang
from tests.wait import DEADLINE_S


def test_one_node_meets_on_loopback() -> None:
    assert own_address(1, None) == ("127.0.0.1", None)


def test_several_nodes_meet_at_an_address_of_this_machine() -> None:
    address, interface = own_address(2, None)
    with socket.socket() as server:
        server.bind((address, 0))
    assert interface is None or interface in {name for _, name in socket.if_nameindex()}


def test_a_name_that_leads_to_loopback_is_not_what_other_nodes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's stock /etc/hosts gives a host's own name the address 127.0.1.1."""
    if {name for _, name in socket.if_nameindex()} <= {"lo"}:
        pytest.skip("this machine has no interface but loopback")
    monkeypatch.setattr("hpc_det.node.network._resolve", lambda name: "127.0.1.1")
    address, interface = own_address(2, None)
    assert interface != "lo"
    assert not address.startswith("127.")


def test_the_profiles_interface_is_the_one_that_the_others_are_told_of() -> None:
    assert own_address(2, "lo") == ("127.0.0.1", "lo")


def test_the_address_towards_other_hosts_is_of_the_network_that_leads_there() -> None:
    own = next((address for address in (own_address(2, None)[0],) if not address.startswith("127.")), None)
    if own is None:
        pytest.skip("this machine has no interface but loopback")
    neighbour = own.rpartition(".")[0] + (".254" if not own.endswith(".254") else ".253")
    assert address_towards([neighbour]) == own
    assert address_towards(["no-such-host.invalid", own, "localhost", neighbour]) == own
    assert address_towards(["no-such-host.invalid", own, "localhost"]) is None


def test_a_node_that_lacks_it_says_what_it_has() -> None:
    with refused(UsageError, "cluster.dtrain_network_interface", socket.gethostname(), "'ib7'", "lo (127.0.0.1)"):
        own_address(2, "ib7")


@pytest.mark.integration
@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_gloo_and_nccl_are_told_of_it_unless_the_user_says_otherwise(gang: Gang, name: str) -> None:
    two_nodes = {"scheduler": "slurm", "nodes": 2, "ranks_per_node": 1}
    variables = ("NCCL_SOCKET_IFNAME=ib0", "SLURM_NODEID=0")
    gang.plan(f"echo ${name} >told", environment=variables, network_interface="lo", **two_nodes)
    agents = [gang.start_agent(SLURM_NODEID=node) for node in ("0", "1")]
    assert [agent.wait(timeout=DEADLINE_S) for agent in agents] == [0, 0]
    assert (gang.code / "told").read_text() == ("ib0\n" if name.startswith("NCCL") else "lo\n")


@pytest.mark.integration
def test_an_attempt_without_it_fails_before_anything_is_started(gang: Gang) -> None:
    gang.plan("touch started", scheduler="slurm", nodes=2, ranks_per_node=1, network_interface="ib7")
    assert gang.start_agent(SLURM_NODEID="0").wait(timeout=DEADLINE_S) == 1
    failure = first_failure(gang.trial, 1)
    assert failure is not None
    assert failure.user_error
    assert unnamed(failure.message, "cluster.dtrain_network_interface", "'ib7'") == []
    assert not (gang.code / "started").exists()


AWAIT = """
import sys
import time
from pathlib import Path
from hpc_det.node.network import await_rendezvous

print("waiting", flush=True)
print(await_rendezvous(Path(sys.argv[1])))
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return TrialFolder(tmp_path).rendezvous(1)


@pytest.mark.integration
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
    with refused(HpcDetError, path, "node 0", "0 s", "folder"):
        await_rendezvous(path, 0.2)


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
    with refused(HpcDetError, path, "node 0"):
        await_rendezvous(path, 0.1)


def test_a_port_lies_outside_the_ephemeral_range_and_can_be_bound() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = {free_port() for _ in range(20)}
    assert not any(first <= port <= last or port < 1024 for port in ports)
    assert len(ports) > 1  # two jobs on a node do not compete for one port
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
        monkeypatch.setattr("hpc_det.node.network._candidates", lambda: [taken, free])
        assert free_port() == free
        monkeypatch.setattr("hpc_det.node.network._candidates", lambda: [taken])
        with refused(HpcDetError, "TCP port"):
            free_port()
