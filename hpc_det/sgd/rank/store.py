"""The torch store through which the ranks of a generation exchange addresses.

The driver holds the values; ranks access them over their authenticated connections. It replaces torch's TCPStore, which
accepts unauthenticated connections on all interfaces and ends with the rank that hosts it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from hpc_det.node.lines import Line, Message


class StoreKeeper:
    """The driver's side of the store. All methods are called by the thread that reads the connections."""

    def __init__(self, generation: int) -> None:
        """`generation`: number of the gang; requests of ranks of another generation are ignored."""
        self._generation = generation
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[set[str], Line, Message]] = []
        """Requests that wait: the keys that must have values first, the connection, and the request."""

    def answer(self, line: Line, message: Message) -> None:
        """Answer a request of a rank, or keep it until its keys have values."""
        head = message.head
        keys = set(head["keys"])
        if line.identity["generation"] != self._generation:  # from a rank that has been ended since
            return
        # get() and wait() of a torch store block until the keys exist.
        if head["store"] in ("get", "wait") and not keys <= self._values.keys():
            self._waiting.append((keys, line, message))
        else:
            result, body = getattr(self, f"_{head['store']}")(head, message.body)
            line.send({"store": head["id"], "result": result}, body)

    # Each of these methods handles one kind of request, and returns the result and the body of the answer.

    def _set(self, head: dict[str, Any], value: bytes) -> tuple[None, bytes]:
        self._values[head["keys"][0]] = bytes(value)
        waiting, self._waiting = self._waiting, []
        for keys, line, message in waiting:
            if keys <= self._values.keys():
                self.answer(line, message)
            else:
                self._waiting.append((keys, line, message))
        return None, b""

    def _get(self, head: dict[str, Any], value: bytes) -> tuple[None, bytes]:
        return None, self._values[head["keys"][0]]

    def _wait(self, head: dict[str, Any], value: bytes) -> tuple[None, bytes]:
        return None, b""

    def _check(self, head: dict[str, Any], value: bytes) -> tuple[bool, bytes]:
        return set(head["keys"]) <= self._values.keys(), b""

    def _add(self, head: dict[str, Any], value: bytes) -> tuple[int, bytes]:
        total = int(self._values.get(head["keys"][0], b"0")) + int(head["amount"])
        self._set(head, str(total).encode())  # decimal text, as TCPStore stores counters
        return total, b""

    def _delete(self, head: dict[str, Any], value: bytes) -> tuple[bool, bytes]:
        return self._values.pop(head["keys"][0], None) is not None, b""

    def _swap(self, head: dict[str, Any], value: bytes) -> tuple[None, bytes]:
        """Set the key to the wanted value if it has the expected one; return the key's value afterwards.

        A missing key has the value b"". If the expected value of a missing key is another one, the expected value is
        returned, as TCPStore does.
        """
        key, cut = head["keys"][0], head["cut"]
        expected, wanted = value[:cut], value[cut:]
        if self._values.get(key, b"") == expected:
            self._set(head, wanted)
        return None, self._values.get(key, expected)

    def _count(self, head: dict[str, Any], value: bytes) -> tuple[int, bytes]:
        return len(self._values), b""


class LineStore(Store):
    """A rank's side of the store, for init_process_group.

    Any thread may call the methods, but `hear` only the thread that reads the connection. Methods raise DistStoreError,
    as torch's stores do, if the driver does not answer within `timeout_s` seconds.
    """

    def __init__(self, line: Line, timeout_s: float) -> None:
        super().__init__()
        self._line = line
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Message]] = {}
        """The requests without an answer, by their numbers."""
        self._lock = threading.Lock()

    def hear(self, message: Message) -> None:
        """Deliver an answer of the driver to the thread that waits for it."""
        with self._lock:
            self._asked.pop(message.head["store"]).set_result(message)

    def _ask(self, store: str, keys: Sequence[str], body: bytes = b"", **more: Any) -> Message:
        """Send a request to the driver and return its answer."""
        answer: Future[Message] = Future()
        with self._lock:
            number = next(self._numbers)
            self._asked[number] = answer
        self._line.send({"do": "store", "store": store, "id": number, "keys": list(keys), **more}, body)
        try:
            return answer.result(self._timeout_s)
        except TimeoutError:
            raise DistStoreError(
                f"timed out after {self._timeout_s:g} s waiting for the driver's store: {', '.join(keys)}"
            ) from None

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        return bytes(self._ask("get", [key]).body)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", [key], amount=amount).head["result"])

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys).head["result"])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys)

    def compare_set(self, key: str, expected: str | bytes, wanted: str | bytes) -> bytes:
        first, second = (text.encode() if isinstance(text, str) else text for text in (expected, wanted))
        return bytes(self._ask("swap", [key], first + second, cut=len(first)).body)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key]).head["result"])

    def num_keys(self) -> int:
        return int(self._ask("count", []).head["result"])

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def clone(self) -> LineStore:
        """Return this store itself: NCCL's threads clone the store, but any thread may call the methods of this one."""
        return self
