from __future__ import annotations

import socket

import pytest

from hpc_det.errors import UsageError
from hpc_det.node.network import address_towards, own_address
from hpc_det.store.failure import first_failure
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
    with pytest.raises(UsageError) as error:
        own_address(2, "ib7")
    assert str(error.value).startswith(
        f"cluster.dtrain_network_interface: {socket.gethostname()} has no 'ib7' with an IPv4 address; it has lo (127.0"
    )


@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_gloo_and_nccl_are_told_of_it_unless_the_user_says_otherwise(gang: Gang, name: str) -> None:
    two_nodes = {"scheduler": "slurm", "nodes": 2, "ranks_per_node": 1}
    variables = ("NCCL_SOCKET_IFNAME=ib0", "SLURM_NODEID=0")
    gang.plan(f"echo ${name} >told", environment=variables, network_interface="lo", **two_nodes)
    agents = [gang.start_agent(SLURM_NODEID=node) for node in ("0", "1")]
    assert [agent.wait(timeout=DEADLINE_S) for agent in agents] == [0, 0]
    assert (gang.code / "told").read_text() == ("ib0\n" if name.startswith("NCCL") else "lo\n")


def test_an_attempt_without_it_fails_before_anything_is_started(gang: Gang) -> None:
    gang.plan("touch started", scheduler="slurm", nodes=2, ranks_per_node=1, network_interface="ib7")
    assert gang.start_agent(SLURM_NODEID="0").wait(timeout=DEADLINE_S) == 1
    failure = first_failure(gang.trial, 1)
    assert failure is not None
    assert failure.user_error
    assert "has no 'ib7'" in failure.message
    assert not (gang.code / "started").exists()
