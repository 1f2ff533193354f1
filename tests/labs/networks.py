"""Network namespaces for the nodes of a test, joined by a bridge in another one. The machine's network is not
changed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from contextlib import suppress


class Networks:
    """Nodes 0 to `count` - 1, each with an address that the others reach."""

    def __init__(self, count: int) -> None:
        self._prefix = f"hd-{uuid.uuid4().hex[:8]}"
        self.names = [f"{self._prefix}-{node}" for node in range(count)]
        """Names of the namespaces, by node."""
        self.paths = [f"/run/netns/{name}" for name in self.names]
        self.addresses = [f"10.67.0.{node + 1}" for node in range(count)]
        self._switch = f"{self._prefix}-switch"
        self._ip("netns", "add", self._switch)
        self._ip("-n", self._switch, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
        self._ip("-n", self._switch, "link", "set", "bridge", "up")
        for node in range(count):
            self._join(node)

    def _join(self, node: int) -> None:
        name, port = self.names[node], f"port{node}"
        self._ip("netns", "add", name)
        self._ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        self._ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
        self._ip("-n", name, "addr", "add", f"{self.addresses[node]}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            self._ip("-n", name, "link", "set", link, "up")

    def cut(self, node: int) -> None:
        """Pull the cable of a node: all packets are lost, and no connection is closed."""
        self._ip("-n", self._switch, "link", "set", f"port{node}", "down")

    def mend(self, node: int) -> None:
        self._ip("-n", self._switch, "link", "set", f"port{node}", "up")

    def power_off(self, node: int) -> None:
        """Kill all processes on the node."""
        while pids := self._ip("netns", "pids", self.names[node]).split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def through(self, node: int) -> list[str]:
        """Return the prefix of a command line that runs it on the node."""
        return ["nsenter", f"--net={self.paths[node]}"]

    def close(self) -> None:
        for name in [*self.names, self._switch]:
            self._ip("netns", "del", name)

    @staticmethod
    def _ip(*arguments: str) -> str:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
        assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
        return done.stdout


def available() -> str | None:
    """Return the reason why this machine cannot have networks, or None."""
    try:
        Networks(1).close()
    except (OSError, AssertionError) as error:
        return f"needs root and leave to make network namespaces: {error}"
    return None
