"""Trainable, the interface of classes that a search trains, and its implementation for TorchTrainer."""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

from hpc_det.errors import UsageError
from hpc_det.sgd.capacity.starters import gpus_here
from hpc_det.sgd.driver.experiment import part_of_an_experiment
from hpc_det.sgd.driver.failures import GangLost, NotEnoughRanks, RetriesUsedUp, StateLost

CHECKPOINT = "trainer.checkpoint"
"""File of TorchTrainer.save in a checkpoint, named as in RaySGD."""

Step = Callable[[Any, dict[str, Any]], dict[str, Any]]
"""override_tune_step(trainer, {"iteration": k}) returns the metrics; k is 0 in the first step."""


class WrongStep(UsageError, ValueError):
    """`override_tune_step` does not have exactly two parameters."""


class Trainable:
    """A trial of a search, as a class that `tune_run` trains. Derive a class from it and override its methods.

    `tune_run` creates one object per trial, in a separate process.

    Attributes:
        ended_by: Exceptions of `step` that mean that processes died. After one of these the trial is restarted from its
            last checkpoint; after any other exception it has failed.
        trial_folder: A folder for files of the trial; None outside of a search.
        training_iteration: Number of completed steps, including those before the loaded checkpoint.
    """

    ended_by: ClassVar[tuple[type[BaseException], ...]] = ()
    trial_folder: Path | None = None
    training_iteration = 0

    @classmethod
    def resources(cls) -> dict[str, int]:
        """Return the resources that a trial takes on this machine: `{"cpu": number, "gpu": number}`."""
        return {"cpu": 1, "gpu": 0}

    def setup(self, config: dict[str, Any]) -> None:
        """Prepare the trial. Called once, before any other method.

        Args:
            config: Hyperparameters of the trial.
        """

    def step(self) -> dict[str, Any]:
        """Train for one iteration and return the metrics by name; `{"done": True}` among them completes the trial.

        Raises:
            NotImplementedError: The class does not override it.
        """
        raise NotImplementedError

    def save_checkpoint(self, folder: str) -> str | None:
        """Write a checkpoint.

        Args:
            folder: Path of the folder to write it to.

        Returns:
            The path in the folder that `load_checkpoint` is to receive. None: the folder itself.

        Raises:
            NotImplementedError: The class does not override it.
        """
        raise NotImplementedError

    def load_checkpoint(self, path: str) -> None:
        """Load a checkpoint. Called after `setup`.

        Args:
            path: The path that `save_checkpoint` returned; the folder may have been moved since.

        Raises:
            NotImplementedError: The class does not override it.
        """
        raise NotImplementedError

    def cleanup(self) -> None:
        """Free resources. Called once, after all other methods."""


class TorchTrainable(Trainable):
    """A trial that trains a TorchTrainer. `trainable_of` derives classes with the trainer's arguments from it."""

    ended_by = (GangLost, RetriesUsedUp, StateLost, NotEnoughRanks)
    trainer_cls: ClassVar[Any]
    args: ClassVar[tuple[Any, ...]] = ()
    kwargs: ClassVar[Mapping[str, Any]] = {}
    override: ClassVar[Step | None] = None
    _trainer: Any = None
    """The trainer; None if its constructor failed, so that `cleanup` does not hide that exception by another one."""

    @classmethod
    def resources(cls) -> dict[str, int]:
        """Return the resources of all workers of the trainer: `{"cpu": number, "gpu": number}`."""
        workers = int(cls.kwargs.get("num_workers", 1))
        use_gpu = cls.kwargs.get("use_gpu", "auto")
        if use_gpu == "auto":
            use_gpu = bool(gpus_here(os.environ))
        return {"cpu": workers * int(cls.kwargs.get("num_cpus_per_worker", 1)), "gpu": workers if use_gpu else 0}

    def setup(self, config: dict[str, Any]) -> None:
        """Create the trainer. Its config is that given to as_trainable, overlaid by the `config` of the trial."""
        # A copy: RaySGD changes the shared dict, so that trials see each other's hyperparameters.
        whole = {**deepcopy(self.kwargs.get("config") or {}), **config}
        self._run = self._own_run()
        run = {"run": self._run} if self._run else {}
        with part_of_an_experiment():  # the search is the experiment
            self._trainer = self.trainer_cls(*self.args, **{**run, **self.kwargs, "config": whole})

    def _own_run(self) -> str | None:
        """Return a new run folder for this process, or None outside of a search."""
        # Not one folder for all processes of a trial: the trial continues from its checkpoint, and the trainer must not
        # continue from the snapshot of an earlier process.
        return tempfile.mkdtemp(prefix="trainer-", dir=self.trial_folder) if self.trial_folder else None

    @property
    def trainer(self) -> Any:
        """The TorchTrainer of the trial."""
        return self._trainer

    def step(self) -> dict[str, Any]:
        """Call `override_tune_step`, or `train()` and `validate()`, and return the metrics."""
        override = type(self).override
        if override is not None:
            metrics = override(self.trainer, {"iteration": self.training_iteration})
        else:
            # No retries: after a failure the search restarts the trial.
            trained = self.trainer.train(max_retries=0, profile=True)
            metrics = merged(trained, self.trainer.validate(profile=True))
        self.training_iteration += 1
        return metrics

    def save_checkpoint(self, folder: str) -> str:
        """Save the trainer's state in the folder, and return the path of the file."""
        return str(self.trainer.save(str(Path(folder) / CHECKPOINT)))

    def load_checkpoint(self, path: str) -> None:
        """Load the trainer's state; `path`: the file, or the folder that `save_checkpoint` received."""
        found = Path(path)
        self.trainer.load(str(found / CHECKPOINT if found.is_dir() else found))

    def cleanup(self) -> None:
        """Shut the trainer down, and remove its run folder."""
        if self._trainer:
            self._trainer.shutdown()
        if self._run:
            shutil.rmtree(self._run, ignore_errors=True)


def trainable_of(
    trainer_cls: Any, *args: Any, override_tune_step: Step | None = None, **kwargs: Any
) -> type[TorchTrainable]:
    """Return the class that TorchTrainer.as_trainable returns.

    Raises WrongStep, a ValueError, if `override_tune_step` does not have exactly two parameters.
    """
    if override_tune_step is not None:
        _check_step(override_tune_step)
    own = {
        "trainer_cls": trainer_cls,
        "args": args,
        "kwargs": kwargs,
        "override": staticmethod(override_tune_step) if override_tune_step else None,
        "__doc__": TorchTrainable.__doc__,
    }
    return type("TorchTrainable", (TorchTrainable,), own)


def _check_step(step: Step) -> None:
    parameters = list(inspect.signature(step).parameters)
    if len(parameters) != 2:
        raise WrongStep(
            f"override_tune_step: takes {len(parameters)} parameters ({', '.join(parameters)}), but must take exactly "
            f"2; define it as step(trainer, info)"
        )


def merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict with the entries of both. Nested mappings are merged; otherwise the value of `high` wins."""
    both = dict(low)
    for name, value in high.items():
        is_map = isinstance(value, Mapping) and isinstance(both.get(name), Mapping)
        both[name] = merged(both[name], value) if is_map else value
    return both
