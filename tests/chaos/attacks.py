"""`python -m tests.chaos.attacks KIND ORDERS COUNT`: attacks ports until it is killed.

ORDERS is a JSON file: "targets", a list of [host, port], and "recordings", the folder of what the tap has written. How
many connections or packets there were so far stands in the file COUNT.
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
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path

from hpc_det.node.frames import HELLO, NONCE_BYTES

PAUSE_S = 0.001
"""Between two connections: the gang has few cores, and is to train meanwhile."""
HELD, THOUSANDS = 300, 3000
"""Connections at a time, the second where they are what the attack is about."""
CONNECT_S = 0.05
_LENGTHS = struct.Struct(">IQ32s")
_STORE_MAGIC = 0x3C85F7CE
"""How a client of PyTorch's TCPStore begins (torch/csrc/distributed/c10d/TCPStoreBackend.hpp: VALIDATE, SET)."""
_STORE_SET = struct.pack("<BIBQ", 0, _STORE_MAGIC, 1, 3) + b"key"

Target = tuple[str, int]


class Attacker:
    def __init__(self, targets: list[Target], recordings: Path) -> None:
        self._targets = targets
        self._recordings = recordings
        self._dice = random.Random(1)
        self._held: deque[socket.socket] = deque()
        _, self._most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._most_files, self._most_files))

    def random_bytes(self) -> Iterator[None]:
        for stranger in self._connections():
            with stranger:
                self._send(stranger, self._dice.randbytes(self._dice.randrange(1, 5000)))
            yield

    def half_a_handshake(self) -> Iterator[None]:
        """And then silence."""
        for stranger in self._connections():
            self._send(stranger, self._hello()[: HELLO.size // 2])
            self._hold(stranger)
            yield

    def a_giant_length(self) -> Iterator[None]:
        """Of an identity, of a frame, of a value of PyTorch's store; and a part of what was announced."""
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
        """Also slow writers: a byte at a time."""
        said = self._hello(100)
        for stranger in self._connections(receives=1):
            self._hold(stranger)
            for each in list(self._held)[-100:]:
                self._send(each, said[:1])
                with suppress(OSError):
                    each.recv(1, socket.MSG_DONTWAIT)
            yield

    def replayed_frames(self) -> Iterator[None]:
        """Of every line of every attempt so far, whole and without the handshake."""
        handshake = HELLO.size + NONCE_BYTES
        connections = self._connections()
        while True:
            for file in sorted(self._recordings.iterdir()):
                recorded = file.read_bytes()
                for said in (recorded, recorded[handshake:]):
                    for _ in self._targets:
                        with next(connections) as stranger:
                            stranger.settimeout(0.2)
                            with suppress(OSError):
                                stranger.recv(NONCE_BYTES, socket.MSG_WAITALL)
                                stranger.sendall(said)
                                stranger.recv(1)
                        yield

    def resets(self) -> Iterator[None]:
        for stranger in self._connections():
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._send(stranger, self._hello()[: self._dice.randrange(HELLO.size)])
            stranger.close()
            yield

    def udp(self) -> Iterator[None]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for target in cycle(self._targets):
                with suppress(OSError):  # the kernel says that nobody listens there
                    sender.sendto(self._dice.randbytes(self._dice.randrange(1, 1400)), target)
                yield

    def http(self) -> Iterator[None]:
        for stranger in self._connections():
            with stranger:
                self._send(stranger, b"GET / HTTP/1.1\r\nHost: node\r\n\r\n" * self._dice.randrange(1, 20))
                with suppress(OSError):
                    stranger.recv(4096, socket.MSG_DONTWAIT)
            yield

    def _connections(self, receives: int | None = None) -> Iterator[socket.socket]:
        """To one target after the other. `receives`: bytes that the kernel is to take for the stranger."""
        for target in cycle(self._targets):
            stranger = socket.socket()
            stranger.settimeout(CONNECT_S)
            if receives:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
            with suppress(OSError):  # its queue is full, or a listener has gone
                stranger.connect(target)
            yield stranger

    def _hold(self, stranger: socket.socket, most: int = HELD) -> None:
        self._held.append(stranger)
        if len(self._held) > most:
            self._held.popleft().close()

    def _send(self, stranger: socket.socket, data: bytes) -> None:
        with suppress(OSError):
            stranger.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _hello(self, length: int = 28) -> bytes:
        return HELLO.pack(self._dice.randbytes(32), self._dice.randbytes(32), length)


HELD_CONNECTIONS = "thousands of connections held"
KINDS: dict[str, Callable[[Attacker], Iterator[None]]] = {
    "random bytes": Attacker.random_bytes,
    "half a handshake, then silence": Attacker.half_a_handshake,
    "a giant length": Attacker.a_giant_length,
    HELD_CONNECTIONS: Attacker.thousands_of_connections,
    "connections opened and closed": Attacker.open_and_close,
    "slow readers and writers": Attacker.slow_readers,
    "frames replayed": Attacker.replayed_frames,
    "resets": Attacker.resets,
    "UDP": Attacker.udp,
    "HTTP": Attacker.http,
}


def main(kind: str, orders: Path, count: Path) -> None:
    read = json.loads(orders.read_text())
    attacker = Attacker([(host, port) for host, port in read["targets"]], Path(read["recordings"]))
    with count.open("wb", buffering=0) as file:
        for number, _ in enumerate(KINDS[kind](attacker), 1):
            os.pwrite(file.fileno(), b"%d" % number, 0)
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
