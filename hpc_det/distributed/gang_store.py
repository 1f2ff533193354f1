"""The store through which the ranks of a gang exchange addresses for their process group, with restricted access.

PyTorch's own TCPStore serves every process that can connect to it, and listens on all interfaces unless it is given a
socket.
"""

from __future__ import annotations

import fcntl
import ipaddress
import itertools
import os
import socket
import time
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistNetworkError, FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout

from hpc_det.errors import UsageError
from hpc_det.node.network import allow_many_files, loopback_interface, own_address, variables

FILE = "HPC_DET_STORE"
"""Environment variable in which our launcher passes the file of the store of a gang on one node.

The file is in a folder that only this user can access.
"""
RETRY_S = 0.1
"""Seconds between two attempts to connect to rank 0's store."""
_starts = itertools.count()


def gang_store(rank: int, size: int, nodes: int, env: Mapping[str, str]) -> Store:
    """Return the store for the next process group: a file on one node, a TCP port between nodes.

    Every rank must call this the same number of times. A script that was started with torchrun by hand, and a gang of
    several nodes under torchrun, use torchrun's own store, because its port is the one that the ranks know. Raises
    UsageError if MASTER_ADDR or MASTER_PORT is not set.
    """
    # On several nodes the agents may count restarts differently: membership changes do not count as retries.
    restarts = env.get("TORCHELASTIC_RESTART_COUNT", 0) if nodes == 1 else 0
    this_start = f"{restarts}-{next(_starts)}"
    # Ranks that a script starts by itself inherit FILE, but their launcher sets another MASTER_PORT.
    is_ours = FILE in env and env.get("MASTER_PORT") == env.get("HPC_DET_MASTER_PORT")
    if nodes == 1 and is_ours and _takes_locks(Path(env[FILE]).parent):
        store: Store = FileStore(f"{env[FILE]}-{this_start}", size)
        store.set_timeout(default_pg_timeout)
        return store
    try:
        name, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    except KeyError as missing:
        raise UsageError(
            f"{missing.args[0]} is not set, and WORLD_SIZE is {size}: start the script with a launcher, such as "
            f"torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as it does"
        ) from None
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        theirs = TCPStore(name, port, size, is_master=False, timeout=default_pg_timeout)
        return PrefixStore(this_start, theirs)  # the store survives a restart of the gang, so keys need a prefix
    address = address_of_rank_0(name, nodes)
    return _served(address, port, size, this_start) if rank == 0 else _connected(address, port, size, this_start)


def address_of_rank_0(name: str, nodes: int) -> str:
    """Return the address at which rank 0 listens, from MASTER_ADDR: one on the route between the nodes."""
    # reversed: of several addresses of one family, the first replaces the others
    found = {each[0]: str(each[4][0]) for each in reversed(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))}
    address = found.get(socket.AF_INET) or found[socket.AF_INET6]
    is_a_host = name != "localhost" and name != address
    # Debian's stock /etc/hosts maps a host's own name to a loopback address, which other nodes cannot reach.
    if nodes > 1 and is_a_host and ipaddress.ip_address(address).is_loopback:
        return own_address(nodes, None)[0]
    return address


def keep_to_this_node(env: MutableMapping[str, str]) -> None:
    """Make gloo and NCCL listen on loopback only, unless the user has named an interface."""
    if interface := loopback_interface():
        for name, value in variables(interface).items():
            env.setdefault(name, value)


def _served(address: str, port: int, size: int, this_start: str) -> Store:
    allow_many_files()  # the store accepts every connection, and this rank must still be able to open its checkpoint
    listening = _listening(address, port).detach()
    store = TCPStore(
        address,
        port,
        size,
        is_master=True,
        timeout=default_pg_timeout,
        multi_tenant=True,  # as in torch/distributed/rendezvous.py
        master_listen_fd=listening,
    )
    store.set(this_start, "")  # `_connected` waits for this key
    return store


def _connected(address: str, port: int, size: int, this_start: str) -> Store:
    """Return a store connected to rank 0's server of this start. Raises DistNetworkError after torch's timeout."""
    # A slow rank 0 may still serve the previous start at the same port, with addresses at which no rank listens any
    # more. That server may end at any moment, also during this connection: then connect again.
    end = time.monotonic() + default_pg_timeout.total_seconds()
    while True:
        left = timedelta(seconds=max(end - time.monotonic(), 1))
        try:
            store = TCPStore(address, port, size, is_master=False, timeout=left)
            store.wait([this_start])
        except DistNetworkError:
            if time.monotonic() > end:
                raise
            time.sleep(RETRY_S)
        else:
            store.set_timeout(default_pg_timeout)
            return store


def _listening(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=4096)
    except OSError as error:
        raise OSError(
            error.errno,
            f"rank 0 cannot listen on {address}:{port} (MASTER_ADDR and MASTER_PORT): {error.strerror}",
        ) from None


def _takes_locks(folder: Path) -> bool:
    """Return whether the file system supports flock(2), which FileStore needs and some network file systems lack."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
