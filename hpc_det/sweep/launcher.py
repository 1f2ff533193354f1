"""The launcher that Hydra calls: it composes and saves the points of a sweep, submits them, and waits if requested.

Most modules of hpc_det are imported only where they are used: every Hydra app of this Python imports this module.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, configure_log, filter_overrides, setup_globals
from hydra.errors import CompactHydraException, HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from hpc_det.errors import HpcDetError, UsageError, count

if TYPE_CHECKING:
    from hpc_det.store.folders import ExperimentFolder

log = logging.getLogger(__name__)

NEEDS_NO_VALUES = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
"""The sweeper that may be used with wait=false: it takes no decisions from return values."""


class Refused(UsageError, CompactHydraException):
    """An error that Hydra shows without a traceback."""


class SweepLauncher(Launcher):
    """A launcher of Hydra that submits the points of a sweep as the trials of one experiment.

    The arguments of its constructor are the fields of `hydra.launcher` (hydra_plugins.hpc_launcher.launchers).
    """

    scheduler: str
    """The scheduler that the cluster profile must have: slurm, pbs or local."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from hpc_det.sweep.saved import Composer

        self._loader = hydra_context.config_loader
        self._callbacks = hydra_context.callbacks
        self._task_function = task_function
        self._config = config
        self._refuse_values_that_never_come()
        self._composer = Composer(self._loader)
        hydra_context.config_loader = self._composer  # sweepers compose every point, too, to validate its overrides

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submit a point for each list of overrides; return their results, or SubmissionRecords with wait=false."""
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        with _refusals():
            return self._launch([list(overrides) for overrides in job_overrides], initial_job_idx)

    def _launch(self, overrides: list[list[str]], first: int) -> list[JobReturn]:
        from hpc_det.sweep.experiment import job_returns, submission_records
        from hpc_det.sweep.files import point_to
        from hpc_det.sweep.status import left_by_ctrl_c, wait

        experiment = self._submit(overrides, first)
        with left_by_ctrl_c(experiment):
            point_to(experiment, Path(self._config.hydra.sweep.dir).absolute())
            log.info(f"Submitted {count(len(overrides), 'job')} as experiment {experiment.id}")
            for number, point in enumerate(overrides, start=first):
                log.info(f"\t#{number} : {' '.join(filter_overrides(point))}")
            if not self._fields["wait"]:
                log.info(f"Look at them with: hpc-det sweep status {experiment.id}")
                return submission_records(experiment, overrides)
            wait(experiment, self._fields["poll_s"])
        return job_returns(experiment, overrides)

    def _submit(self, overrides: list[list[str]], first: int) -> ExperimentFolder:
        """Compose all points and submit them as an experiment; `first`: Hydra's number of the first point."""
        from hpc_det.store.experiments import ExperimentStore, state_root
        from hpc_det.submit.submission import submit
        from hpc_det.sweep.experiment import Settings
        from hpc_det.sweep.files import SweepFiles
        from hpc_det.sweep.saved import App, checkpoint_of, save

        Path(self._config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        points = [self._composer.checked(self._config, point) for point in overrides]
        app = App(
            task_function=self._task_function,
            checkpoint=checkpoint_of(self._task_function),
            context=HydraContext(config_loader=self._loader, callbacks=self._callbacks),
            singletons=Singleton.get_state(),
        )
        settings = Settings(scheduler=self.scheduler, **self._fields)
        found = settings.effective(self._config.hydra.job.name, Path.cwd(), overrides, os.environ)
        return submit(
            found,
            ExperimentStore(state_root(os.environ)),
            live=lambda folder: save(SweepFiles(folder), app, points, first),
        )

    def _refuse_values_that_never_come(self) -> None:
        """Raise Refused if `wait` is false and the sweeper needs return values."""
        sweeper = OmegaConf.select(self._config, "hydra.sweeper._target_")
        if not self._fields["wait"] and sweeper != NEEDS_NO_VALUES:
            raise Refused(
                f"hydra.launcher.wait: false returns at once, without results, and the sweeper {sweeper} needs them; "
                f"set hydra.launcher.wait=true"
            )


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise an HpcDetError of the `with` block as Refused, which Hydra shows without a traceback."""
    try:
        yield
    except HydraException:
        raise
    except HpcDetError as error:
        raise Refused(error.problems) from None
