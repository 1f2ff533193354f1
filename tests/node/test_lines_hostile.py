"""Lines with peers that break the rules.

No input is unpickled or executed, no honest line is disturbed, the cost is bounded, and the listener keeps running.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_det.errors import HpcDetError
from hpc_det.node import line_server
from hpc_det.node.frames import (
    HELLO,
    LONGEST_IDENTITY,
    BrokenRule,
    Feed,
    Handshake,
    Seals,
    Unsealed,
    message,
    parsed,
)
from hpc_det.node.key import derived
from hpc_det.node.line_server import STRANGERS
from hpc_det.node.lines import Line, Message, connect
from tests.facts import refused
from tests.machine import resident_bytes, slowness, standstill_s
from tests.node.line_board import GENERATION, KEY, Board, echoed, open_files
from tests.node.relay import Tamper, cut, listen_only, relay
from tests.wait import DEADLINE_S

if TYPE_CHECKING:
    from hpc_det.node.frames import Reading

RANK = {"role": "rank", "rank": 7, "generation": GENERATION}
RANKS_KEY = derived(KEY, f"generation {GENERATION}")
LENGTHS = struct.Struct(">IQ32s")
NONCE = 32


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@contextmanager
def undisturbed(board: Board, longest_s: float = 1.0) -> Iterator[None]:
    """Fail unless an honest rank is answered promptly during the block, and a new one is admitted after it."""
    _, client = board.line()
    over = threading.Event()
    times: list[float] = []

    def talk() -> None:
        while not over.is_set():
            began = time.monotonic()
            echoed(client, {"n": len(times)}, b"body")
            times.append(time.monotonic() - began)

    talking = threading.Thread(target=talk)
    with standstill_s() as standstill:
        talking.start()
        try:
            yield
        finally:
            over.set()
            talking.join()
    assert len(times) > 10
    assert max(times) < longest_s * slowness() + standstill[0]
    assert board.server.events.empty(), "of nobody else"
    echoed(board.line()[1], {"new": True})


# --- strangers


def said_to(board: Board, *pieces: bytes) -> bytes:
    """Send `pieces` to the listener as a stranger; return all that it answers before it closes the connection."""
    with socket.create_connection(board.address) as stranger, suppress(ConnectionError):
        stranger.settimeout(DEADLINE_S)
        heard = stranger.recv(NONCE, socket.MSG_WAITALL)
        for piece in pieces:
            stranger.sendall(piece)
        with suppress(OSError):  # the listener may have closed the connection already
            stranger.shutdown(socket.SHUT_WR)
        while more := stranger.recv(4096):
            heard += more
    return heard


def hello(key: bytes, identity: bytes, listener_nonce: bytes = bytes(NONCE)) -> bytes:
    handshake = Handshake(key, listener_nonce, bytes(NONCE), identity)
    return HELLO.pack(bytes(NONCE), handshake.client_proof, len(identity)) + identity


def recording(board: Board) -> dict[str, bytes]:
    """Return the bytes of an honest rank's session, as seen in the network."""
    with relay(board.address) as wire:
        line = connect(wire.host, wire.port, RANKS_KEY, RANK, DEADLINE_S)
        for n in range(3):
            echoed(line, {"n": n}, bytes(n * 1000))
        line.close()
    assert [board.event().kind for _ in range(2)] == ["arrived", "gone"]
    return wire.recorded


def attacks(dice: random.Random, recorded: bytes, bomb: bytes) -> list[tuple[bytes, ...]]:
    """Return sequences of bytes that a stranger without the key may send."""
    claim = json.dumps(RANK).encode()
    cut = dice.randrange(len(recorded))
    guessed_key = dice.choice([b"", bytes(32), KEY[:-1], derived(KEY, f"generation {GENERATION - 1}")])
    return [
        (),
        (dice.randbytes(dice.randrange(3000)),),
        (bomb,),
        (recorded,),
        (recorded[:cut],),
        (recorded[cut:],),
        (recorded[:cut], dice.randbytes(50)),
        (hello(guessed_key, claim), recorded[len(hello(KEY, claim)) :]),
        (hello(guessed_key, claim), bomb),
        (hello(guessed_key, bomb),),
        (hello(guessed_key, b'{"role": "agent"}'),),
        (hello(guessed_key, b'{"role": null, "generation": "' + dice.randbytes(20).hex().encode() + b'"}'),),
        (hello(guessed_key, b"[" * 1024),),
        (hello(guessed_key, b"9" * 1024),),
        (hello(guessed_key, dice.randbytes(dice.randrange(1024))),),
        (HELLO.pack(dice.randbytes(32), dice.randbytes(32), 2**16 - 1), bytes(2**16)),
        (LENGTHS.pack(2**32 - 1, 2**64 - 1, bytes(32)) + bytes(2**18),),
        tuple(bytes([byte]) for byte in hello(guessed_key, claim)[:40]),
    ]


@pytest.mark.integration
def test_strangers_learn_a_nonce_and_nothing_else(board: Board, tmp_path: Path) -> None:
    dice = random.Random(1)
    recorded = recording(board)["to listener"]
    bomb = pickle.dumps(Bomb(tmp_path / "executed"))
    nonces = set()
    with undisturbed(board):
        for _ in range(50):
            for attack in attacks(dice, recorded, bomb):
                heard = said_to(board, *attack)
                assert len(heard) == NONCE, "the same silence whatever was wrong"
                nonces.add(heard)
    assert len(nonces) == 50 * 18
    assert not (tmp_path / "executed").exists()
    pickle.loads(bomb)
    assert (tmp_path / "executed").exists(), "the bomb itself is dull"


@pytest.mark.integration
def test_thousands_of_strangers_keep_nobody_out(board: Board) -> None:
    before, memory = len(open_files()), resident_bytes()
    with undisturbed(board):
        waiting: deque[socket.socket] = deque()
        for number in range(3000):
            waiting.append(socket.create_connection(board.address))
            if len(waiting) > 2 * STRANGERS:
                waiting.popleft().close()
            if number % 500 == 250:
                client = board.client(number)
                assert board.event().line.identity["rank"] == number
                echoed(client, {"n": number})
        assert len(open_files()) < before + len(waiting) + STRANGERS + 50
        for stranger in waiting:
            stranger.close()
    assert resident_bytes() - memory < 20 * 2**20


def test_of_too_many_strangers_the_oldest_is_hung_up_on(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_server, "PATIENCE_S", DEADLINE_S)
    strangers = []
    for _ in range(STRANGERS + 1):
        strangers.append(socket.create_connection(board.address))
        strangers[-1].recv(NONCE, socket.MSG_WAITALL)
    strangers[0].settimeout(DEADLINE_S)
    assert strangers[0].recv(1) == b""
    for stranger in strangers[1:]:
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.recv(1)
    for stranger in strangers:
        stranger.close()


@pytest.mark.integration
def test_slow_drips_are_not_waited_for(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    drops = hello(bytes(32), json.dumps(RANK).encode())[:-1]
    with undisturbed(board), monkeypatch.context() as patched:
        patched.setattr(line_server, "PATIENCE_S", 0.3)
        began = time.monotonic()
        strangers = [socket.create_connection(board.address) for _ in range(10)]
        dripping = dict.fromkeys(strangers, 0)
        while dripping:
            for stranger, sent in list(dripping.items()):
                stranger.settimeout(0.002)
                try:
                    stranger.send(drops[sent : sent + 1])
                    hung_up = sent > 0 and not stranger.recv(NONCE)
                except TimeoutError:
                    hung_up = False
                except ConnectionError:
                    hung_up = True
                dripping[stranger] += 1
                if hung_up:
                    del dripping[stranger]
                    stranger.close()
                else:
                    assert sent < len(drops), "all of it was waited for"
        assert time.monotonic() - began >= 0.3


def test_who_announces_too_long_an_identity_is_not_listened_to(board: Board) -> None:
    with socket.create_connection(board.address) as stranger:
        stranger.settimeout(DEADLINE_S)
        stranger.recv(NONCE, socket.MSG_WAITALL)
        stranger.sendall(HELLO.pack(bytes(32), bytes(32), LONGEST_IDENTITY + 1))
        assert stranger.recv(1) == b""
    with refused(ValueError, 1033, 1024):
        connect(*board.address, KEY, {"role": "x" * 1021}, 1)


# --- the man in the middle


def session(board: Board, tamper: Tamper, within_s: float) -> tuple[list[int], list[int]]:
    """Send 5 messages each way over a relay that tampers; return those that reached driver and rank."""
    reached_driver: list[int] = []
    reached_rank: list[int] = []

    def answer(line: Line, received: Message) -> None:
        assert received.body == b"a" * 500
        reached_driver.append(received.head["n"])
        line.send({"n": received.head["n"]}, b"b" * 500)

    board.server.answers["count"] = answer
    with relay(board.address, tamper) as wire:
        try:
            client = connect(wire.host, wire.port, RANKS_KEY, RANK, within_s)
        except HpcDetError:
            return reached_driver, reached_rank
        for n in range(5):
            client.send({"do": "count", "n": n}, b"a" * 500)
            received = client.receive()
            if received is None:
                break
            assert received.body == b"b" * 500
            reached_rank.append(received.head["n"])
        client.close()
    return reached_driver, reached_rank


def flip_bit(direction: str, position: int, bit: int) -> Tamper:
    def tamper(here: str, offset: int, data: bytes) -> bytes:
        if here != direction or not offset <= position < offset + len(data):
            return data
        changed = bytearray(data)
        changed[position - offset] ^= 1 << bit
        return bytes(changed)

    return tamper


def repeat(direction: str, position: int) -> Tamper:
    return lambda here, offset, data: data + data if here == direction and offset >= position else data


@pytest.mark.integration
def test_what_is_changed_on_the_way_is_never_delivered(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(2)
    everything = list(range(5))
    assert session(board, listen_only, DEADLINE_S) == (everything, everything)
    stopped = 0
    with monkeypatch.context() as patched:
        patched.setattr(line_server, "PATIENCE_S", 0.05)
        for _ in range(300):
            direction, position = dice.choice(["to listener", "to client"]), dice.randrange(3000)
            kinds = [
                flip_bit(direction, position, dice.randrange(8)),
                repeat(direction, position),
                cut(direction, position),
            ]
            for reached in session(board, dice.choice(kinds), within_s=0.05):
                assert reached == everything[: len(reached)]
                stopped += reached != everything
    assert stopped > 300, "most were changed before their end"
    echoed(board.client(), {"new": True})
    events = [board.server.events.get() for _ in range(board.server.events.qsize())]
    assert {event.kind for event in events} == {"arrived", "gone"}


def test_a_wire_carries_no_key(board: Board, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    recorded = recording(board)
    for key in (KEY, RANKS_KEY):
        for written in (key, key.hex().encode(), repr(key).encode()):
            assert written not in recorded["to listener"] + recorded["to client"] + caplog.text.encode()
            assert written not in repr(Handshake(key, b"", b"", b"")).encode()


# --- frames without sockets, which is faster


def frames(messages: list[Message], key: bytes = KEY) -> list[bytes]:
    seals = Seals(key)
    unsealed = [Unsealed(head, body) for head, body in messages]
    return [each.opening(seals) + bytes(each.body) for each in unsealed]


def delivered(stream: bytes, key: bytes = KEY, piece: int = 1000) -> list[Message]:
    """Return the messages of the stream before the first broken rule."""
    messages: list[Message] = []

    def reading() -> Reading:
        seals = Seals(key)
        while True:
            messages.append((yield from message(seals)))

    feed = Feed(reading())
    with suppress(BrokenRule):
        for start in range(0, len(stream), piece):
            feed.take(memoryview(stream)[start : start + piece])
    return messages


SENT = [Message({"n": n}, bytes([n]) * 40 * n) for n in range(6)]


@given(st.integers(1, 500))
def test_frames_may_come_in_any_pieces(piece: int) -> None:
    assert delivered(b"".join(frames(SENT)), piece=piece) == SENT


@pytest.mark.integration
@settings(max_examples=1000)
@given(st.data())
def test_of_a_changed_stream_only_what_is_before_the_change_is_delivered(data: st.DataObject) -> None:
    stream = b"".join(frames(SENT))
    positions = st.integers(0, len(stream))
    begin, end = sorted((data.draw(positions), data.draw(positions)))
    instead = data.draw(st.one_of(st.binary(max_size=200), st.just(stream[begin:end] * 2)))
    received = delivered(stream[:begin] + instead + stream[end:])
    assert received == SENT[: len(received)]


@given(st.permutations(range(len(SENT))))
def test_messages_count_in_their_order_alone(order: list[int]) -> None:
    each = frames(SENT)
    received = delivered(b"".join(each[n] for n in order))
    assert received == SENT[: next((i for i, n in enumerate(order) if i != n), len(SENT))]


@given(st.binary(max_size=500))
def test_without_the_key_nothing_is_delivered(stream: bytes) -> None:
    assert delivered(stream) == []
    assert delivered(b"".join(frames(SENT, key=stream))) == []


def test_no_direction_of_a_line_takes_what_is_of_the_other() -> None:
    handshake = Handshake(KEY, bytes(NONCE), bytes(NONCE), b"{}")
    keys = {handshake.to_client, handshake.to_listener, handshake.client_proof, handshake.listener_proof, KEY}
    assert len(keys) == 5
    assert delivered(b"".join(frames(SENT, handshake.to_client)), handshake.to_client) == SENT
    assert delivered(b"".join(frames(SENT, handshake.to_listener)), handshake.to_client) == []


@given(st.one_of(st.binary(max_size=1024), st.text('[]{}:,"\\u0123456789eE-+.ntf ', max_size=1024).map(str.encode)))
def test_what_is_no_json_object_breaks_a_rule(text: bytes) -> None:
    with suppress(BrokenRule):
        assert isinstance(parsed(text), dict)


# --- peers that hold the key and break the rules


def lengths(line: Line, head: bytes, body_length: int, checksum: bytes = bytes(32)) -> bytes:
    """Return the sealed opening of a message with this head, as the line would send it."""
    opening = LENGTHS.pack(len(head), body_length, checksum)
    return opening + line.seals.next(opening)


@pytest.mark.parametrize(
    "head", [b"[]", b"null", b"{", b"", b"\xff\xfe", b"[" * 10**5, b"{" * 2**20, b"{" + b" " * 2**20 + b"}"]
)
def test_a_head_that_is_no_object_ends_its_line(board: Board, head: bytes) -> None:
    line, client = board.line()
    with suppress(ConnectionError):  # if the head is too long, the driver closes the line before it reads all of it
        client.connection.sendall(lengths(client, head, 0, hashlib.sha256(head).digest()) + head)
    assert board.event() == ("gone", line, None)
    assert client.receive() is None


def test_a_body_other_than_announced_ends_its_line(board: Board) -> None:
    line, client = board.line()
    client.connection.sendall(lengths(client, b"{}", 4, hashlib.sha256(b"{}body").digest()) + b"{}Body")
    assert board.event() == ("gone", line, None)


def test_memory_is_given_for_what_has_come_and_not_for_what_is_announced(board: Board) -> None:
    _, other = board.line()
    for announced in (2**31, 2**63):
        line, client = board.line()
        before = resident_bytes()
        client.connection.sendall(lengths(client, b"{}", announced) + b"{}" + bytes(2**20))
        for n in range(20):  # more turns of the server than it needs to read it
            echoed(other, {"n": n})
        assert resident_bytes() - before < 20 * 2**20
        client.close()
        assert board.event() == ("gone", line, None)


def test_a_body_is_bytes_and_nothing_unpickles_them(board: Board, tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "executed"))
    line, client = board.line()
    client.send({"do": "result"}, bomb)
    assert board.event() == ("said", line, ({"do": "result"}, bomb))
    assert not (tmp_path / "executed").exists()
