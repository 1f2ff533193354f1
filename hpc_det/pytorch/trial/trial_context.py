"""What every trial can ask of its context, whatever trains its models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from hpc_det.config.rank_variables import TrainsOn
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError
from hpc_det.pytorch.strategies.device import ToDevice, prefetched
from hpc_det.pytorch.trial.reducer import MetricReducer, Reducers
from hpc_det.pytorch.trial.tensorboard import Profiler, TensorBoard
from hpc_det.search.sample import sample
from hpc_det.store.folders import TrialFolder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


Known = TypeVar("Known")
Context = TypeVar("Context", bound="TrialContext")


class TrialContext:
    """One rank's view of its trial. `spec` is the content of trial.json."""

    own_loaders_allowed_by: ClassVar[str]
    """The method that the user calls to return other loaders than ours."""

    def __init__(self, spec: dict[str, Any], distributed: Distributed, folder: TrialFolder | None = None) -> None:
        self._spec = spec
        self.distributed = distributed
        self.device = distributed.device
        self.reducers = Reducers()
        self.folder = folder
        """Of the trial; None off cluster."""
        own_folder = _of_rank(folder.tensorboard, distributed.rank) if folder else None
        self.tensorboard = TensorBoard(own_folder)
        self.profiler = Profiler(own_folder)
        self.to_device_automatically = True
        self.checks_dataset_reproducibility = True
        self.trains_on: TrainsOn | None = None
        """In a short run that measures the throughput."""
        self.move: Callable[[Any], Any] = ToDevice(self.device)
        self._stop_requested = False
        self._initial_batch: int | None = None
        self.batch: int | None = None
        """In training, or trained last: its number in the whole of training, from 0."""
        self._epoch: int | None = None
        self._first_of_epoch: int | None = None
        self._last_of_epoch: int | None = None

    @classmethod
    def from_config(cls: type[Context], config: dict[str, Any]) -> Context:
        """Off cluster: to build a trial in a notebook or a test, alone on this machine's device.

        Each hyperparameter with a range is drawn at random.
        """
        seed = config.get("reproducibility", {}).get("experiment_seed") or 0
        hparams = sample(config.get("hyperparameters", {}))
        spec = {"experiment_id": 0, "trial_id": 0, "trial_seed": seed, "hparams": hparams, "config": config}
        return cls(spec, Distributed())

    # --- information

    def get_experiment_id(self) -> int:
        return int(self._spec["experiment_id"])

    def get_trial_id(self) -> int:
        return int(self._spec["trial_id"])

    def get_trial_seed(self) -> int:
        return int(self._spec["trial_seed"])

    def get_experiment_config(self) -> dict[str, Any]:
        """The effective config."""
        return dict(self._spec["config"])

    def get_data_config(self) -> dict[str, Any]:
        """The section `data` of the config."""
        return dict(self._spec["config"].get("data", {}))

    def get_hparams(self) -> dict[str, Any]:
        return dict(self._spec["hparams"])

    def get_hparam(self, name: str) -> Any:
        """Raises UsageError naming the known ones."""
        if name == "global_batch_size":
            warnings.warn(
                "get_hparam('global_batch_size'): a loader's batch size is get_per_slot_batch_size(), and the size "
                "over all slots get_global_batch_size()",
                stacklevel=2,
            )
        return self._hparam(name)

    def get_global_batch_size(self) -> int:
        """Records of one batch over all slots."""
        return int(self._hparam("global_batch_size"))

    def get_per_slot_batch_size(self) -> int:
        """global_batch_size // slots; the remainder is dropped. Raises UsageError where nothing would be left."""
        whole, slots = self.get_global_batch_size(), self.distributed.size
        if whole < slots:
            raise UsageError(
                f"hyperparameters.global_batch_size: {whole} is below the {slots} slots; every slot needs a record of "
                f"each batch"
            )
        return whole // slots

    def get_initial_batch(self) -> int:
        """The number of batches that were trained before this process started. Raises UsageError before training."""
        return _known(self._initial_batch)

    def current_train_batch(self) -> int:
        """The global number of the batch in training, from 0. Raises UsageError before training."""
        return _known(self.batch)

    def current_train_epoch(self) -> int:
        return _known(self._epoch)

    def is_epoch_start(self) -> bool:
        """Whether the batch in training is the first of its epoch."""
        return _known(self.batch) == self._first_of_epoch

    def is_epoch_end(self) -> bool:
        """Whether the batch in training is the last of its epoch."""
        return _known(self.batch) == self._last_of_epoch

    # --- stop

    def set_stop_requested(self, stop_requested: bool) -> None:
        """Finish cleanly after the next report of training, or validation; one rank that asks speaks for all."""
        if not isinstance(stop_requested, bool):
            raise UsageError(f"set_stop_requested: {stop_requested!r} is neither True nor False")
        self._stop_requested = stop_requested

    def get_stop_requested(self) -> bool:
        return self._stop_requested

    # --- metrics

    def wrap_reducer(
        self,
        reducer: MetricReducer | Callable[[list[Any]], Any],
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> MetricReducer:
        """A metric of many batches and ranks, of the trial's own making; see `hpc_det.pytorch.MetricReducer`.

        Given a function, returns a reducer whose `update(value)` collects what that function gets as a list, in the
        original order of batches. With a `name` the result is that metric, without one a dict of metrics.
        """
        return self.reducers.wrap(reducer, name, for_training, for_validation)

    def get_tensorboard_path(self) -> Path:
        """The folder of this rank's event files, which TensorBoard shows. Raises UsageError off cluster."""
        return self.tensorboard.folder

    def get_tensorboard_writer(self) -> SummaryWriter:
        """One for the process, made at the first call."""
        return self.tensorboard.writer

    def set_enable_tensorboard_logging(self, enable: bool) -> None:
        """Whether the reported metrics are written for TensorBoard, too."""
        self.tensorboard.enabled = enable

    def get_enable_tensorboard_logging(self) -> bool:
        return self.tensorboard.enabled

    def set_profiler(self, *arguments: Any, **options: Any) -> None:
        """torch.profiler.profile around the whole training, a step a batch; its traces go to the TensorBoard folder."""
        self.profiler.set(*arguments, **options)

    # --- data

    def to_device(self, data: Any) -> Any:
        """Tensors and numeric arrays, nested in dicts, lists and tuples, on this rank's device; the rest as it is."""
        return self.move(data)

    # --- called by the loop

    def on_device(self, batches: Iterable[Any], *, loaded_in_workers: bool) -> Iterator[Any]:
        """Batches as the trial gets them."""
        if not self.to_device_automatically:
            return iter(batches)
        if self.device.type == "cuda" and loaded_in_workers:
            return prefetched(batches, self.move, self.device)
        return map(self.move, batches)

    def begin_training(self, batch: int) -> None:
        """After `batch` batches, in this process or an earlier one."""
        self._initial_batch = batch

    def begin_epoch(self, epoch: int, *, first: int | None, last: int | None) -> None:
        """Batches are of `epoch` from here on. `first`, `last`: its first and last batch, where they are among them."""
        self._epoch = epoch
        self._first_of_epoch = first
        self._last_of_epoch = last

    def let_go(self) -> None:
        """Training is over, and the process group may end before the models do."""

    def _hparam(self, name: str) -> Any:
        hparams = self._spec["hparams"]
        if name not in hparams:
            raise UsageError(
                f"hyperparameters.{name}: not in the experiment config, which has {sorted(hparams)}; add it"
            )
        return hparams[name]


def _of_rank(tensorboard: Path, rank: int) -> Path:
    """TensorBoard reads the event files of a folder as those of one writer after the other."""
    return tensorboard / f"rank-{rank}" if rank else tensorboard


def _known(value: Known | None) -> Known:
    if value is None:
        raise UsageError("the context knows batches and epochs in training only, not before")
    return value


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
