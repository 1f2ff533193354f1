from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from torch.utils.data._utils import worker

from hpc_det.core import loader_workers
from hpc_det.core.loader import ReplayedLoader
from hpc_det.core.loader_workers import ClosableLoader, WorkerInit, end_workers, shield
from hpc_det.errors import HpcDetError
from hpc_det.node.process import STOP_SIGNALS
from tests.facts import refused, unnamed
from tests.wait import DEADLINE_S

pytestmark = pytest.mark.integration

Capture = pytest.CaptureFixture[str]


def loader(dataset: Dataset[Any], **options: Any) -> ClosableLoader:
    return ClosableLoader(dataset, **{"num_workers": 1, "worker_init_fn": WorkerInit(None), **options})


class Numbers(Dataset[Any]):
    """Each record is the ID of the process that loads it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return os.getpid()


# --- starts


class Hangs:
    tries = 0
    """Number of starts in which the first worker hangs before it executes any code of hpc_det."""


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> Hangs:
    """Return the control of hanging workers; workers that do not hang may take as long as the test to start."""
    hangs = Hangs()
    begin, listened = worker._worker_loop, loader_workers._listened

    def hang(*arguments: Any) -> None:
        worker_id = arguments[10]
        if not worker_id:
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            signal.pause()
        begin(*arguments)

    def listen(*arguments: Any) -> Any:
        monkeypatch.setattr(worker, "_worker_loop", hang if hangs.tries > 0 else begin)
        monkeypatch.setattr(loader_workers, "FIRST_WORD_S", 0.5 if hangs.tries > 0 else DEADLINE_S)
        hangs.tries -= 1
        return listened(*arguments)

    monkeypatch.setattr(loader_workers, "_listened", listen)
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    return hangs


@pytest.mark.parametrize("persistent", [True, False])
def test_a_worker_that_hangs_in_its_fork_is_replaced(hangs: Hangs, persistent: bool, capsys: Capture) -> None:
    hangs.tries = 1
    loading = loader(TensorDataset(torch.arange(8)), num_workers=2, persistent_workers=persistent)
    for _ in range(2):
        assert [int(number) for (number,) in loading] == [*range(8)]
    loading.close()
    said = capsys.readouterr().err
    assert unnamed(said, "hpc-det", "loader process", "fork") == []
    assert said.count("hpc-det: ") == 1


def test_so_is_one_of_a_loader_that_is_not_ours(hangs: Hangs) -> None:
    hangs.tries = 1
    data = ReplayedLoader(torch.utils.data.DataLoader(TensorDataset(torch.arange(4)), num_workers=1))
    assert [int(number) for (number,) in data.begin(0)] == [*range(4)]
    data.close()


def test_workers_that_hang_again_and_again_are_an_error(hangs: Hangs) -> None:
    hangs.tries = 3
    with refused(HpcDetError, "num_workers", "1", "0.5", "3"):
        iter(loader(Numbers()))


def test_a_worker_that_dies_in_its_start_is_torchs_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_worker_loop", lambda *arguments: os._exit(3))
    with refused(RuntimeError, "DataLoader worker"):
        next(iter(loader(Numbers())))


HANGS = """
import os, signal
hangs = []


def hang():
    while hangs:
        signal.pause()


os.register_at_fork(after_in_child=hang, after_in_parent=hangs.clear)  # runs before those of what is imported now
import torch
from torch.utils.data import TensorDataset
from hpc_det.node.process import STOP_SIGNALS, SignalPipe
from hpc_det.core import loader_workers

torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.1
loader_workers.FIRST_WORD_S = 1
signals = SignalPipe(STOP_SIGNALS)
init = loader_workers.WorkerInit(None)
loader = loader_workers.ClosableLoader(TensorDataset(torch.arange(4)), num_workers=1, worker_init_fn=init)
hangs.append(True)
print([int(number) for (number,) in loader], signals.received(), hangs)
"""


@pytest.mark.long
def test_the_end_of_a_worker_that_hangs_in_its_fork_is_no_signal_to_the_rank() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[0, 1, 2, 3] [] []\n"), done.stderr
    assert unnamed(done.stderr, "hpc-det", "loader process", "fork") == []


# --- signals


class Immortal(Numbers):
    """Sends every stop signal to its worker process before it returns a record."""

    def __getitem__(self, index: int) -> int:
        for number in STOP_SIGNALS:
            os.kill(os.getpid(), number)
        return os.getpid()


class ImmortalStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return (Immortal()[index] for index in range(4))


def test_workers_ignore_the_stop_signals() -> None:
    (pid,) = {int(pid) for batch in loader(Immortal()) for pid in batch}
    assert pid != os.getpid()


def test_so_do_those_of_a_loader_that_is_not_ours() -> None:
    initialized: list[int] = []
    foreign = torch.utils.data.DataLoader(ImmortalStream(), num_workers=1, worker_init_fn=initialized.append)
    shield(foreign)
    shield(foreign)
    assert len({int(pid) for batch in foreign for pid in batch}) == 1
    assert initialized == [], "it ran in the worker"


def test_what_is_no_torch_loader_needs_no_shield() -> None:
    shield([1, 2, 3])


def test_stop_signals_are_those_that_schedulers_send() -> None:
    assert {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2} <= set(STOP_SIGNALS)


# --- their end


@pytest.mark.parametrize("persistent", [False, True])
def test_closing_ends_the_workers_of_iterations_that_were_left(persistent: bool) -> None:
    numbers = loader(Numbers(), num_workers=2, persistent_workers=persistent)
    left = [iter(numbers), iter(numbers)]
    assert all(next(iteration) for iteration in left)
    workers = [worker for iteration in left for worker in iteration._workers]
    assert all(worker.is_alive() for worker in workers)
    numbers.close()
    assert not any(worker.is_alive() for worker in workers)
    numbers.close()
    assert len(list(numbers)) == 40, "it can be iterated again"
    numbers.close()


def test_persistent_workers_stay_from_pass_to_pass_also_after_one_that_was_left() -> None:
    numbers = loader(Numbers(), persistent_workers=True)
    pids = [{int(pid) for batch in numbers for pid in batch}]
    pids.append({int(next(iter(numbers)))})
    pids.append({int(pid) for batch in numbers for pid in batch})
    assert pids[0] == pids[1] == pids[2]
    numbers.close()


class Stuck(Numbers):
    def __init__(self) -> None:
        self.reached = multiprocessing.get_context("fork").Event()

    def __getitem__(self, index: int) -> int:
        self.reached.set()
        while True:
            signal.pause()


def test_a_worker_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    stuck = Stuck()
    numbers = loader(stuck)
    iteration = iter(numbers)
    assert stuck.reached.wait(timeout=DEADLINE_S)
    numbers.close()
    (worker,) = iteration._workers
    assert worker.exitcode == -signal.SIGKILL


def test_other_iterators_have_no_workers() -> None:
    end_workers(iter([1]))
    end_workers(None)
    numbers = loader(TensorDataset(torch.arange(4)), num_workers=0)
    iteration = iter(numbers)
    numbers.close()
    assert len(list(iteration)) == 4


# --- another torch


def test_with_a_torch_whose_workers_set_no_handlers_loaders_work_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.utils.data._utils, "signal_handling")
    with loader_workers.workers_ignore_stops():
        assert len(set(torch.utils.data.DataLoader(Numbers(), batch_size=None))) == 1
