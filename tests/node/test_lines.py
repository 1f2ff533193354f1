"""Lines between a driver and its ranks that keep the rules; test_lines_hostile.py has those that do not."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from hpc_det.errors import HpcDetError
from hpc_det.node import lines
from hpc_det.node.frames import Seals, Unsealed
from hpc_det.node.key import derived
from hpc_det.node.line_server import TcpLineServer
from hpc_det.node.lines import Line, Message, connect, send_to
from tests.facts import refused, unnamed
from tests.node.line_board import GENERATION, KEY, Board, echoed, open_files
from tests.wait import DEADLINE_S

LONG = bytes(300 * 2**20)


def test_a_rank_arrives_speaks_and_goes(board: Board) -> None:
    client = board.client(3)
    arrived = board.event()
    assert (arrived.kind, arrived.message) == ("arrived", None)
    assert arrived.line.identity == client.identity == {"role": "rank", "rank": 3, "generation": GENERATION}
    client.send({"result": [1.5, None, "ü"]}, b"\0\1\2")
    assert board.event() == ("said", arrived.line, ({"result": [1.5, None, "ü"]}, b"\0\1\2"))
    client.close()
    assert board.event() == ("gone", arrived.line, None)


def test_the_driver_speaks_and_a_rank_listens(board: Board) -> None:
    line, client = board.line()
    line.send({"do": "train"}, bytearray(b"call"))
    line.send({"do": "stop"})
    assert client.receive() == Message({"do": "train"}, b"call")
    assert client.receive() == Message({"do": "stop"}, b"")
    line.close()
    assert client.receive() is None
    assert board.event().kind == "gone"


def test_one_message_to_several_ranks_is_sealed_for_each(board: Board) -> None:
    pairs = [board.line(rank) for rank in range(3)]
    pairs[0][0].send({"n": 1})
    send_to([line for line, _ in pairs], {"n": 2})
    assert pairs[0][1].receive() == Message({"n": 1}, b"")
    assert [client.receive() for _, client in pairs] == [Message({"n": 2}, b"")] * 3


def test_ctrl_c_breaks_no_message(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    line, client = board.line()
    opening = Unsealed.opening

    def interrupted(unsealed: Unsealed, seals: Seals) -> bytes:
        signal.raise_signal(signal.SIGINT)
        return opening(unsealed, seals)

    with monkeypatch.context() as patched:
        patched.setattr(Unsealed, "opening", interrupted)
        with pytest.raises(KeyboardInterrupt):
            line.send({"n": 1})
    line.send({"n": 2})
    assert client.receive() == Message({"n": 1}, b"")
    assert client.receive() == Message({"n": 2}, b"")


@pytest.mark.parametrize("size", [0, 1, 2**16 - 1, 2**16, 2**16 + 1, 2**18, 2**20 + 7])
def test_bodies_of_all_sizes_arrive_as_they_were(board: Board, size: int) -> None:
    _, client = board.line()
    echoed(client, {}, bytes(range(251)) * (size // 251) + bytes(size % 251))


def test_what_is_asked_of_the_server_is_no_event(board: Board) -> None:
    _, client = board.line()
    echoed(client, {"n": 1})
    client.send({"do": ["echo"]})
    message = board.event().message
    assert message is not None
    assert message.head == {"do": ["echo"]}, "the first event since"


def test_the_time_of_the_last_message_is_known(board: Board) -> None:
    line, client = board.line()
    before = time.monotonic()
    client.send({})
    assert board.event().kind == "said"
    assert before <= line.heard_at <= time.monotonic()


def test_messages_of_several_threads_do_not_mix(board: Board) -> None:
    line, client = board.line()

    def speak(thread: int) -> None:
        for n in range(50):
            line.send({"thread": thread, "n": n}, bytes([thread]) * 2000 * n)

    threads = [threading.Thread(target=speak, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    heard: dict[int, list[int]] = {}
    for _ in range(200):
        message = client.receive()
        assert message is not None
        heard.setdefault(message.head["thread"], []).append(message.head["n"])
        assert message.body == bytes([message.head["thread"]]) * 2000 * message.head["n"]
    for thread in threads:
        thread.join()
    assert heard == {number: list(range(50)) for number in range(4)}


@pytest.mark.integration
def test_while_300_mb_come_others_are_answered(board: Board) -> None:
    _, sender = board.line(0)
    _, other = board.line(1)
    sending = threading.Thread(target=lambda: sender.send({"state": "all"}, LONG))
    sending.start()
    answered = 0
    while board.server.events.empty():
        echoed(other, {"n": answered})
        answered += 1
    sending.join()
    message = board.event().message
    assert message is not None
    assert message.body == LONG
    assert answered > 50


@pytest.mark.integration
def test_while_300_mb_go_to_a_slow_reader_nobody_waits(board: Board) -> None:
    line, reader = board.line(0)
    _, other = board.line(1)
    line.send({"state": "all"}, LONG)  # returns although the other end does not read
    echoed(other, {"n": 1})
    reading = threading.Thread(target=reader.receive)
    reading.start()
    answered = 0
    while reading.is_alive():
        echoed(other, {"n": answered})
        answered += 1
    assert answered > 50


def test_an_answer_that_fails_ends_its_line_and_no_other(board: Board, caplog: pytest.LogCaptureFixture) -> None:
    def fail(line: Line, message: Message) -> None:
        raise KeyError("value")

    board.server.answers["fail"] = fail
    line, client = board.line(0)
    _, other = board.line(1)
    client.send({"do": "fail"})
    assert client.receive() is None
    assert board.event() == ("gone", line, None)
    assert unnamed(caplog.text, "'fail'", {"role": "rank", "rank": 0, "generation": 2}, "KeyError: 'value'") == []
    echoed(other, {})


def test_sending_to_a_peer_that_is_gone_is_no_error(board: Board) -> None:
    line, client = board.line()
    client.close()
    assert board.event().kind == "gone"
    line.send({"do": "train"}, bytes(2**20))
    line.close()
    client.send({"late": True})
    client.close()


def test_a_head_has_a_longest_length(board: Board) -> None:
    _, client = board.line()
    with refused(ValueError, 2**20):
        client.send({"text": "x" * 2**20})
    echoed(client, {"n": 1})


def test_whoever_waits_in_receive_is_woken_by_close(board: Board) -> None:
    _, client = board.line()
    received: list[object] = []
    reading = threading.Thread(target=lambda: received.append(client.receive()))
    reading.start()
    client.close()
    reading.join()
    assert received == [None]


# --- admission


def outcome(board: Board, key: bytes, identity: dict[str, Any]) -> str:
    """Return the error of a client that tries to connect once."""
    with patch.object(lines, "tries", lambda within_s: [within_s]), pytest.raises(HpcDetError) as error:
        connect(*board.address, key, identity, 30)
    assert board.server.events.empty()
    return str(error.value)


@pytest.mark.parametrize(
    "identity",
    [
        {"role": "rank", "generation": GENERATION - 1},
        {"role": "agent"},
        {"generation": GENERATION},  # key_for raises a KeyError
        {"role": ["rank"], "generation": {}},
    ],
)
def test_the_key_of_another_generation_opens_nothing(board: Board, identity: dict[str, Any]) -> None:
    said = outcome(board, derived(KEY, f"generation {GENERATION}"), identity)
    address = f"127.0.0.1:{board.address[1]}"
    assert unnamed(said, address, "30 s") == []


def test_an_identity_without_a_key_is_refused_like_one_with_a_wrong_key() -> None:
    board = Board(lambda identity: None)
    for key in (KEY, b""):
        assert unnamed(outcome(board, key, {"role": "agent"}), f"127.0.0.1:{board.address[1]}", "30 s") == []
    board.close()


def test_where_nobody_listens_it_is_said() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # so that no other process listens there
        host, port = nobody.getsockname()
        with refused(HpcDetError, f"{host}:{port}", "rank 0", "0 s", os.strerror(errno.ECONNREFUSED)):
            connect(host, port, KEY, {"role": "agent"}, 0, listener="rank 0")


def test_a_driver_that_comes_a_little_later_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated by a server that closes its first connections."""
    refusals = iter([False, False, True])
    server = TcpLineServer("127.0.0.1", lambda identity: KEY, lambda address: next(refusals))
    connect(server.host, server.port, KEY, {"role": "agent"}, DEADLINE_S).close()
    server.close()


def test_it_listens_on_its_one_address_alone(board: Board) -> None:
    host, port = board.address
    assert host == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", port)):
        pass


def test_an_address_that_is_not_here_is_named() -> None:
    with refused(HpcDetError, "192.0.2.1", os.strerror(errno.EADDRNOTAVAIL)):
        TcpLineServer("192.0.2.1", lambda identity: None, lambda address: True)


def test_addresses_that_are_not_allowed_hear_nothing() -> None:
    asked: list[str] = []

    def is_allowed(address: str) -> bool:
        asked.append(address)
        return False

    server = TcpLineServer("127.0.0.1", lambda identity: KEY, is_allowed)
    with socket.create_connection((server.host, server.port), source_address=("127.0.0.9", 0)) as stranger:
        stranger.settimeout(DEADLINE_S)
        assert stranger.recv(1) == b""
    assert asked == ["127.0.0.9"]
    server.close()


# --- listeners that are not drivers


@contextmanager
def impostor(says: bytes) -> Iterator[tuple[tuple[str, int], list[bytes]]]:
    """Listen, send `says` to the first caller, and record all that it sends."""
    heard: list[bytes] = []

    def listen() -> None:
        with server.accept()[0] as connection:
            connection.sendall(says)
            while piece := connection.recv(2**16):
                heard.append(piece)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=listen)
        thread.start()
        yield server.getsockname(), heard
        thread.join()


def test_a_listener_without_the_key_is_refused_and_learns_nothing_that_lets_it_in(board: Board) -> None:
    with socket.create_connection(board.address) as stranger:
        nonce = stranger.recv(32, socket.MSG_WAITALL)
        with (
            impostor(nonce + bytes(32)) as (address, heard),
            refused(HpcDetError, f"{address[0]}:{address[1]}", "key", "rank 0"),
        ):
            connect(*address, KEY, {"role": "agent"}, 60, listener="rank 0")
        hello = b"".join(heard)
        assert KEY not in hello
        stranger.sendall(hello)  # instead of the client: it matches the nonce, but the next message needs the key
        assert board.event().line.identity == {"role": "agent"}
        stranger.recv(32, socket.MSG_WAITALL)
        stranger.sendall(bytes(200))
        assert board.event().kind == "gone"
    with socket.create_connection(board.address) as stranger:
        stranger.recv(32, socket.MSG_WAITALL)
        stranger.sendall(hello)  # a second time it does not match the nonce
        assert stranger.recv(1) == b""
    assert board.server.events.empty()


@pytest.mark.parametrize("says", [b"", b"SSH-2.0-OpenSSH_9.6\r\n", bytes(31)], ids=len)
def test_a_listener_that_says_too_little_is_given_up_in_time(says: bytes) -> None:
    before = open_files()
    with impostor(says) as (address, _), refused(HpcDetError, "0.1 s", "timed out"):
        connect(*address, KEY, {"role": "agent"}, 0.1)
    assert not open_files() - before


# --- the end


def test_close_ends_everything_also_with_peers_that_never_read() -> None:
    board = Board()
    ends = [board.line(rank) for rank in range(3)]
    for line, _ in ends:
        line.send({"state": "all"}, bytes(2**25))  # more than the network holds
    speaking = threading.Thread(target=lambda: ends[0][1].send({}, bytes(2**25)))
    speaking.start()
    strangers = [socket.create_connection(board.address) for _ in range(3)]
    board.server.close()
    speaking.join(DEADLINE_S)
    assert not speaking.is_alive()
    for stranger in strangers:
        stranger.close()
    board.close()  # close() checks for threads and files that are left
    kinds = [board.event().kind for _ in range(3)]
    assert kinds == ["gone"] * 3


def test_a_client_that_never_reads_can_be_closed(board: Board) -> None:
    """Its driver does not read either, since it is busy with an answer."""
    waiting = threading.Event()

    def wait(line: Line, message: Message) -> None:
        waiting.wait(DEADLINE_S)

    board.server.answers["wait"] = wait
    _, client = board.line()
    client.send({"do": "wait"})
    speaking = threading.Thread(target=lambda: client.send({}, bytes(2**25)))
    speaking.start()
    client.close()
    speaking.join(DEADLINE_S)
    assert not speaking.is_alive()
    waiting.set()


def test_after_a_suspension_a_try_to_connect_has_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first try ends when the process continues, an hour later."""
    now, ends = [0.0], list[float]()

    def introduced(host: str, port: int, key: bytes, identity: dict[str, Any], end: float, *others: Any) -> None:
        ends.append(end - now[0])
        now[0] += 3600 if len(ends) == 1 else 30
        raise ConnectionResetError

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(lines, "_introduced", introduced)
    with pytest.raises(HpcDetError):
        connect("127.0.0.1", 1, b"key", {}, 80)
    assert ends == [30, 30, pytest.approx(20, abs=1)]
