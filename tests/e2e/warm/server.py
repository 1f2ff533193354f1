"""Fork a rank for each connection of a stand-in."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import NoReturn

import pytest

from hpc_det.node.process import ends_with_parent, ignore_stop_signals
from tests.e2e.warm.stand_in import SERVER
from tests.forked_python import become


@contextmanager
def warm_ranks(folder: Path) -> Iterator[None]:
    """In the block, jobs that this process submits have warm ranks. Needs the fork server."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen()
        process = multiprocessing.get_context("forkserver").Process(target=_serve, args=(listener,))
        process.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(SERVER, str(folder / "socket"))
            yield
    finally:
        process.kill()
        process.join()


def _serve(listener: socket.socket) -> NoReturn:
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]  # else the fork server stays
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the guards
    while True:
        stand_in, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _guard(stand_in)
        stand_in.close()


def _guard(stand_in: socket.socket) -> NoReturn:
    """Guard one rank: kill it when its stand-in ends, and send its exit code to the stand-in."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ends_with_parent()
    wanted = json.loads(stand_in.makefile().readline())
    rank = os.fork()
    if rank == 0:
        stand_in.close()
        os.setsid()
        ends_with_parent()
        ignore_stop_signals()
        become(wanted["program"], wanted["environment"], Path(wanted["folder"]))
    readable, _, _ = select.select([stand_in.fileno(), os.pidfd_open(rank)], [], [])
    is_orphan = stand_in.fileno() in readable
    if is_orphan:
        os.kill(rank, signal.SIGKILL)
    _, status = os.waitpid(rank, 0)
    if not is_orphan:
        stand_in.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)
