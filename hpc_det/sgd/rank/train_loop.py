"""Functions for a training loop of `fit`: report, get_checkpoint, get_context, prepare_model, prepare_data_loader.

Names and rules are those of Ray Train (ray.train, Ray 2.60).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import DataLoader

from hpc_det.checkpoint.sealed_files import sealed_file
from hpc_det.checkpoint.seals import CRC, FileEntry
from hpc_det.checkpoint.staging import Staging
from hpc_det.errors import UsageError
from hpc_det.node.files import flush_folder, make_private
from hpc_det.pytorch.strategies.device import ToDevice
from hpc_det.sgd.operator.training_operator import TrainingOperator
from hpc_det.sgd.rank import RankPlace, RankSettings
from hpc_det.sgd.rank.passes import training_source
from hpc_det.store.metrics import in_json

if TYPE_CHECKING:
    from hpc_det.sgd.rank.worker import RankWorker


class OutsideLoop(UsageError, RuntimeError):
    """A function for training loops was called outside the function that `fit` runs."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: a folder with files that the user's training loop has written."""

    path: str
    """Path of the folder."""

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Return the checkpoint in a folder.

        Args:
            path: Path of the folder; `report` copies its files.
        """
        return cls(os.fspath(path))

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """Return a context manager that gives the path of the folder.

        Do not change the files: a committed checkpoint is in the run folder itself, not a copy.
        """
        yield self.path


@dataclass(frozen=True, kw_only=True)
class Begin:
    """The start of a training loop; the same for all ranks."""

    name: str
    """Name of the run."""
    checkpoints: Path
    """Folder that contains the checkpoints."""
    attempt: str
    """Unique id of this gang, part of the names of its checkpoints, so that ranks of an earlier gang that still write
    files use other names.
    """
    reports: int
    """Number of reports up to the checkpoint to continue from; 0 without one."""
    checkpoint: str | None
    """Path of the checkpoint to continue from, or None."""


class LoopContext:
    """The rank that a training loop runs on: its numbers, its device, its checkpoint."""

    def __init__(self, operator: TrainingOperator, begin: Begin) -> None:
        self._operator = operator
        self._begin = begin

    def get_world_rank(self) -> int:
        """Return the number of this rank in the gang, from 0."""
        return self._operator.world_rank

    def get_world_size(self) -> int:
        """Return the number of ranks in the gang; it may differ after a restart of the loop."""
        return self._operator.world_size

    def get_local_rank(self) -> int:
        """Return the number of this rank on its node, from 0."""
        return self._operator.local_rank

    def get_trial_name(self) -> str:
        """Return the name of the run."""
        return self._begin.name

    get_experiment_name = get_trial_name

    def get_device(self) -> Any:
        """Return the torch.device of this rank."""
        return self._operator.device

    def get_checkpoint(self) -> Checkpoint | None:
        """Return the last checkpoint that was committed before this loop started, or None if there is none."""
        return Checkpoint(self._begin.checkpoint) if self._begin.checkpoint else None


class LoopOperator(TrainingOperator):
    """The operator of a training loop: it registers nothing, because the loop itself creates models and data."""

    def setup(self, config: dict[str, Any]) -> None:
        pass


class TrainLoop:
    """The user's training loop, sent to a rank and called there with the rank's worker."""

    def __init__(self, function: Callable[..., Any], config: Mapping[str, Any] | None, begin: Begin) -> None:
        self._function = function
        self._config = config
        self._begin = begin

    def __call__(self, worker: RankWorker) -> None:
        global _session
        _session = _Session(worker, self._begin)
        try:
            takes_config = bool(signature(self._function).parameters)  # as in Ray Train, the config is optional
            self._function(dict(self._config or {})) if takes_config else self._function()
            _session.end()
        finally:
            _session = None


class _Session:
    """The training loop that runs in this process: what the public functions of this module need."""

    def __init__(self, worker: RankWorker, begin: Begin) -> None:
        self.operator = worker.runner.operator
        self.context = LoopContext(self.operator, begin)
        self.to_device = ToDevice(self.operator.device)
        self._worker = worker
        self._begin = begin
        self._reports = begin.reports

    def report(self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None) -> None:
        """Send a report to the driver, after copying the checkpoint; wait until the driver has committed it."""
        self._reports += 1
        entries = self._copy(Path(checkpoint.path)) if checkpoint else None
        written = None if entries is None else {name: asdict(entry) for name, entry in entries.items()}
        self._worker.tell({"report": self._reports, "metrics": in_json(dict(metrics)), "files": written})

    def end(self) -> None:
        """Report that the function has returned on this rank, and wait until it has on all ranks."""
        self._worker.tell({"report": self._reports, "ended": True})

    def _copy(self, source: Path) -> dict[str, FileEntry]:
        """Copy this rank's files into the partial checkpoint, which all ranks share.

        Return their entries (size and checksum) by their paths in the checkpoint.
        """
        target = Staging(self._begin.checkpoints, uuid_of(self._reports, self._begin.attempt)).partial
        make_private(target)
        entries: dict[str, FileEntry] = {}
        for path in sorted(source.rglob("*")):
            name = str(path.relative_to(source))
            if path.is_dir():
                with suppress(FileExistsError):  # another rank may have made it
                    (target / name).mkdir(mode=0o700)
            else:
                with open(path, "rb") as file, sealed_file(target / name, CRC) as copy:
                    shutil.copyfileobj(file, copy, 1 << 22)
                entries[name] = copy.entry
        # sealed_file has flushed the files; their directory entries are on disk only after this.
        for folder in {(target / name).parent for name in entries}:
            flush_folder(folder)
        return entries


_session: _Session | None = None
"""The session of the training loop that this process runs; None outside of one."""


def uuid_of(report: int, attempt: str) -> str:
    """Return the id of the checkpoint of a report, which is also the name of its folder."""
    return f"{report:06}-{attempt}"


def _current(name: str) -> _Session:
    """Return the running session. Raises OutsideLoop, naming the function `name`, if there is none."""
    if _session is None:
        raise OutsideLoop(
            f"{name}(): called outside a training loop; call it in the function that hpc_det.sgd.fit runs on every rank"
        )
    return _session


def report(metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> None:
    """Report metrics and commit a checkpoint. Collective: every rank must call it equally often.

    It returns when all ranks have called it, the files are copied, and the checkpoint is committed.

    Args:
        metrics: Values by name. Only those of rank 0 are recorded; values that JSON cannot represent are converted.
        checkpoint: A folder with files, or None. The committed checkpoint contains the files of all ranks that give
            one; their names must be different on each rank.

    Raises:
        OutsideLoop: A RuntimeError; it was called outside the function that `fit` runs.
    """
    _current("report").report(metrics, checkpoint)


def get_context() -> LoopContext:
    """Return the context of this rank: its number, the world size, its device.

    Raises:
        OutsideLoop: A RuntimeError; it was called outside the function that `fit` runs.
    """
    return _current("get_context").context


def get_checkpoint() -> Checkpoint | None:
    """Return the checkpoint that the loop has to continue from, or None in the first start of a run.

    Raises:
        OutsideLoop: A RuntimeError; it was called outside the function that `fit` runs.
    """
    return get_context().get_checkpoint()


def prepare_model(model: nn.Module, parallel: bool = True, **ddp_args: Any) -> nn.Module:
    """Return the model on the rank's device, wrapped in DistributedDataParallel (DDP) if there are several ranks.

    Args:
        model: The model.
        parallel: Whether to wrap it in DDP.
        **ddp_args: Keyword arguments for DistributedDataParallel.

    Raises:
        BadModel: An AssertionError; `model` is not an nn.Module.
        OutsideLoop: A RuntimeError; it was called outside the function that `fit` runs.
    """
    operator = _current("prepare_model").operator
    if not parallel:
        return model.to(operator.device)
    # `register` also moves the model to the device, and checks it; no optimizer is registered, the loop has its own.
    prepared: nn.Module = operator.register(models=model, optimizers=[], ddp_args=ddp_args or None)[0]
    return prepared


class PreparedLoader:
    """A rank's shard of a DataLoader, with batches on the rank's device. Each iteration over it is one epoch."""

    def __init__(self, loader: DataLoader[Any], operator: TrainingOperator, to_device: Callable[[Any], Any]) -> None:
        place = RankPlace(operator.world_rank, operator.local_rank, operator.world_size)
        settings = RankSettings(operator_cls=type(operator), config={}, num_workers=operator.world_size)
        self._source = training_source(loader, settings, place)
        self._to_device = to_device
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, which determines the order of shuffled samples.

        Call it in a loop that continues from a checkpoint. Without it epochs are counted from 0 in each start.

        Args:
            epoch: Number of the epoch, from 0.
        """
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches in an epoch on this rank. Raises TypeError if it is not known."""
        batches = self._source.left(0)
        if batches is None:
            raise TypeError("the number of batches is not known: the loader that was prepared has no length")
        return batches

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        return map(self._to_device, self._source.begin(epoch))


def prepare_data_loader(loader: DataLoader[Any]) -> Iterable[Any]:
    """Return an iterable with this rank's shard of the loader, whose batches are on the rank's device.

    A loader with a custom sampler or `__iter__`, with an IterableDataset, or with a DistributedSampler is not sharded:
    its batches are used unchanged on every rank.

    Args:
        loader: The DataLoader of the whole data.

    Raises:
        OutsideLoop: A RuntimeError; it was called outside the function that `fit` runs.
    """
    session = _current("prepare_data_loader")
    return PreparedLoader(loader, session.operator, session.to_device)
