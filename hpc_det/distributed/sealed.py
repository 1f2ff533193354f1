"""Collectives on Python objects: pickled, and unpickled only if their seal shows that a rank of this run sent them.

Any process that reaches a rank's port can send it bytes, and unpickling bytes can run any code. So each message carries
a seal, an HMAC-SHA256 over (number of the collective, sender's rank, payload) with a secret that the ranks share. A
message cannot be forged, altered, replayed or attributed to another rank. It is not encrypted.
"""

from __future__ import annotations

import hmac
import pickle
import secrets
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hpc_det.errors import HpcDetError
from hpc_det.node.key import KEY_BYTES, user_key
from hpc_det.store.experiments import state_root

_MAC_BYTES = 32


class Alone:
    """The collectives of a single rank, without a process group."""

    def gather(self, data: Any) -> list[Any] | None:
        return [data]

    def allgather(self, data: Any) -> list[Any]:
        return [data]

    def broadcast(self, data: Any) -> Any:
        return data


class SealedGroup:
    """The collectives of some or all ranks of a gang. Constructing one and calling each method is collective.

    `ranks` are numbers in the gang, `rank` is this rank's number; `group` is the process group of `ranks` (None: the
    default group, of the whole gang).
    """

    def __init__(self, ranks: Sequence[int], rank: int, secret: bytes, group: dist.ProcessGroup | None = None) -> None:
        self._ranks = ranks
        self._rank = rank
        self._group = group
        self._collectives = 0
        self._key = self._fresh_key(secret)

    def gather(self, data: Any) -> list[Any] | None:
        """Return the `data` of every rank, in order, on the first rank; None on the others, which receive nothing."""
        message, lengths = self._sealed_alike(data)
        received = [torch.empty_like(message) for _ in self._ranks] if self._is_first else None
        dist.gather(message, received, dst=self._ranks[0], group=self._group)
        return self._opened(received, lengths) if received else None

    def allgather(self, data: Any) -> list[Any]:
        """Return the `data` of every rank, in order, on every rank."""
        message, lengths = self._sealed_alike(data)
        received = [torch.empty_like(message) for _ in self._ranks]
        dist.all_gather(received, message, group=self._group)
        return self._opened(received, lengths)

    def broadcast(self, data: Any) -> Any:
        """Return the `data` of the first rank on every rank."""
        self._collectives += 1
        first = self._ranks[0]
        sealed = self._sealed(data) if self._is_first else bytearray()
        length = torch.tensor([len(sealed)])
        dist.broadcast(length, src=first, group=self._group)  # the others must allocate the message before they get it
        message = torch.frombuffer(sealed or bytearray(int(length)), dtype=torch.uint8)
        dist.broadcast(message, src=first, group=self._group)
        return data if self._is_first else self._open(message, first)

    @property
    def _is_first(self) -> bool:
        return self._rank == self._ranks[0]

    def _fresh_key(self, secret: bytes) -> bytes:
        """Return a key for this group, derived from `secret` and a random number of each rank."""
        # A user's key outlives a run; the random numbers make a recorded message of another run invalid.
        own = torch.frombuffer(bytearray(secrets.token_bytes(KEY_BYTES)), dtype=torch.uint8)
        everyone = [torch.empty_like(own) for _ in self._ranks]
        dist.all_gather(everyone, own, group=self._group)
        return hmac.digest(secret, bytes(torch.cat(everyone).numpy()), "sha256")

    def _sealed_alike(self, data: Any) -> tuple[torch.Tensor, list[int]]:
        """Return this rank's message, padded to the longest rank's length, and the length of each rank's message."""
        self._collectives += 1
        sealed = self._sealed(data)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in self._ranks]
        dist.all_gather(lengths, torch.tensor([len(sealed)]), group=self._group)
        sealed.extend(bytes(int(max(lengths)) - len(sealed)))
        return torch.frombuffer(sealed, dtype=torch.uint8), [int(length) for length in lengths]

    def _sealed(self, data: Any) -> bytearray:
        payload = pickle.dumps(data, pickle.HIGHEST_PROTOCOL)
        return bytearray(self._mac(self._rank, payload) + payload)

    def _opened(self, received: list[torch.Tensor], lengths: list[int]) -> list[Any]:
        return [
            self._open(message[:length], sender)
            for message, length, sender in zip(received, lengths, self._ranks, strict=True)
        ]

    def _open(self, message: torch.Tensor, sender: int) -> Any:
        content = message.numpy().data
        mac, payload = content[:_MAC_BYTES], content[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(sender, payload)):
            raise HpcDetError(
                f"rank {self._rank} rejects the object received as rank {sender}'s: its seal is not that of this run. "
                f"Either ranks of different runs or users are connected, or the ranks do not call the same collectives "
                f"in the same order; start all ranks together, with one HPC_DET_ROOT that all nodes share"
            )
        return pickle.loads(payload)

    def _mac(self, sender: int, payload: bytes | memoryview) -> bytes:
        # The number of the collective prevents replays; the sender prevents passing one rank's message as another's.
        mac = hmac.new(self._key, struct.pack("<QQ", self._collectives, sender), "sha256")
        mac.update(payload)
        return mac.digest()


def shared_secret(env: Mapping[str, str]) -> bytes:
    """Return the secret that only the ranks of a run share: the attempt's, or without a node agent the user's key.

    Raises HpcDetError if the user's key is needed and cannot be read or written.
    """
    given = env.get("HPC_DET_SECRET")
    return given.encode() if given else user_key(state_root(env) / "key")
