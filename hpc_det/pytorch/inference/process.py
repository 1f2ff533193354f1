"""The loop of a batch inference: rounds of batches, checkpoints with the outputs of their records, stops, the end."""

from __future__ import annotations

import time
import uuid
import warnings
from contextlib import closing
from dataclasses import replace
from typing import Any

from torch.utils.data import Dataset

from hpc_det.core import Core, init
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import count
from hpc_det.pytorch.inference.output_folder import OutputFolder, part_name
from hpc_det.pytorch.inference.position import Position, read_position, restore_reducers, write_reducers
from hpc_det.pytorch.inference.processor import TorchBatchProcessor, TorchBatchProcessorContext
from hpc_det.pytorch.inference.records import ArgumentError, Records, Share, records_of
from hpc_det.pytorch.inference.values import CollectedValues
from hpc_det.store.folders import TrialFolder

SAVING = 0.05
"""Largest share of the time that checkpoints may take; one that is due earlier is postponed."""


def torch_batch_process(
    batch_processor_cls: type[TorchBatchProcessor],
    dataset: Dataset[Any],
    batch_size: int | None = None,
    max_batches: int | None = None,
    checkpoint_interval: int = 5,
    dataloader_kwargs: dict[str, Any] | None = None,
    distributed_context: Distributed | None = None,
    *,
    max_records: int | None = None,
    hparams: dict[str, Any] | None = None,
    name: str | None = None,
) -> bool:
    """Process all records of a data set on all ranks, once each, whatever ends the job on the way.

    Return whether all records are processed; False after a stop, at which the script should end.

    It works in a job of hpc_det under every launcher, under torchrun, and in one process; see `hpc_det.core.init`. A
    job that is stopped or killed continues after its newest checkpoint, on any number of ranks.

    Raises ArgumentError, a UsageError and ValueError, for a batch size that is given twice, for a shuffled data set,
    for numbers that are too small, and for a data set without a length that is not an IterableDataset; UsageError for
    an IterableDataset with several workers, and for a data set whose length differs from that of the run that it
    continues.

    Args:
        batch_processor_cls: The class of the processor.
        dataset: The records. All ranks read an IterableDataset from its start, and each keeps its own records.
        batch_size: The number of records in a batch of one rank; 1 by default. It may change when a run continues.
        max_batches: The number of batches of each rank. Values below 1 and above the number of batches are ignored,
            with a warning.
        checkpoint_interval: The number of batches of each rank between two checkpoints. They are further apart if
            checkpoints would otherwise take more than 5 % of the time.
        dataloader_kwargs: Further arguments of torch's DataLoader, such as num_workers.
        distributed_context: The ranks, if the environment does not describe them.
        max_records: The number of records to process, from the first one on. A run that continues keeps the numbers
            with which it started.
        hparams: The hyperparameters outside a job.
        name: The name of the run outside a job; by default that of the script. See `hpc_det.core.init`.
    """
    if checkpoint_interval < 1:
        raise ArgumentError(f"torch_batch_process: checkpoint_interval is {checkpoint_interval}; use at least 1")
    with init(hparams=hparams, name=name, distributed=distributed_context) as core:
        ranks = core.distributed
        records = records_of(dataset, batch_size, dataloader_kwargs, rank=ranks.rank, size=ranks.size)
        end = _end(records, max_batches, max_records)
        if core.info.test:
            end = min(one_round := records.batch_size * ranks.size, one_round if end is None else end)
        return Inference(core, records, batch_processor_cls, end=end, interval=checkpoint_interval).run()


class Inference:
    """One rank's part in one attempt of a batch inference. All ranks make the same calls."""

    def __init__(
        self,
        core: Core,
        records: Records,
        processor: type[TorchBatchProcessor],
        *,
        end: int | None,
        interval: int,
        saving: float = SAVING,
    ) -> None:
        """`end`: the number of records to process; None: all. `interval`: rounds between two checkpoints. `saving`: the
        largest share of the time that checkpoints may take.

        Continues after the newest checkpoint of the trial.
        """
        self._core = core
        self._ranks = core.distributed
        self._records = records
        self._interval = interval
        self._saving = saving
        self._save_s = 0.0
        """Seconds that the last checkpoint took."""
        self._saved_at = time.monotonic()
        checkpoint = core.latest_checkpoint
        saved = read_position(checkpoint, records.length) if checkpoint else Position(end=end, length=records.length)
        self._position = replace(saved, ranks=self._ranks.size)
        attempt = self._ranks.broadcast_json(uuid.uuid4().hex[:12])
        self._outputs = OutputFolder(TrialFolder(core.info.folder).outputs, rank=self._ranks.rank, attempt=attempt)
        self._recover(saved)
        self._values = CollectedValues()
        self._from = saved
        """The position at the newest checkpoint."""
        self._counted, self._counted_at = saved.done, time.monotonic()
        self._context = TorchBatchProcessorContext(core, self._outputs)
        if not saved.finished:
            self._outputs.begin(saved.done)
            self._processor = processor(self._context)
            self._context.reducers.reset(training=True)
            if checkpoint:
                restore_reducers(
                    checkpoint,
                    self._context.reducers,
                    saved=saved.ranks,
                    rank=self._ranks.rank,
                    size=self._ranks.size,
                )

    def run(self) -> bool:
        """Process the records that are left, and return True at the end, False after an agreed stop."""
        if self._position.finished:
            return True
        self._core.total = self._position.total(self._records)
        rounds = self._records.rounds(self._position.done, self._position.end)
        with closing(rounds), self._core.stepping():
            for share in rounds:
                self._core.restore_generators()  # loading the first batch has changed them
                if self._core.should_stop():
                    if self._position.done > self._from.done:
                        self._save(self._position)
                    return False
                self._process(share)
                if self._is_due() and not self._position.is_end():
                    self._save(self._position)
        self._finish()
        return True

    # --- helpers

    def _recover(self, saved: Position) -> None:
        """Complete the commit of the checkpoint, and remove what killed attempts have left."""
        if self._ranks.is_chief:
            replaced = self._outputs.recover(saved.done, saved.stage, saved.part)
            if replaced:
                print(
                    f"hpc-det: the newest checkpoint counts {count(saved.done, 'record')}, so {', '.join(replaced)} of "
                    f"{self._outputs.folder} are hidden and made again",
                    flush=True,
                )
        self._ranks.barrier()

    def _process(self, share: Share) -> None:
        if share.count:
            self._context.records = range(share.first, share.first + share.count)
            values = self._processor.process_batch(share.batch, self._position.rounds)
            if values is not None:
                self._values.add(share.first, share.count, values)
                if self._values.is_full:
                    self._values.write(self._outputs.own)
        self._position = self._position.after(share)

    def _is_due(self) -> bool:
        """Return whether to save now; the same on all ranks."""
        if (self._position.rounds - self._from.rounds) % self._interval:
            return False
        worked_s = time.monotonic() - self._saved_at
        is_worth_it = worked_s >= self._save_s * (1 / self._saving - 1)
        return bool(self._ranks.broadcast_json(is_worth_it))

    def _finish(self) -> None:
        """Report the metrics of all records, and commit the last outputs."""
        self._core.total = self._position.batches
        self._core.report(self._position.batches, self._speed())
        self._processor.on_checkpoint_start()
        self._processor.on_finish()
        if metrics := self._context.reducers.reduce(self._ranks, training=True):
            self._core.report(self._position.batches, metrics, group="validation")
        self._commit(replace(self._position, finished=True))
        if self._ranks.is_chief:
            print(
                f"hpc-det: outputs of {count(self._position.done, 'record')} are in {self._outputs.folder}", flush=True
            )

    def _save(self, position: Position) -> None:
        began = time.monotonic()
        self._core.report(position.batches, self._speed())
        self._processor.on_checkpoint_start()
        self._commit(position)
        self._saved_at = time.monotonic()
        self._save_s = self._saved_at - began

    def _commit(self, position: Position) -> None:
        """Commit a checkpoint and the outputs since the one before. Collective."""
        if self._values:
            self._values.write(self._outputs.own)
        has_files = any(self._ranks.gather_json(self._outputs.flush()))
        if has_files:
            part = part_name(self._from.done, position.done)
            position = replace(position, stage=self._outputs.stage, part=part)
            if self._ranks.is_chief:
                self._outputs.seal()
        else:
            position = replace(position, stage=None, part=None)
        with self._core.checkpoint(position.batches, metadata={"records": position.done}) as folder:
            write_reducers(folder, self._context.reducers, self._ranks.rank)
            if self._ranks.is_chief:
                position.write(folder)
        if self._ranks.is_chief and position.stage and position.part:
            self._outputs.publish(position.stage, position.part)
        self._position = self._from = position
        self._outputs.begin(position.done)

    def _speed(self) -> dict[str, float]:
        now = time.monotonic()
        speed = (self._position.done - self._counted) / max(now - self._counted_at, 1e-9)
        self._counted, self._counted_at = self._position.done, now
        return {"records": self._position.done, "records_per_second": speed}


def _end(records: Records, max_batches: int | None, max_records: int | None) -> int | None:
    """Return the number of records to process; None: all."""
    ends = [max_records] if max_records is not None else []
    per_round = records.batch_size * records.size
    if max_batches is not None:
        if max_batches < 1 or (records.length is not None and (max_batches - 1) * per_round >= records.length):
            warnings.warn(
                f"torch_batch_process: max_batches is {max_batches}, which is below 1 or above the number of batches "
                f"of a rank; all records are processed",
                stacklevel=3,
            )
        else:
            ends.append(max_batches * per_round)
    if max_records is not None and max_records < 0:
        raise ArgumentError(f"torch_batch_process: max_records is {max_records}; use at least 0")
    return min(ends, default=None)
