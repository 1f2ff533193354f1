"""What a training loop that `fit` runs on every rank may call: report, get_context, prepare_model, prepare_data_loader.

The names and rules are those of Ray Train's functions (ray.train, Ray 2.60).
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
    """A function of training loops was called where none runs."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder with whatever files the user writes."""

    path: str

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        return cls(os.fspath(path))

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """The folder, to read; it is the run's own."""
        yield self.path


@dataclass(frozen=True, kw_only=True)
class Begin:
    """Where a loop begins: the same for all ranks."""

    name: str
    """The run's."""
    checkpoints: Path
    """Their folder."""
    attempt: str
    """Which no other has: ranks of an earlier one that still write do so elsewhere."""
    reports: int
    """That are behind us."""
    checkpoint: str | None


class LoopContext:
    """Who a rank is, for the user's loop."""

    def __init__(self, operator: TrainingOperator, begin: Begin) -> None:
        self._operator = operator
        self._begin = begin

    def get_world_rank(self) -> int:
        return self._operator.world_rank

    def get_world_size(self) -> int:
        """Of the gang as it is now: another one after a restart, maybe."""
        return self._operator.world_size

    def get_local_rank(self) -> int:
        return self._operator.local_rank

    def get_trial_name(self) -> str:
        return self._begin.name

    get_experiment_name = get_trial_name

    def get_device(self) -> Any:
        """The rank's torch.device."""
        return self._operator.device

    def get_checkpoint(self) -> Checkpoint | None:
        """The last one that was committed before this loop began; None in the first one of a run."""
        return Checkpoint(self._begin.checkpoint) if self._begin.checkpoint else None


class LoopOperator(TrainingOperator):
    """Nothing is registered: the loop does all by itself."""

    def setup(self, config: dict[str, Any]) -> None:
        pass


class TrainLoop:
    """The user's function on its way to a rank: called there with the rank's worker."""

    def __init__(self, function: Callable[..., Any], config: Mapping[str, Any] | None, begin: Begin) -> None:
        self._function = function
        self._config = config
        self._begin = begin

    def __call__(self, worker: RankWorker) -> None:
        global _session
        _session = _Session(worker, self._begin)
        try:
            takes_config = bool(signature(self._function).parameters)
            self._function(dict(self._config or {})) if takes_config else self._function()
            _session.end()
        finally:
            _session = None


class _Session:
    def __init__(self, worker: RankWorker, begin: Begin) -> None:
        self.operator = worker.runner.operator
        self.context = LoopContext(self.operator, begin)
        self.to_device = ToDevice(self.operator.device)
        self._worker = worker
        self._begin = begin
        self._reports = begin.reports

    def report(self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None) -> None:
        self._reports += 1
        entries = self._copy(Path(checkpoint.path)) if checkpoint else None
        written = None if entries is None else {name: asdict(entry) for name, entry in entries.items()}
        self._worker.tell({"report": self._reports, "metrics": in_json(dict(metrics)), "files": written})

    def end(self) -> None:
        self._worker.tell({"report": self._reports, "ended": True})

    def _copy(self, source: Path) -> dict[str, FileEntry]:
        """Where all ranks of this generation put theirs."""
        target = Staging(self._begin.checkpoints, uuid_of(self._reports, self._begin.attempt)).partial
        make_private(target)
        entries: dict[str, FileEntry] = {}
        for path in sorted(source.rglob("*")):
            name = str(path.relative_to(source))
            if path.is_dir():
                with suppress(FileExistsError):
                    (target / name).mkdir(mode=0o700)
            else:
                with open(path, "rb") as file, sealed_file(target / name, CRC) as copy:
                    shutil.copyfileobj(file, copy, 1 << 22)
                entries[name] = copy.entry
        for folder in {(target / name).parent for name in entries}:
            flush_folder(folder)
        return entries


_session: _Session | None = None


def uuid_of(report: int, attempt: str) -> str:
    """Of the checkpoint that comes with a report."""
    return f"{report:06}-{attempt}"


def _current(name: str) -> _Session:
    if _session is None:
        raise OutsideLoop(f"{name}: is for the function that hpc_det.sgd.fit runs on every rank")
    return _session


def report(metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> None:
    """Report `metrics`, of which rank 0's are recorded, and commit `checkpoint`: the files of all ranks that pass one.

    Collective: every rank calls it equally often. It returns when all ranks have called it; by then the files are
    copied and the checkpoint is committed.
    """
    _current("report").report(metrics, checkpoint)


def get_context() -> LoopContext:
    return _current("get_context").context


def get_checkpoint() -> Checkpoint | None:
    """What the loop goes on from, if anything."""
    return get_context().get_checkpoint()


def prepare_model(model: nn.Module, parallel: bool = True, **ddp_args: Any) -> nn.Module:
    """On the rank's device; with several ranks in DistributedDataParallel, unless not `parallel`."""
    operator = _current("prepare_model").operator
    if not parallel:
        return model.to(operator.device)
    prepared: nn.Module = operator.register(models=model, optimizers=[], ddp_args=ddp_args or None)[0]
    return prepared


class PreparedLoader:
    """A rank's share of a DataLoader, pass after pass, on its device; the order is another one in each epoch."""

    def __init__(self, loader: DataLoader[Any], operator: TrainingOperator, to_device: Callable[[Any], Any]) -> None:
        place = RankPlace(operator.world_rank, operator.local_rank, operator.world_size)
        settings = RankSettings(operator_cls=type(operator), config={}, num_workers=operator.world_size)
        self._source = training_source(loader, settings, place)
        self._to_device = to_device
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Of the next pass, from 0; without it, that after the last. A loop that goes on in an epoch calls it."""
        self._epoch = epoch

    def __len__(self) -> int:
        batches = self._source.left(0)
        if batches is None:
            raise TypeError("this loader has no length")
        return batches

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        return map(self._to_device, self._source.begin(epoch))


def prepare_data_loader(loader: DataLoader[Any]) -> Iterable[Any]:
    """The rank's share of its batches, on its device. Loaders with a sampler of the user's own are not shared out."""
    session = _current("prepare_data_loader")
    return PreparedLoader(loader, session.operator, session.to_device)
