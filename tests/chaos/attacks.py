"""`python -m tests.chaos.attacks KIND ORDERS CONTACTS`: attack ports until this process is killed.

ORDERS is a JSON file: "targets", a list of [host, port], and "recordings", files that the tap has written. CONTACTS is
a file with the number of contacts with each target so far: connections that it has accepted, or packets.
"""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import struct
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Final

from hpc_det.node.frames import HELLO, NONCE_BYTES

PAUSE_S = 0.001
"""Seconds between two connections: the gang has few cores, and must train meanwhile."""
HELD, THOUSANDS = 300, 3000
"""Number of open connections; the second is for the attack that consists of many connections."""
CONNECT_S, ANSWER_S = 0.05, 0.2
_LENGTHS = struct.Struct(">IQ32s")
_STORE_MAGIC = 0x3C85F7CE
"""Start of a message from a client of PyTorch's TCPStore (torch/csrc/distributed/c10d/TCPStoreBackend.hpp: VALIDATE,
SET).
"""
_STORE_SET = struct.pack("<BIBQ", 0, _STORE_MAGIC, 1, 3) + b"key"

Target = tuple[str, int]
COUNTS: Final = "Q"
"""CONTACTS is an array of this type, in the order of the targets."""


class Attacker:
    def __init__(self, targets: list[Target], recordings: list[Path]) -> None:
        self.contacts = array(COUNTS, [0] * len(targets))
        self._targets = targets
        self._recordings = recordings
        self._dice = random.Random(1)
        self._held: deque[socket.socket] = deque()
        self._most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)

    def random_bytes(self) -> Iterator[None]:
        for stranger in self._connections():
            with stranger:
                self._send(stranger, self._dice.randbytes(self._dice.randrange(1, 5000)))
            yield

    def half_a_handshake(self) -> Iterator[None]:
        """Send half a handshake, then nothing."""
        for stranger in self._connections():
            self._send(stranger, self._hello()[: HELLO.size // 2])
            self._hold(stranger)
            yield

    def a_giant_length(self) -> Iterator[None]:
        """Announce a giant identity, frame or value of PyTorch's store, and send a part of it."""
        for stranger in self._connections():
            openings = (self._hello(2**16 - 1), _LENGTHS.pack(2**32 - 1, 2**64 - 1, bytes(32)))
            stores = [_STORE_SET + struct.pack("<Q", length) for length in (2**31, 2**62, 2**64 - 1)]
            self._send(stranger, self._dice.choice([*openings, *stores]) + bytes(2**16))
            self._hold(stranger)
            yield

    def thousands_of_connections(self) -> Iterator[None]:
        for stranger in self._connections():
            self._hold(stranger, min(THOUSANDS, self._most_files - 100))
            yield

    def open_and_close(self) -> Iterator[None]:
        for stranger in self._connections():
            stranger.close()
            yield

    def slow_readers(self) -> Iterator[None]:
        """Read and write slowly, one byte at a time."""
        data = self._hello(100)
        for stranger in self._connections(receives=1):
            self._hold(stranger)
            for each in list(self._held)[-100:]:
                self._send(each, data[:1])
                with suppress(OSError):
                    each.recv(1, socket.MSG_DONTWAIT)
            yield

    def replayed_frames(self) -> Iterator[None]:
        """Send each recording to each target, whole and without its handshake."""
        for file in cycle(self._recordings):
            recorded = file.read_bytes()
            for data in (recorded, frames_of(recorded)):
                for number in range(len(self._targets)):
                    while (stranger := self._connected(number)) is None:
                        pass
                    self._exchange(stranger, data)
                    yield

    def resets(self) -> Iterator[None]:
        for stranger in self._connections():
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._send(stranger, self._hello()[: self._dice.randrange(HELLO.size)])
            stranger.close()
            yield

    def udp(self) -> Iterator[None]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for number in cycle(range(len(self._targets))):
                sender.sendto(self._dice.randbytes(self._dice.randrange(1, 1400)), self._targets[number])
                self.contacts[number] += 1
                yield

    def http(self) -> Iterator[None]:
        for stranger in self._connections():
            with stranger:
                self._send(stranger, b"GET / HTTP/1.1\r\nHost: node\r\n\r\n" * self._dice.randrange(1, 20))
                with suppress(OSError):
                    stranger.recv(4096, socket.MSG_DONTWAIT)
            yield

    def _connections(self, receives: int | None = None) -> Iterator[socket.socket]:
        """Yield connections to each target in turn, except those that accept none. `receives`: bytes that the kernel
        buffers.
        """
        for number in cycle(range(len(self._targets))):
            if stranger := self._connected(number, receives):
                yield stranger

    def _connected(self, number: int, receives: int | None = None) -> socket.socket | None:
        """Return a connection, or None if the target's queue is full or the target has ended."""
        host, _ = self._targets[number]
        stranger = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        stranger.settimeout(CONNECT_S)
        if receives:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        try:
            stranger.connect(self._targets[number])
        except OSError:
            stranger.close()
            time.sleep(PAUSE_S)
            return None
        self.contacts[number] += 1
        return stranger

    def _exchange(self, stranger: socket.socket, data: bytes) -> None:
        with stranger:
            stranger.settimeout(ANSWER_S)
            with suppress(OSError):  # not every listener sends a nonce
                stranger.recv(NONCE_BYTES, socket.MSG_WAITALL)
            with suppress(OSError):
                stranger.sendall(data)
                stranger.recv(1)

    def _hold(self, stranger: socket.socket, most: int = HELD) -> None:
        self._held.append(stranger)
        if len(self._held) > most:
            self._held.popleft().close()

    def _send(self, stranger: socket.socket, data: bytes) -> None:
        with suppress(OSError):
            stranger.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _hello(self, length: int = 28) -> bytes:
        return HELLO.pack(self._dice.randbytes(32), self._dice.randbytes(32), length)


def frames_of(recorded: bytes) -> bytes:
    """Return the bytes that a client sent after its handshake (hpc_det.node.frames)."""
    if len(recorded) < HELLO.size:
        return b""
    _, _, length = HELLO.unpack_from(recorded)
    return recorded[HELLO.size + length :]


HELD_CONNECTIONS, REPLAYED_FRAMES = "thousands of connections held", "frames replayed"
KINDS: dict[str, Callable[[Attacker], Iterator[None]]] = {
    "random bytes": Attacker.random_bytes,
    "half a handshake, then silence": Attacker.half_a_handshake,
    "a giant length": Attacker.a_giant_length,
    HELD_CONNECTIONS: Attacker.thousands_of_connections,
    "connections opened and closed": Attacker.open_and_close,
    "slow readers and writers": Attacker.slow_readers,
    REPLAYED_FRAMES: Attacker.replayed_frames,
    "resets": Attacker.resets,
    "UDP": Attacker.udp,
    "HTTP": Attacker.http,
}


def contacts_needed(kind: str, recordings: Collection[Path]) -> int:
    """Return how many contacts with each target the whole attack takes."""
    return 2 * len(recordings) if kind == REPLAYED_FRAMES else 1


def main(kind: str, orders: Path, contacts: Path) -> None:
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    read = json.loads(orders.read_text())
    attacker = Attacker([(host, port) for host, port in read["targets"]], [Path(file) for file in read["recordings"]])
    with contacts.open("wb", buffering=0) as file:
        for _ in KINDS[kind](attacker):
            os.pwrite(file.fileno(), attacker.contacts.tobytes(), 0)
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
