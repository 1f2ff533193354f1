"""What crosses a line, byte by byte; no sockets here. Over TCP both ends first show that they hold the same key:

    listener -> client    nonce
    client -> listener    nonce, proof, length of the identity, identity (JSON)
    listener -> client    proof

and then each sends messages:

    length of the head, length of the body, SHA-256 of both, seal; head (JSON), body

Proofs and seals are HMAC-SHA256. Proofs and the keys of the two directions are derived from the shared key, both nonces
and the identity, so that no recording fits another line; a seal covers the number of its message, so that none is
repeated, left out, or moved. Lengths are believed after the seal, and nothing is parsed before all of it was checked.
Whoever listens on the network can read along. Processes of one user on one node need no key: a Unix socket lets in this
user alone. Their messages have no seal and no body.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_det.node.key import derived

if TYPE_CHECKING:
    from hashlib import _Hash

    Bytes = bytes | bytearray | memoryview
    Reading = Generator[int, Bytes, None]
    """Yields how many bytes it can use at most, and is sent as many or fewer."""

NONCE_BYTES = MAC_BYTES = 32
LONGEST_IDENTITY = 1024
LONGEST_HEAD = 2**20
_LONGEST_BODY = 2**64
HELLO = struct.Struct(f">{NONCE_BYTES}s{MAC_BYTES}sH")
_LENGTHS = struct.Struct(">IQ32s")


Head = dict[str, Any]
"""The JSON object of a message."""


class Message(NamedTuple):
    head: Head
    body: bytes | bytearray


class BrokenRule(Exception):
    """What came is no message of somebody who holds the key."""


@dataclass(frozen=True)
class Handshake:
    key: bytes = field(repr=False)
    listener_nonce: bytes
    client_nonce: bytes
    identity: bytes

    @property
    def client_proof(self) -> bytes:
        return self._derived("proof of the client")

    @property
    def listener_proof(self) -> bytes:
        return self._derived("proof of the listener")

    @property
    def to_listener(self) -> bytes:
        """The key of that direction."""
        return self._derived("to the listener")

    @property
    def to_client(self) -> bytes:
        return self._derived("to the client")

    def _derived(self, label: str) -> bytes:
        return hmac.digest(derived(self.key, label), self.listener_nonce + self.client_nonce + self.identity, "sha256")


class Seals:
    """Those of the messages in one direction, in their order. Without a key the messages have none."""

    def __init__(self, key: bytes | None) -> None:
        self._key = key
        self._messages = 0
        self.size = 0 if key is None else MAC_BYTES
        self.longest_body = 0 if key is None else _LONGEST_BODY
        """Lengths that nobody has sealed are not to be believed."""

    def next(self, lengths: Bytes) -> bytes:
        if self._key is None:
            return b""
        self._messages += 1
        return hmac.digest(self._key, struct.pack(">Q", self._messages) + lengths, "sha256")


class Unsealed:
    """A message before it has its place in a direction; may take long to make, for the body's checksum."""

    def __init__(self, head: dict[str, Any], body: Bytes) -> None:
        self._head = json.dumps(head, separators=(",", ":")).encode()
        self.body = memoryview(body).cast("B")
        if len(self._head) > LONGEST_HEAD:
            raise ValueError(f"a head of {len(self._head)} bytes; {LONGEST_HEAD} at most: long things go into the body")
        checksum = hashlib.sha256(self._head)
        checksum.update(self.body)
        self._lengths = _LENGTHS.pack(len(self._head), len(self.body), checksum.digest())

    def opening(self, seals: Seals) -> bytes:
        """All but the body."""
        assert len(self.body) <= seals.longest_body
        return self._lengths + seals.next(self._lengths) + self._head


def message(seals: Seals) -> Generator[int, Bytes, Message]:
    """The next one. Raises BrokenRule."""
    lengths = yield from exactly(_LENGTHS.size)
    seal = yield from exactly(seals.size)
    if not hmac.compare_digest(seal, seals.next(lengths)):
        raise BrokenRule
    head_length, body_length, expected = _LENGTHS.unpack(lengths)
    if head_length > LONGEST_HEAD or body_length > seals.longest_body:
        raise BrokenRule
    checksum = hashlib.sha256()
    head = yield from exactly(head_length, checksum)
    body = yield from exactly(body_length, checksum)
    if not hmac.compare_digest(checksum.digest(), expected):
        raise BrokenRule
    return Message(parsed(head), body)


def exactly(size: int, checksum: _Hash | None = None) -> Generator[int, Bytes, bytearray]:
    """So many bytes, in the memory that has arrived; each piece is put into the checksum as it comes."""
    part = bytearray()
    while len(part) < size:
        piece = yield size - len(part)
        part += piece
        if checksum:
            checksum.update(piece)
    return part


def parsed(text: Bytes) -> dict[str, Any]:
    """Raises BrokenRule for what is no JSON object."""
    try:
        data = json.loads(bytes(text))
    except (ValueError, RecursionError):
        raise BrokenRule from None
    if not isinstance(data, dict):
        raise BrokenRule
    return data


class Feed:
    """Gives what arrives to a reading, in pieces as it wants them."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._wanted = next(reading)

    def take(self, data: memoryview) -> None:
        while data:
            piece, data = data[: self._wanted], data[self._wanted :]
            self._wanted = self._reading.send(piece)

    def close(self) -> None:
        """What is half read is given back."""
        self._reading.close()
