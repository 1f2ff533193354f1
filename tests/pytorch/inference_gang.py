"""A gang for batch inference whose ranks are threads, and that is stopped or killed at a chosen point."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import Dataset, IterableDataset

from hpc_det.pytorch import TorchBatchProcessor, TorchBatchProcessorContext
from hpc_det.pytorch.inference.output_folder import OutputFolder
from hpc_det.pytorch.inference.process import Inference
from hpc_det.pytorch.inference.records import records_of


class Killed(BaseException):
    """Raised where a rank is killed."""


class Numbers(Dataset[int]):
    """The numbers from 0 on."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """The same numbers, without a length."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._length))


class Squares(TorchBatchProcessor):
    """Returns the square of each number, writes each batch to a file, and counts and adds up the numbers."""

    def __init__(self, context: TorchBatchProcessorContext) -> None:
        self.context = context
        self.total = context.wrap_reducer(_total)

    def process_batch(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        assert batch.tolist() == list(self.context.records)
        core: Any = self.context._core
        core.event()
        with self.context.upload_path() as folder:
            (folder / f"{self.context.records.start:06}.txt").write_text(" ".join(map(str, batch.tolist())))
        core.event()
        self.total.update(batch)  # type: ignore[attr-defined]
        return batch**2

    def on_finish(self) -> None:
        with self.context.upload_path() as folder:
            (folder / "finished").touch()


def _total(batches: list[torch.Tensor]) -> dict[str, int]:
    return {"count": sum(map(len, batches)), "sum": sum(int(batch.sum()) for batch in batches)}


@dataclass
class Trial:
    """The files of a trial, and the metrics that it has reported."""

    folder: Path
    newest: list[Path] = field(default_factory=list)
    """The committed checkpoints, newest last."""
    metrics: list[Mapping[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the trial."""

    ranks: int = 1
    batch_size: int = 2
    interval: int = 2
    stop_at: int | None = None
    """The call of `should_stop` that returns True; None: no stop."""
    saving: float = 1.0
    """The largest share of the time that checkpoints may take."""
    kill: tuple[int, int] | None = None
    """The rank that is killed, and at which of its events; None: no kill."""


def run(trial: Trial, dataset: Dataset[int], attempt: Attempt, processor: type[TorchBatchProcessor] = Squares) -> bool:
    """Run one attempt in threads, and return whether it was killed. Errors of ranks are raised."""
    gang = _Gang(trial, attempt)
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        core = _Core(gang, rank)
        records = records_of(dataset, attempt.batch_size, None, rank=rank, size=attempt.ranks)
        try:
            rank_part = Inference(
                core,  # type: ignore[arg-type]
                records,
                processor,
                end=None,
                interval=attempt.interval,
                saving=attempt.saving,
            )
            rank_part.run()
        except BaseException as error:
            errors.append(error)
            gang.barrier.abort()

    publishes = patch.object(OutputFolder, "publish", _publish_with_events(gang, OutputFolder.publish))
    with publishes, _without_garbage_collection():
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(attempt.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    others = [error for error in errors if not isinstance(error, (Killed, threading.BrokenBarrierError))]
    if others:
        raise others[0]
    return bool(errors)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Avoid a deadlock of threads that use torch's generator.

    torch.get_rng_state (torch 2.13) locks the generator and creates a tensor. A garbage collection there may release
    the GIL to another thread, which then waits for the generator with the GIL, and both wait for ever.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _publish_with_events(gang: _Gang, publish: Callable[..., None]) -> Callable[..., None]:
    def with_events(self: OutputFolder, stage: str, part: str) -> None:
        gang.event(0)
        publish(self, stage, part)
        gang.event(0)

    return with_events


class _Gang:
    def __init__(self, trial: Trial, attempt: Attempt) -> None:
        self.trial, self.attempt = trial, attempt
        self.barrier = threading.Barrier(attempt.ranks)
        self.values: list[Any] = [None] * attempt.ranks
        self._events = [0] * attempt.ranks

    def event(self, rank: int) -> None:
        """Count an event of a rank, at which it may be killed."""
        self._events[rank] += 1
        if self.attempt.kill == (rank, self._events[rank]):
            raise Killed

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        gathered = list(self.values)
        self.barrier.wait()
        return gathered


class _Ranks:
    device = torch.device("cpu")

    def __init__(self, gang: _Gang, rank: int) -> None:
        self._gang, self.rank, self.size = gang, rank, gang.attempt.ranks
        self.is_chief = rank == 0

    def barrier(self) -> None:
        self._gang.barrier.wait()

    def gather_json(self, value: Any) -> list[Any]:
        return self._gang.gather(self.rank, value)

    def gather(self, value: Any) -> list[Any] | None:
        found = self._gang.gather(self.rank, value)
        return found if self.is_chief else None

    def broadcast(self, value: Any) -> Any:
        return self._gang.gather(self.rank, value)[0]

    broadcast_json = broadcast


class _Core:
    """What batch inference uses of hpc_det.core.Core."""

    total: int | None = None

    def __init__(self, gang: _Gang, rank: int) -> None:
        self._gang, self._rank, self._asked = gang, rank, 0
        self.distributed = _Ranks(gang, rank)
        self.info = SimpleNamespace(folder=gang.trial.folder)
        self.latest_checkpoint = gang.trial.newest[-1] if gang.trial.newest else None

    def event(self) -> None:
        self._gang.event(self._rank)

    def restore_generators(self) -> None:
        pass

    def stepping(self) -> AbstractContextManager[None]:
        return nullcontext()

    def should_stop(self) -> bool:
        self._asked += 1
        return self._asked == self._gang.attempt.stop_at

    def report(self, step: int, metrics: Mapping[str, Any], *, group: str = "training") -> None:
        if group == "validation" and self.distributed.is_chief:
            self._gang.trial.metrics.append(metrics)

    @contextmanager
    def checkpoint(self, step: int, *, metadata: Mapping[str, Any]) -> Iterator[Path]:
        self.event()
        trial = self._gang.trial
        partial = trial.folder / "partial"
        partial.mkdir(parents=True, exist_ok=True)
        yield partial
        self.event()
        self.distributed.barrier()
        if self.distributed.is_chief:
            committed = trial.folder / f"checkpoint-{len(list(trial.folder.glob('checkpoint-*')))}"
            partial.rename(committed)
            trial.newest.append(committed)
        self.distributed.barrier()
