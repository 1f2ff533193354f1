"""Measure a call: an empty train(), and a message to ranks and back over their authenticated connections."""

from __future__ import annotations

import multiprocessing
import secrets
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from hpc_det.node.line_server import TcpLineServer
from hpc_det.node.lines import Line, connect
from tests.benchmarks.sgd_cases import Empty, new_trainer
from tests.benchmarks.table import show

RANKS = (1, 2, 8)
PEERS = 8
CALLS, TRIPS, WARM_UP = 200, 500, 20
BODIES = {"nothing": b"", "16 KB": bytes(16_000)}
"""The second has about the size of what a rank sends after a train()."""


def main() -> None:
    show(
        f"an empty train() and the snapshot after it, {CALLS} calls, milliseconds",
        ("ranks", "min", "median", "9 of 10 are below"),
        [[str(ranks), *_values(_calls(ranks))] for ranks in RANKS],
    )
    with _peers() as (board, lines):
        show(
            f"{PEERS} processes that send back what they get, {TRIPS} times, milliseconds until all have",
            ("with", "min", "median", "9 of 10 are below"),
            [[name, *_values(_trips(board, lines, body))] for name, body in BODIES.items()],
        )


def _calls(ranks: int) -> list[float]:
    taken = []
    with new_trainer(Empty, ranks) as trainer:
        for _ in range(WARM_UP + CALLS):
            began = perf_counter()
            trainer.train()
            taken.append(perf_counter() - began)
    return taken[WARM_UP:]


def _trips(board: TcpLineServer, lines: list[Line], body: bytes) -> list[float]:
    taken = []
    for _ in range(WARM_UP + TRIPS):
        began = perf_counter()
        for line in lines:
            line.send({"do": "echo"}, body)
        for _ in lines:
            assert board.events.get(timeout=10).kind == "said"
        taken.append(perf_counter() - began)
    return taken[WARM_UP:]


@contextmanager
def _peers() -> Iterator[tuple[TcpLineServer, list[Line]]]:
    key, context = secrets.token_bytes(32), multiprocessing.get_context("spawn")
    board = TcpLineServer("127.0.0.1", lambda identity: key, lambda address: True)
    processes = [context.Process(target=_echo, args=(board.port, key)) for _ in range(PEERS)]
    for process in processes:
        process.start()
    yield board, [board.events.get(timeout=60).line for _ in processes]
    board.close()
    for process in processes:
        process.join()


def _echo(port: int, key: bytes) -> None:
    line = connect("127.0.0.1", port, key, {"role": "peer"}, 10)
    while message := line.receive():
        line.send(*message)


def _values(seconds: list[float]) -> list[str]:
    values = min(seconds), statistics.median(seconds), statistics.quantiles(seconds, n=10)[-1]
    return [f"{1e3 * value:.2f}" for value in values]


if __name__ == "__main__":
    main()
