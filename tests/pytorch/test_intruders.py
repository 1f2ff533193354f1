"""A gang trains and saves while another process on the machine attacks its ports."""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpc_det.checkpoint.committed import committed
from hpc_det.distributed.collectives import Distributed
from hpc_det.node.json_files import write_json
from hpc_det.node.network import free_port
from hpc_det.pytorch import Batch, Trainer, init
from hpc_det.store.folders import TrialFolder
from tests.distributed.ranks import OnRanks
from tests.distributed.test_gang_store import started_with
from tests.listening import listening
from tests.pytorch.trials import Tiny
from tests.wait import DEADLINE_S, wait_for

BATCHES, PERIOD = 60, 4
IDLE = 300
"""Number of idle connections; a rank has far fewer."""


def trains(distributed: Distributed, root: Path, port: int) -> str:
    """Return a fingerprint of the weights after some batches and saves, on ranks with hpc_det's launch variables."""
    ours = {"MASTER_PORT": str(port), "HPC_DET_MASTER_PORT": str(port), "HPC_DET_STORE": str(root / "store")}
    configuration = {"searcher": {"metric": "loss"}}
    with (
        started_with(distributed, HPC_DET_ROOT=str(root), **ours),
        init(hparams={"global_batch_size": 4, "workers": 0}, exp_conf=configuration) as context,
    ):
        trial = Tiny(context)
        if context.distributed.is_chief:
            write_json(root / "ports", [each.port for each in listening(os.getpid())])
        wait_for((root / "go").exists, DEADLINE_S)
        Trainer(trial, context).fit(max_length=Batch(BATCHES), checkpoint_period=Batch(PERIOD))
        weights = b"".join(tensor.numpy().tobytes() for tensor in trial.model.state_dict().values())
    return hashlib.sha256(weights).hexdigest()


class Intruder:
    """Opens idle connections to all ports of rank 0, and sends garbage to the ports until the end."""

    def __init__(self, root: Path) -> None:
        self.sent = 0
        """Number of connections on which garbage was sent."""
        self._root = root
        self._is_over = threading.Event()
        self._idle: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        for connection in self._idle:
            connection.close()

    def _run(self) -> None:
        wait_for(lambda: (self._root / "ports").exists() or self._is_over.is_set())
        ports = json.loads((self._root / "ports").read_text())
        dice = random.Random(1)
        for _ in range(IDLE // len(ports)):
            self._idle += [socket.create_connection(("127.0.0.1", port), 10) for port in ports]
        (self._root / "go").touch()
        while not self._is_over.wait(0.002):
            for port in ports:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 10) as connection:
                    connection.sendall(dice.choice((b"[" * 60_000, dice.randbytes(500), b"\xff\xfe\n", bytes(66))))
                    self.sent += 1


@contextmanager
def intruder(root: Path) -> Iterator[Intruder]:
    running = Intruder(root)
    try:
        yield running
    finally:
        running.close()


def test_somebody_at_the_ports_of_a_gang_changes_nothing_and_holds_up_nobody(on_ranks: OnRanks, tmp_path: Path) -> None:
    alone, disturbed = tmp_path / "alone", tmp_path / "disturbed"
    for root in (alone, disturbed):
        root.mkdir()
    (alone / "go").touch()
    undisturbed = on_ranks(2, trains, alone, free_port())
    with intruder(disturbed) as attacker:
        assert on_ranks(2, trains, disturbed, free_port()) == undisturbed
    assert attacker.sent
    for root in (alone, disturbed):
        (folder,) = (root / "local").iterdir()
        checkpoints = committed(TrialFolder(folder).checkpoints)
        assert len(checkpoints) == BATCHES // PERIOD
        assert not any(checkpoint.damage() for checkpoint in checkpoints)
