"""What a user writes for batch inference: a processor, and the context that it receives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hpc_det.core import Core
from hpc_det.pytorch.inference.output_folder import OutputFolder
from hpc_det.pytorch.strategies.device import ToDevice
from hpc_det.pytorch.trial.reducer import MetricReducer, Reducers


class TorchBatchProcessorContext:
    """The context of a TorchBatchProcessor; `torch_batch_process` creates it."""

    def __init__(self, core: Core, outputs: OutputFolder) -> None:
        self._core = core
        self._outputs = outputs
        self.distributed = core.distributed
        """This rank, the number of ranks, and communication between them."""
        self.reducers = Reducers()
        self.device: torch.device = core.distributed.device
        """The device of this rank."""
        self._move = ToDevice(self.device)
        self.records = range(0)
        """The numbers of the records in the current batch, counted over the whole data set.

        A file that is named after them has the same name for any number of ranks.
        """

    def to_device(self, data: Any) -> Any:
        """Return `data` with its tensors and arrays, in dicts, lists and tuples of any depth, on `device`.

        Args:
            data: A batch.
        """
        return self._move(data)

    def prepare_model_for_inference(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model on `device`, in evaluation mode.

        Args:
            model: The model, which is moved itself.
        """
        return model.eval().to(self.device)

    @contextmanager
    def upload_path(self) -> Iterator[Path]:
        """Yield a folder for output files of this rank.

        The files belong to the records since the last checkpoint. They appear in the trial's folder `outputs` when the
        checkpoint exists that counts these records as done. If the job ends before, they are deleted, and the records
        are processed again. Each checkpoint begins an empty folder.
        """
        yield self._outputs.own

    def get_hparams(self) -> dict[str, Any]:
        """Return the hyperparameters of the trial."""
        return self._core.hparams

    def get_tensorboard_path(self) -> Path:
        """Return the folder of this rank's TensorBoard event files."""
        return self._core.tensorboard_path

    def get_distributed_rank(self) -> int:
        return self._core.distributed.rank

    def get_distributed_size(self) -> int:
        return self._core.distributed.size

    def report_metrics(self, group: str, steps: int, metrics: Mapping[str, Any]) -> None:
        """Report metrics. Rank 0's values count; use `wrap_reducer` for metrics of all ranks.

        Args:
            group: Any name. Metrics of "training" and "validation" are reported by every rank, other groups may be
                reported by rank 0 alone.
            steps: The number of batches to which the metrics belong.
            metrics: The values by name.
        """
        self._core.report(steps, metrics, group=group)

    def report_task_using_checkpoint(self, checkpoint: Any) -> None:
        """Record a checkpoint from which the outputs come, in outputs/sources.json.

        Args:
            checkpoint: A folder, a UUID, or an object with the attribute `uuid`.
        """
        if self._core.distributed.is_chief:
            source = checkpoint if isinstance(checkpoint, Path) else getattr(checkpoint, "uuid", checkpoint)
            self._outputs.add_source("checkpoints", {"checkpoint": str(source)})

    def report_task_using_model_version(self, model_version: Any) -> None:
        """Record a version of a model from which the outputs come, in outputs/sources.json.

        Args:
            model_version: A text, or an object with the attributes `name`, `version` and `checkpoint`, or some of them.
        """
        if self._core.distributed.is_chief:
            checkpoint = getattr(model_version, "checkpoint", None)
            found = {
                "name": getattr(model_version, "name", None if checkpoint else str(model_version)),
                "version": getattr(model_version, "version", None),
                "checkpoint": getattr(checkpoint, "uuid", None),
            }
            source = {name: str(value) for name, value in found.items() if value is not None}
            self._outputs.add_source("model_versions", source)

    def wrap_reducer(
        self,
        reducer: MetricReducer | Callable[[list[Any]], Any],
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> MetricReducer:
        """Register a metric of all records of all ranks and return its reducer; every rank does so in `__init__`.

        Checkpoints contain what it has collected, so after any number of stops the metric covers every record once. At
        the end it is reported as a validation metric.

        Args:
            reducer: An instance of a subclass of MetricReducer, or a function of the list of all updates.
            name: The name of the metric. Without a name, the reducer returns a dict of metrics.
            for_training: Ignored; batch inference has one kind of metrics. As in a PyTorchTrial otherwise.
            for_validation: Ignored, too.
        """
        return self.reducers.wrap(reducer, name)


class TorchBatchProcessor(ABC):
    """The base class for batch inference: each rank creates one instance, which processes batch after batch."""

    def __init__(self, context: TorchBatchProcessorContext) -> None:  # noqa: B027
        """Load the model here. A subclass that defines this need not call it.

        Args:
            context: The context of this rank.
        """

    @abstractmethod
    def process_batch(self, batch: Any, batch_idx: int) -> Any:
        """Process one batch. The batch is on the CPU; `context.to_device` moves it.

        Returns:
            None, or one entry for each record, which is stored in the part of its records: a tensor or array with the
            records as its first dimension, a list, or a dict of these. `hpc_det.pytorch.Outputs` reads them in the
            order of the data set.

        Args:
            batch: The collated records `context.records`.
            batch_idx: The number of the round, from 0. In each round every rank has one batch; in the last one some
                ranks may have none, and this method is not called there.
        """

    def on_checkpoint_start(self) -> None:  # noqa: B027
        """Write what is not written yet to `context.upload_path()`; called before each checkpoint, on every rank."""

    def on_finish(self) -> None:  # noqa: B027
        """Called on every rank after the last batch, and again if the job ends before its checkpoint exists."""
