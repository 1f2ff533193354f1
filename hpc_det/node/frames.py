"""The bytes that a connection carries (hpc_det.node.lines); this module opens no sockets.

Over TCP both ends first prove that they hold the same key:

    listener -> client    nonce
    client -> listener    nonce, proof, length of the identity, identity (JSON)
    listener -> client    proof

Then each end sends messages:

    length of the head, length of the body, SHA-256 of both, seal; head (JSON), body

Proofs and seals are HMAC-SHA256. The proofs and the keys of the two directions are derived from the shared key, both
nonces and the identity, so a recording of one connection cannot be replayed on another. A seal covers the number of its
message, so messages cannot be repeated, dropped or reordered. A receiver trusts the lengths only after the seal
matches, and parses a message only after all of it was verified. Nothing is encrypted: anyone on the network can read
the messages.

Processes of one user on one node need no key, because only this user can connect to the Unix socket. Their messages
have no seal and no body.
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
    """A generator that yields the most bytes that it can use next, and is sent that many or fewer."""

NONCE_BYTES = MAC_BYTES = 32
LONGEST_IDENTITY = 1024
"""Bytes."""
LONGEST_HEAD = 2**20
"""Bytes."""
_LONGEST_BODY = 2**64
"""Bytes; what the length of a body can express."""
HELLO = struct.Struct(f">{NONCE_BYTES}s{MAC_BYTES}sH")
"""The client's nonce, its proof, and the length of its identity."""
_LENGTHS = struct.Struct(">IQ32s")
"""The lengths of head and body, and the SHA-256 of both."""


Head = dict[str, Any]
"""The JSON object of a message."""


class Message(NamedTuple):
    head: Head
    body: bytes | bytearray


class BrokenRule(Exception):
    """The bytes received are not a valid message from a holder of the key."""


@dataclass(frozen=True)
class Handshake:
    """The values of one handshake, from which both ends compute the same proofs and keys."""

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
        """The key for messages from the client to the listener."""
        return self._derived("to the listener")

    @property
    def to_client(self) -> bytes:
        """The key for messages from the listener to the client."""
        return self._derived("to the client")

    def _derived(self, label: str) -> bytes:
        return hmac.digest(derived(self.key, label), self.listener_nonce + self.client_nonce + self.identity, "sha256")


class Seals:
    """The seals of the messages in one direction, in order; without a key every seal is empty."""

    def __init__(self, key: bytes | None) -> None:
        self._key = key
        self._messages = 0
        self.size = 0 if key is None else MAC_BYTES
        self.longest_body = 0 if key is None else _LONGEST_BODY
        """Bytes; 0 without a key, because a length without a seal cannot be trusted."""

    def next(self, lengths: Bytes) -> bytes:
        """Return the seal of the next message, whose lengths and checksum are the bytes `lengths`."""
        if self._key is None:
            return b""
        self._messages += 1
        return hmac.digest(self._key, struct.pack(">Q", self._messages) + lengths, "sha256")


class Unsealed:
    """A message that is encoded and hashed, but not sealed, because it gets its number only when it is sent."""

    def __init__(self, head: dict[str, Any], body: Bytes) -> None:
        self._head = json.dumps(head, separators=(",", ":")).encode()
        self.body = memoryview(body).cast("B")
        if len(self._head) > LONGEST_HEAD:
            raise ValueError(
                f"message head: {len(self._head)} bytes, but at most {LONGEST_HEAD} are allowed; put long data into "
                f"the body"
            )
        # Computed here, outside the sender's lock: hashing a long body takes a while.
        checksum = hashlib.sha256(self._head)
        checksum.update(self.body)
        self._lengths = _LENGTHS.pack(len(self._head), len(self.body), checksum.digest())

    def opening(self, seals: Seals) -> bytes:
        """Return everything that precedes the body."""
        assert len(self.body) <= seals.longest_body
        return self._lengths + seals.next(self._lengths) + self._head


def message(seals: Seals) -> Generator[int, Bytes, Message]:
    """Read the next message. Raises BrokenRule."""
    lengths = yield from exactly(_LENGTHS.size)
    seal = yield from exactly(seals.size)
    if not hmac.compare_digest(seal, seals.next(lengths)):
        raise BrokenRule
    head_length, body_length, expected = _LENGTHS.unpack(lengths)
    # Without a key there is no seal, so the lengths need their own limit.
    if head_length > LONGEST_HEAD or body_length > seals.longest_body:
        raise BrokenRule
    checksum = hashlib.sha256()
    head = yield from exactly(head_length, checksum)
    body = yield from exactly(body_length, checksum)
    if not hmac.compare_digest(checksum.digest(), expected):
        raise BrokenRule
    return Message(parsed(head), body)


def exactly(size: int, checksum: _Hash | None = None) -> Generator[int, Bytes, bytearray]:
    """Read `size` bytes and add each piece to `checksum` as it arrives."""
    # Grows with the data that arrives, so a false length allocates nothing.
    part = bytearray()
    while len(part) < size:
        piece = yield size - len(part)
        part += piece
        if checksum:
            checksum.update(piece)
    return part


def parsed(text: Bytes) -> dict[str, Any]:
    """Return the JSON object in `text`. Raises BrokenRule if it is anything else."""
    try:
        data = json.loads(bytes(text))
    except (ValueError, RecursionError):
        raise BrokenRule from None
    if not isinstance(data, dict):
        raise BrokenRule
    return data


class Feed:
    """Passes received bytes to a Reading, in pieces no longer than it asks for."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._wanted = next(reading)

    def take(self, data: memoryview) -> None:
        while data:
            piece, data = data[: self._wanted], data[self._wanted :]
            self._wanted = self._reading.send(piece)

    def close(self) -> None:
        """Drop a message that was received in part."""
        self._reading.close()
