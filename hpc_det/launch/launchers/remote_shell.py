"""mpirun's remote shell: python3 -m hpc_det.launch.launchers.remote_shell [-x] HOST COMMAND...

mpirun calls it as it would call ssh. HOST is a name that `host_name` made; the launcher that waits on that node of the
gang runs COMMAND, as long as this process lives.
"""

from __future__ import annotations

import ipaddress
import os
import sys

from hpc_det.errors import HpcDetError
from hpc_det.launch.launchers.nodes import CONNECTION_LOST, run_on
from hpc_det.store.attempt import Attempt

_FIRST = ipaddress.IPv4Address("198.18.0.0")  # no host has these: they are for benchmarks of networks (RFC 2544)


def host_name(node: int) -> str:
    """What mpirun calls a node: number 0 is its own; the others look like addresses, which nobody looks up."""
    return str(_FIRST + node) if node else "localhost"


def node_of(host: str) -> int:
    return int(ipaddress.IPv4Address(host)) - int(_FIRST)


def main(argv: list[str]) -> int:
    host, *command = [word for word in argv[:1] if word != "-x"] + argv[1:]
    try:
        return run_on(Attempt.from_env(os.environ), node_of(host), " ".join(command))
    except (HpcDetError, OSError) as error:
        print(f"hpc-det: node {host}: {error}", file=sys.stderr, flush=True)
        return CONNECTION_LOST


if __name__ == "__main__":
    from hpc_det.node.process import block_stop_signals

    block_stop_signals()  # mpirun starts it with all signals as usual
    sys.exit(main(sys.argv[1:]))
