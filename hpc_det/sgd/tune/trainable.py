"""A TorchTrainer as a search wants it: set up with a trial's config, trained step by step, saved and loaded."""

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
from hpc_det.sgd.driver.failures import GangLost, NotEnoughRanks, RetriesUsedUp, StateLost

CHECKPOINT = "trainer.checkpoint"

Step = Callable[[Any, dict[str, Any]], dict[str, Any]]
"""override_tune_step(trainer, {"iteration": k}) -> metrics; k is 0 in the first step."""


class WrongStep(UsageError, ValueError):
    """override_tune_step cannot be called as it will be."""


class Trainable:
    """What `tune_run` trains; one object a trial, in a process of its own. Subclasses may override every method."""

    ended_by: ClassVar[tuple[type[BaseException], ...]] = ()
    """What `step` raises where processes have died: the trial is started again from its last checkpoint. After any
    other exception it has failed.
    """
    trial_folder: Path | None = None
    """For files of the trial, where a search trains it."""
    training_iteration = 0
    """Steps that are behind the trial, also those before it was loaded."""

    @classmethod
    def resources(cls) -> dict[str, int]:
        """{"cpu", "gpu"}: how much of a machine a trial takes."""
        return {"cpu": 1, "gpu": 0}

    def setup(self, config: dict[str, Any]) -> None:
        """Called once, before anything else."""

    def step(self) -> dict[str, Any]:
        """Train for one iteration; the metrics. {"done": True} among them ends the trial."""
        raise NotImplementedError

    def save_checkpoint(self, folder: str) -> str | None:
        """Write a checkpoint into `folder`. Return the path in it that `load_checkpoint` takes; None: the folder."""
        raise NotImplementedError

    def load_checkpoint(self, path: str) -> None:
        raise NotImplementedError

    def cleanup(self) -> None:
        """Called once, after anything else."""


class TorchTrainable(Trainable):
    """Subclasses, made by `trainable_of`, say whose trainer with which arguments."""

    ended_by = (GangLost, RetriesUsedUp, StateLost, NotEnoughRanks)
    trainer_cls: ClassVar[Any]
    args: ClassVar[tuple[Any, ...]] = ()
    kwargs: ClassVar[Mapping[str, Any]] = {}
    override: ClassVar[Step | None] = None
    _trainer: Any = None
    """None where its making failed: that error is the one to be told."""

    @classmethod
    def resources(cls) -> dict[str, int]:
        workers = int(cls.kwargs.get("num_workers", 1))
        use_gpu = cls.kwargs.get("use_gpu", "auto")
        if use_gpu == "auto":
            use_gpu = bool(gpus_here(os.environ))
        return {"cpu": workers * int(cls.kwargs.get("num_cpus_per_worker", 1)), "gpu": workers if use_gpu else 0}

    def setup(self, config: dict[str, Any]) -> None:
        """`config` overlays a copy of the `config` that as_trainable was given: trials share nothing."""
        whole = {**deepcopy(self.kwargs.get("config") or {}), **config}
        self._run = self._own_run()
        run = {"run": self._run} if self._run else {}
        self._trainer = self.trainer_cls(*self.args, **{**run, **self.kwargs, "config": whole})

    def _own_run(self) -> str | None:
        """For this process alone: a trial goes on from its checkpoint, and not from an earlier trainer's snapshot."""
        return tempfile.mkdtemp(prefix="trainer-", dir=self.trial_folder) if self.trial_folder else None

    @property
    def trainer(self) -> Any:
        return self._trainer

    def step(self) -> dict[str, Any]:
        """train() without retries, since the search starts the trial again, and validate(), both profiled."""
        override = type(self).override
        if override is not None:
            metrics = override(self.trainer, {"iteration": self.training_iteration})
        else:
            trained = self.trainer.train(max_retries=0, profile=True)
            metrics = merged(trained, self.trainer.validate(profile=True))
        self.training_iteration += 1
        return metrics

    def save_checkpoint(self, folder: str) -> str:
        return str(self.trainer.save(str(Path(folder) / CHECKPOINT)))

    def load_checkpoint(self, path: str) -> None:
        """`path`: of the file, or of the folder that save_checkpoint was given."""
        found = Path(path)
        self.trainer.load(str(found / CHECKPOINT if found.is_dir() else found))

    def cleanup(self) -> None:
        if self._trainer:
            self._trainer.shutdown()
        if self._run:
            shutil.rmtree(self._run, ignore_errors=True)


def trainable_of(
    trainer_cls: Any, *args: Any, override_tune_step: Step | None = None, **kwargs: Any
) -> type[TorchTrainable]:
    """What TorchTrainer.as_trainable returns. Raises WrongStep, a ValueError, for a step of other than 2 parameters."""
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
            f"override_tune_step: takes {len(parameters)} parameters ({', '.join(parameters)}), and must take exactly "
            f"2: step(trainer, info)"
        )


def merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Both, maps in them recursively; of two other values that of `high`."""
    both = dict(low)
    for name, value in high.items():
        is_map = isinstance(value, Mapping) and isinstance(both.get(name), Mapping)
        both[name] = merged(both[name], value) if is_map else value
    return both
