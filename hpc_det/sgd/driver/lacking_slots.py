"""Messages of the queue and the agents while the driver waits for slots."""

from __future__ import annotations

import ipaddress
import socket

from hpc_det.node.network import shown_interfaces
from hpc_det.sgd.capacity import Capacity
from hpc_det.sgd.elastic.check_in import CheckIn, failed, shown
from hpc_det.sgd.elastic.meeting import Guests
from hpc_det.store.run_folder import RunFolder


class LackingSlots:
    """The causes why slots are missing, in one wait for them."""

    def __init__(self, run: RunFolder, capacity: Capacity, guests: Guests, host: str, port: int) -> None:
        """`host`, `port`: where the driver listens; `guests`: whom it accepts."""
        self._run = run
        self._capacity = capacity
        self._guests = guests
        self._host, self._port = host, port
        self._earlier = failed(run)
        """Errors of agents before this wait."""

    def state(self, has_agents: bool) -> str:
        """Return the state of the queue and the errors of agents; `has_agents`: whether an agent is connected."""
        silence = [] if has_agents else [f"no agent is connected to the driver at {self._host}:{self._port}"]
        agents = [shown(self._errors())] if self._errors() else silence
        return "; ".join([self._capacity.state(), *agents, *self._rejections()])

    def remedy(self) -> str:
        """Return what to do, for an error message."""
        see = f"see the agents' logs in {self._run.logs}"
        is_of_this_machine = not self._capacity.has_queue and ipaddress.ip_address(self._host).is_loopback
        if is_of_this_machine or not self._errors():
            return see
        return (
            f"if the nodes have no route to {self._host}, or a firewall is in between, pass interface=NAME to GangJob, "
            f"Pool or Allocation, or set dtrain_network_interface in the cluster profile: {socket.gethostname()} has "
            f"{shown_interfaces()}; {see}"
        )

    def _rejections(self) -> list[str]:
        """Return a text about rejected connections, if there were any."""
        # An agent behind address translation comes from another address than it has written.
        addresses = ", ".join(self._guests.rejected)
        return [f"connections from {addresses} were rejected: no agent has this address"] if addresses else []

    def _errors(self) -> list[CheckIn]:
        return [*failed(self._run, self._earlier).values()]
