"""Where the ranks of a gang exchange addresses for their process group: reachable by as few others as possible.

PyTorch's own TCPStore serves everybody who can connect to it, and listens on all interfaces unless it is given a
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

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError
from torch.distributed.constants import default_pg_timeout

from hpc_det.errors import UsageError
from hpc_det.node.network import allow_many_files, loopback_interface, own_address, variables

FILE = "HPC_DET_STORE"
"""Where a launcher of ours says which file the ranks of one node may have: in a folder of this user alone."""
RETRY_S = 0.1
_starts = itertools.count()


def gang_store(rank: int, size: int, nodes: int, env: Mapping[str, str]) -> Store:
    """Every rank calls this as often as the others. On one node a file, between nodes a port.

    A script that torchrun started by hand, and a gang of several nodes under torchrun, use torchrun's own store: its
    port is the one that the ranks know. Raises UsageError where no launcher says where rank 0 is.
    """
    # The agents of several nodes may count restarts differently: membership changes do not count as retries.
    restarts = env.get("TORCHELASTIC_RESTART_COUNT", 0) if nodes == 1 else 0
    this_start = f"{restarts}-{next(_starts)}"
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
        return PrefixStore(this_start, theirs)  # which lives on when this process starts its gang again
    address = address_of_rank_0(name, nodes)
    return _served(address, port, size, this_start) if rank == 0 else _connected(address, port, size, this_start)


def address_of_rank_0(name: str, nodes: int) -> str:
    """Where rank 0 listens and the others go, by MASTER_ADDR: an address of the route between the nodes.

    Debian's stock /etc/hosts gives a host's own name an address of loopback, which other nodes cannot reach.
    """
    found = {each[0]: str(each[4][0]) for each in reversed(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))}
    address = found.get(socket.AF_INET) or found[socket.AF_INET6]
    is_a_host = name != "localhost" and name != address
    if nodes > 1 and is_a_host and ipaddress.ip_address(address).is_loopback:
        return own_address(nodes, None)[0]
    return address


def keep_to_this_node(env: MutableMapping[str, str]) -> None:
    """gloo and NCCL listen on loopback alone, unless the user has named an interface."""
    if interface := loopback_interface():
        for name, value in variables(interface).items():
            env.setdefault(name, value)


def _served(address: str, port: int, size: int, this_start: str) -> Store:
    allow_many_files()  # the store accepts whoever comes, and this rank has to save all the same
    listening = _listening(address, port).detach()
    store = TCPStore(
        address,
        port,
        size,
        is_master=True,
        timeout=default_pg_timeout,
        multi_tenant=True,
        master_listen_fd=listening,
    )
    store.set(this_start, "")
    return store


def _connected(address: str, port: int, size: int, this_start: str) -> Store:
    """To the server of this very start: at the same port a slow rank 0 may still have that of the start before, with
    addresses that nobody listens at any more. That one may end at any moment, also while this rank connects to it."""
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
            f"rank 0 cannot listen on {address}:{port}, which MASTER_ADDR and MASTER_PORT name: {error.strerror}",
        ) from None


def _takes_locks(folder: Path) -> bool:
    """Some network file systems do not, and a store in a file needs them."""
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
