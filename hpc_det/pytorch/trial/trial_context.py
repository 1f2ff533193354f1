"""The common base class of the contexts of PyTorchTrial and DeepSpeedTrial."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from hpc_det.config.plain_containers import plain_containers
from hpc_det.config.rank_variables import TrainsOn
from hpc_det.core.tensorboard import Profiler, TensorBoard
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError, count, nearest
from hpc_det.pytorch.strategies.device import ToDevice, prefetched
from hpc_det.pytorch.trial.reducer import MetricReducer, Reducers
from hpc_det.search.sample import sample
from hpc_det.store.folders import TrialFolder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


Known = TypeVar("Known")
Context = TypeVar("Context", bound="TrialContext")


class TrialContext:
    """One rank's view of its trial: hyperparameters, configuration, position in training, device and ranks."""

    own_loaders_allowed_by: ClassVar[str]
    """The method, with its path from `context`, by which a user allows loaders that are not hpc_det's."""

    def __init__(self, spec: dict[str, Any], distributed: Distributed, folder: TrialFolder | None = None) -> None:
        """Create the context of one rank. Trials receive their context; see `from_config` for notebooks and tests.

        Args:
            spec: The content of trial.json: IDs, seed, hyperparameters and configuration.
            distributed: This rank, the number of ranks, and communication between them.
            folder: The folder of the trial; None without a run.
        """
        self._spec = spec
        self.distributed = distributed
        """This rank, the number of ranks, and communication between them."""
        self.device = distributed.device
        """The torch.device of this rank: its GPU, or the CPU."""
        self.reducers = Reducers()
        """The reducers given to `wrap_reducer`."""
        self.folder = folder
        """The folder of the trial; None if the context was made without a run (`from_config`)."""
        own_folder = _of_rank(folder.tensorboard, distributed.rank) if folder else None
        self.tensorboard = TensorBoard(own_folder)
        """The TensorBoard event files of this rank."""
        self.profiler = Profiler(own_folder)
        """torch's profiler, as configured by `set_profiler`."""
        self.to_device_automatically = True
        """Whether the training loop moves batches to `device` before it passes them to the trial."""
        self.checks_dataset_reproducibility = True
        """Whether loaders must be of the class `hpc_det.pytorch.DataLoader`."""
        self.trains_on: TrainsOn | None = None
        """The training input of a short run that measures the throughput; None in an ordinary training."""
        self.move: Callable[[Any], Any] = ToDevice(self.device)
        """The function behind `to_device`. Profiling replaces it with a timed one."""
        self._stop_requested = False
        self._initial_batch: int | None = None
        self.batch: int | None = None
        """Number of the batch in training, or of the last trained one, from 0; None before the first one."""
        self._epoch: int | None = None
        self._first_of_epoch: int | None = None
        """Number of the first batch of the current epoch; None if it is not among the batches in training."""
        self._last_of_epoch: int | None = None
        """Number of the last batch of the current epoch; None if it is not among the batches in training."""

    @classmethod
    def from_config(cls: type[Context], config: dict[str, Any]) -> Context:
        """Return a context without a run, to build a trial in a notebook or a test, as the only rank.

        A value is drawn at random for each hyperparameter that is given as a range. Experiment and trial ID are 0.

        Args:
            config: The experiment configuration as a dict; the sections `hyperparameters`, `reproducibility`, `data`
                and `optimizations` are used if present.
        """
        config = plain_containers(config)
        seed = config.get("reproducibility", {}).get("experiment_seed") or 0
        hparams = sample(config.get("hyperparameters", {}))
        spec = {"experiment_id": 0, "trial_id": 0, "trial_seed": seed, "hparams": hparams, "config": config}
        return cls(spec, Distributed())

    # --- information

    def get_experiment_id(self) -> int:
        """Return the number of the experiment; 0 without an experiment."""
        return int(self._spec["experiment_id"])

    def get_trial_id(self) -> int:
        """Return the number of the trial within its experiment, from 1; 0 without an experiment."""
        return int(self._spec["trial_id"])

    def get_trial_seed(self) -> int:
        """Return the trial's random seed, the same on every rank and after every resume."""
        return int(self._spec["trial_seed"])

    def get_experiment_config(self) -> dict[str, Any]:
        """Return the effective experiment configuration, with all defaults."""
        return dict(self._spec["config"])

    def get_data_config(self) -> dict[str, Any]:
        """Return the section `data` of the experiment configuration; an empty dict if there is none."""
        return dict(self._spec["config"].get("data", {}))

    def get_hparams(self) -> dict[str, Any]:
        """Return all hyperparameters of the trial, by name; nested ones are dicts."""
        return dict(self._spec["hparams"])

    def get_hparam(self, name: str) -> Any:
        """Return one hyperparameter of the trial.

        Args:
            name: Name of the hyperparameter, at the top level of `hyperparameters`.

        Raises:
            UsageError: The trial has no such hyperparameter; the message lists the existing names.
        """
        # A loader with this batch size on every slot would multiply the size by the number of slots.
        if name == "global_batch_size":
            warnings.warn(
                "get_hparam('global_batch_size'): use get_per_slot_batch_size() for the batch size of a loader, or "
                "get_global_batch_size() for the size over all slots",
                stacklevel=2,
            )
        return self._hparam(name)

    def get_global_batch_size(self) -> int:
        """Return the number of records of one batch over all slots, the hyperparameter `global_batch_size`.

        Raises:
            UsageError: The trial has no such hyperparameter, or it is null.
        """
        size = self._hparam("global_batch_size")
        if size is None:
            raise UsageError("hyperparameters.global_batch_size: got None; expected a whole number >= 1")
        return int(size)

    def get_per_slot_batch_size(self) -> int:
        """Return the number of records of one batch on each slot: global_batch_size divided by slots, rounded down.

        Raises:
            UsageError: The trial has no hyperparameter `global_batch_size`, or it is below the number of slots.
        """
        whole, slots = self.get_global_batch_size(), self.distributed.size
        if whole < slots:
            raise UsageError(
                f"hyperparameters.global_batch_size: {whole} is too small for {count(slots, 'slot')}; use at least "
                "one record per slot"
            )
        return whole // slots

    def get_initial_batch(self) -> int:
        """Return the number of batches that were trained before this process started; 0 if it does not resume.

        Raises:
            UsageError: Called in `__init__` of the trial. The number is known when the data loaders are built.
        """
        return _known(self._initial_batch)

    def current_train_batch(self) -> int:
        """Return the number of the batch in training, or of the last trained one, from 0 at the start of the trial.

        Raises:
            UsageError: Nothing was trained yet.
        """
        return _known(self.batch)

    def current_train_epoch(self) -> int:
        """Return the number of the epoch in training, or of the last trained one, from 0.

        Raises:
            UsageError: Nothing was trained yet.
        """
        return _known(self._epoch)

    def is_epoch_start(self) -> bool:
        """Return whether the batch in training is the first of its epoch.

        Raises:
            UsageError: Nothing was trained yet.
        """
        return _known(self.batch) == self._first_of_epoch

    def is_epoch_end(self) -> bool:
        """Return whether the batch in training is the last of its epoch.

        Raises:
            UsageError: Nothing was trained yet.
        """
        return _known(self.batch) == self._last_of_epoch

    # --- stop

    def set_stop_requested(self, stop_requested: bool) -> None:
        """Request that training ends after the next training report or validation; it then counts as finished.

        A request by one rank is enough. Before it ends, the training is validated and saved.

        Args:
            stop_requested: True to request the end; False to withdraw a request of this rank.

        Raises:
            UsageError: `stop_requested` is neither True nor False.
        """
        if not isinstance(stop_requested, bool):
            raise UsageError(f"set_stop_requested: {stop_requested!r} is neither True nor False")
        self._stop_requested = stop_requested

    def get_stop_requested(self) -> bool:
        """Return whether this rank has requested the end of training with `set_stop_requested`."""
        return self._stop_requested

    # --- metrics

    def wrap_reducer(
        self,
        reducer: MetricReducer | Callable[[list[Any]], Any],
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> MetricReducer:
        """Register a metric that is computed from the values of many batches and all ranks; return its reducer.

        For a function, the returned reducer has a method `update(value)`. Call it once per batch on every rank; the
        function then receives the list of all values, in the order of the batches, and returns the metric.

        Args:
            reducer: An instance of a subclass of `hpc_det.pytorch.MetricReducer`, or a function of a list.
            name: Name of the metric. None: the reducer returns a dict of metrics by name.
            for_training: Whether the metric is computed at each report of training metrics.
            for_validation: Whether the metric is computed at each validation.

        Raises:
            UsageError: `reducer` is neither of these or is wrapped already, another reducer has the same name, or both
                `for_training` and `for_validation` are False.
        """
        return self.reducers.wrap(reducer, name, for_training, for_validation)

    def get_tensorboard_path(self) -> Path:
        """Return the folder of this rank's event files, which is in the TensorBoard folder of the trial.

        Without a run (`from_config`, a loaded checkpoint) it is a temporary folder, deleted when the process exits.
        """
        return self.tensorboard.folder

    def get_tensorboard_writer(self) -> SummaryWriter:
        """Return this process's TensorBoard writer, which is created at the first call.

        Raises:
            UsageError: The package tensorboard is not installed.
        """
        return self.tensorboard.writer

    def set_enable_tensorboard_logging(self, enable: bool) -> None:
        """Set whether reported metrics are also written to TensorBoard event files; by default they are.

        Args:
            enable: Whether metrics are written.
        """
        self.tensorboard.enabled = enable

    def get_enable_tensorboard_logging(self) -> bool:
        """Return whether reported metrics are also written to TensorBoard event files."""
        return self.tensorboard.enabled

    def set_profiler(self, *arguments: Any, **options: Any) -> None:
        """Run torch's profiler during training, with one profiler step per batch.

        Traces are written to the TensorBoard folder. Call this method in `__init__` of the trial. Without a run
        (`from_config`, a loaded checkpoint) it has no effect, and a note says so.

        Args:
            arguments: Positional arguments of `torch.profiler.profile`.
            options: Keyword arguments of `torch.profiler.profile`; `on_trace_ready` is ignored with a warning.
        """
        self.profiler.set(*arguments, **options)

    # --- data

    def to_device(self, data: Any) -> Any:
        """Return `data` with its tensors and numeric arrays moved to this rank's device; arrays become tensors.

        Objects of other types stay as they are, with one warning per type.

        Args:
            data: A tensor or array, or dicts, lists and tuples of any depth around them.
        """
        return self.move(data)

    # --- called by the loop

    def on_device(self, batches: Iterable[Any], *, loaded_in_workers: bool) -> Iterator[Any]:
        """Return the batches as the trial receives them: on the device, unless the trial moves them itself.

        `loaded_in_workers` says whether worker processes load them; then a GPU's next batch is copied in advance.
        """
        if not self.to_device_automatically:
            return iter(batches)
        # Batches that this process loads are not fetched in advance: they would draw random numbers too early.
        if self.device.type == "cuda" and loaded_in_workers:
            return prefetched(batches, self.move, self.device)
        return map(self.move, batches)

    def begin_training(self, batch: int) -> None:
        """Set the number of batches that were trained before this process started."""
        self._initial_batch = batch

    def begin_epoch(self, epoch: int, *, first: int | None, last: int | None) -> None:
        """Set the epoch of the next batches, and the numbers of its first and last batch if they are among these."""
        self._epoch = epoch
        self._first_of_epoch = first
        self._last_of_epoch = last

    def let_go(self) -> None:
        """Release the process group after training, so that it may end before the models do. Does nothing here."""

    def _hparam(self, name: str) -> Any:
        """Return a hyperparameter. Raises UsageError that lists the existing names."""
        hparams = self._spec["hparams"]
        if name not in hparams:
            close = nearest(str(name), hparams)
            raise UsageError(
                f"hyperparameters.{name}: not in the experiment config, which has {sorted(hparams)}; "
                f"{f'{close} Otherwise add it' if close else 'add it'}"
            )
        return hparams[name]


def _of_rank(tensorboard: Path, rank: int) -> Path:
    """Return the folder of a rank's event files: a subfolder, except for rank 0."""
    # TensorBoard merges the event files of one folder into one run, as if they were written in turn by one process.
    return tensorboard / f"rank-{rank}" if rank else tensorboard


def _known(value: Known | None) -> Known:
    """Return `value`. Raises UsageError for None, the value before training."""
    if value is None:
        raise UsageError("the numbers of batches and epochs are not known before training starts; read them later")
    return value
