"""The address on which the driver of a gang job listens."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hpc_det.errors import UsageError
from hpc_det.sgd.capacity.driver_address import driver_address
from tests.facts import refused, unnamed
from tests.stub import Stub

pytestmark = pytest.mark.integration
NETWORKS = {"10.1.0.7": "10.1.0.1", "10.2.0.7": "10.2.0.1", "198.51.100.2": "198.51.100.2"}
"""The address of this host on the route to each address of another host."""
NAMES = {"cpu7": "10.1.0.7", "gpu7": "10.2.0.7", socket.gethostname(): "198.51.100.2"}


@pytest.fixture(autouse=True)
def _two_networks(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The partition gpu is in another network than the other nodes, and the default route leads to a third one."""
    monkeypatch.setattr("hpc_det.node.network.routed_from", NETWORKS.get)
    monkeypatch.setattr("hpc_det.node.network._resolve", NAMES.get)
    stub("sinfo", 'case "$*" in *--partition=gpu*) echo gpu7;; *--partition=*) ;; *) echo cpu7; echo gpu7;; esac')


@pytest.mark.parametrize(
    ("partition", "address"), [("gpu", "10.2.0.1"), (None, "10.1.0.1"), ("no-such-partition", "10.1.0.1")]
)
def test_it_is_on_the_route_to_the_nodes_of_the_jobs(
    partition: str | None, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert driver_address("slurm", partition, None) == address
    assert caplog.messages == []


def test_pbs_lists_its_nodes_too(stub: Stub) -> None:
    stub("pbsnodes", "echo gpu7; echo '     Mom = gpu7'")
    assert driver_address("pbs", None, None) == "10.2.0.1"


@pytest.mark.parametrize("nodes", ["exit 1", "echo unknown7"])
def test_nodes_without_a_known_route_are_a_warning(stub: Stub, nodes: str, caplog: pytest.LogCaptureFixture) -> None:
    stub("sinfo", nodes)
    assert driver_address("slurm", None, None) == "198.51.100.2"
    assert unnamed(caplog.text, "198.51.100.2", "interface=", "lo (127.0.0.1)") == []


def test_a_cluster_of_this_host_alone_needs_no_route(stub: Stub, caplog: pytest.LogCaptureFixture) -> None:
    stub("sinfo", f"echo {socket.gethostname()}")
    assert driver_address("slurm", None, None) == "198.51.100.2"
    assert caplog.messages == []


def test_the_interface_that_is_given_comes_first(stub: Stub, tmp_path: Path) -> None:
    stub("sinfo", f"touch {tmp_path}/asked")
    assert driver_address("slurm", "gpu", "lo") == "127.0.0.1"
    assert not (tmp_path / "asked").exists()
    with refused(UsageError, "interface: ", "'ib7'", "lo (127.0.0.1)"):
        driver_address("slurm", "gpu", "ib7")
