"""The one process of a site: it answers the commands, reaps and polls the jobs, and schedules."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.labs.pbs import dependencies, job_life, mom, mom_requests, requests, scheduler
from tests.labs.pbs.resources import Refused
from tests.labs.pbs.site import Site
from tests.labs.pbs.state import Node, Pbs

TICK_S = 0.02
Handler = Callable[[Pbs, Any, dict[str, Any]], dict[str, Any] | None]
Handlers = Mapping[str, Handler]


class Peer:
    """The sender of a request, which may be answered later, or more than once."""

    def __init__(self, connection: socket.socket, handlers: Handlers) -> None:
        self.socket = connection
        self.handlers = handlers
        self.buffer = b""

    def send(self, **answer: Any) -> None:
        try:
            self.socket.sendall(json.dumps(answer).encode() + b"\n")
        except OSError:
            return  # the peer has ended


class Server:
    def __init__(self, site: Site) -> None:
        settings = site.settings()
        self.pbs = Pbs(site, settings, {name: Node(name) for name in settings.nodes})
        self.selector = selectors.DefaultSelector()
        self.stopping = False
        self.listener: socket.socket | None = None
        self._listen(site.mom_socket, mom_requests.OF_MOM)

    def run(self) -> None:
        self._watch_signals()
        self._keep_listening()
        try:
            while not self.stopping:
                for key, _ in self.selector.select(TICK_S if self._is_busy() else None):
                    key.data(key.fileobj)
                self._tick()
        finally:
            self._end_all()

    def _is_busy(self) -> bool:
        return any(not job.is_done for job in self.pbs.jobs.values())

    def _watch_signals(self) -> None:
        reader, writer = os.pipe()
        for end in (reader, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer)
        self.selector.register(reader, selectors.EVENT_READ, lambda fd: os.read(fd, 4096))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def _stop(self, *_: object) -> None:
        self.stopping = True

    def _keep_listening(self) -> None:
        """Open or close the server's socket: a PBS server that is down has none, while its jobs keep running."""
        path = self.pbs.site.server_socket
        if self.pbs.answers and self.listener is None:
            self.listener = self._listen(path, requests.OF_SERVER)
        elif not self.pbs.answers and self.listener is not None:
            self.selector.unregister(self.listener)
            self.listener.close()
            self.listener = None
            path.unlink()

    def _listen(self, path: Path, handlers: Handlers) -> socket.socket:
        """Listen on a socket that gets its name only afterwards, so that every client that sees it is answered."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{path}.new")
        listener.listen(64)
        os.rename(f"{path}.new", path)
        self.selector.register(listener, selectors.EVENT_READ, lambda _: self._accept(listener, handlers))
        return listener

    def _accept(self, listener: socket.socket, handlers: Handlers) -> None:
        peer = Peer(listener.accept()[0], handlers)
        self.selector.register(peer.socket, selectors.EVENT_READ, lambda _: self._read(peer))

    def _read(self, peer: Peer) -> None:
        try:
            data = peer.socket.recv(1 << 16)
        except ConnectionResetError:  # the peer was killed before it read its answer
            data = b""
        if not data:
            self.selector.unregister(peer.socket)
            peer.socket.close()
            return
        *lines, peer.buffer = (peer.buffer + data).split(b"\n")
        for line in lines:
            self._answer(peer, json.loads(line))

    def _answer(self, peer: Peer, request: dict[str, Any]) -> None:
        try:
            answer = peer.handlers[request["do"]](self.pbs, peer, request)
        except Refused as refusal:
            answer = {"code": refusal.code, "text": refusal.text}
        self._keep_listening()
        if answer is not None:
            peer.send(**answer)

    def _tick(self) -> None:
        self._reap()
        job_life.poll(self.pbs)
        if self.pbs.answers:
            dependencies.settle(self.pbs)
            self._forget_history()
            scheduler.cycle(self.pbs)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            job_life.ended(self.pbs, pid, code if code >= 0 else 256 - code)

    def _forget_history(self) -> None:
        if not self.pbs.settings.job_history_enable:
            for job in [job for job in self.pbs.jobs.values() if job.state == "F" and not job.parent]:
                self.pbs.forget(job)

    def _end_all(self) -> None:
        """Kill every process of every job, also those that left its session."""
        end = time.monotonic() + 5
        while (left := mom.descendants(os.getpid())) and time.monotonic() < end:
            mom.signal_processes(left, signal.SIGKILL)
            self._reap()
            time.sleep(0.005)


def main(home: str) -> None:
    mom.adopt_orphans_and_die_with_parent()
    os.umask(0o022)
    Server(Site(Path(home))).run()


if __name__ == "__main__":
    main(sys.argv[1])
