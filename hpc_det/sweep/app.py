"""A rank of a sweep's point: python3 -m hpc_det.sweep.app, which is started for each slot on the compute nodes.

Rank 0 runs the point as Hydra runs a job, with its output folder, log and callbacks. The other ranks run the app's
function with the same configuration, and log only into their own logs.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from hpc_det.distributed import rank_process
from hpc_det.distributed.rank_process import RankProcess, join_gang, note_error
from hpc_det.errors import UsageError
from hpc_det.node.forking import leave
from hpc_det.node.json_files import read_json, write_json
from hpc_det.store.attempt import Attempt
from hpc_det.sweep import stops
from hpc_det.sweep.files import SweepFiles

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from omegaconf import DictConfig

    from hpc_det.sweep.saved import App

PEERS_LEFT_S = 2.0
"""Seconds to wait for a stop request after the app has failed in a gang: other ranks may have left because of that
request, and so have caused the failure. Then this rank has to stop, too, instead of reporting a failure.
"""
LONGEST_SHOWN = 1000
"""Largest number of characters of a return value in the JSON file for `hpc-det sweep status`."""


class Rank:
    """A rank of a point: runs the app's function, and records its return value or error.

    If the function trains inside `hpc_det.core.init`, the outcome of that run is the point's: after a stop, the return
    value is not recorded, and the point runs again.
    """

    def __init__(self, process: RankProcess, env: Mapping[str, str]) -> None:
        self.process = process
        rank_process.host = self
        self._run_outcome: dict[str, Any] | None = None
        """The outcome of the run inside `hpc_det.core.init`; None before its end, and without one."""
        self._attempt: Attempt = process.attempt
        self._number = int(env["RANK"])
        self._world_size = int(env["WORLD_SIZE"])
        self._files = SweepFiles(process.attempt.trial.experiment())
        self._stops = stops.current = stops.Stops(process, self._note_stop)

    def run(self) -> int:
        """Run the app's function and return the exit code: 0, or 1 after an error, which is recorded as the failure."""
        try:
            returned = self._run_app()
            if self._number == 0 and not self._is_stopped:
                self._keep(returned)
        except BaseException as error:
            traceback.print_exc()
            note_error(self._attempt, self._number, error)
            return 1
        return 0

    def _run_app(self) -> JobReturn:
        """Run the app's function and return its result. Raises the exception that the function has raised."""
        # Before Hydra is imported, so that it is the one that the login node has found.
        _find_modules(json.loads(self._files.read(self._files.import_path)))
        from hydra.core.utils import JobStatus

        from hpc_det.sweep.saved import load_app, load_config

        app = load_app(self._files)
        config = load_config(self._files, self._attempt.trial)
        self._stops.set_checkpoint(app.checkpoint)
        returned = self._hydras_job(app, config) if self._number == 0 else _silent_job(app, config)
        has_failed = returned.status is not JobStatus.COMPLETED
        self._stops.end(PEERS_LEFT_S if has_failed and self._world_size > 1 else 0)
        if has_failed:
            raise returned._return_value  # the public property would print a line of Hydra's first
        return returned

    @contextmanager
    def handing_stops_over(self) -> Iterator[bool]:
        """Leave stops to a run inside `hpc_det.core.init`; see hpc_det.distributed.rank_process.Host."""
        with self._stops.handed_over() as is_stopping:
            yield is_stopping
        if self._is_stopped:
            self._stops.end()  # the function has only to return
        else:
            self._stops.catch_up()

    def run_ended(self, outcome: dict[str, Any]) -> None:
        """Take the outcome of a run. Only that of a stopped one is written now: the function may work on after it."""
        self._run_outcome = outcome
        if self._is_stopped and self._number == 0:
            write_json(self._attempt.trial.outcome, outcome)

    @property
    def _is_stopped(self) -> bool:
        """Whether a run inside `hpc_det.core.init` was stopped."""
        return self._run_outcome is not None and self._run_outcome["kind"] != "finished"

    def _hydras_job(self, app: App, config: DictConfig) -> JobReturn:
        """Run the app's function as Hydra's own launchers do, and return its result."""
        from hydra.core.utils import run_job, setup_globals

        setup_globals()
        app.context.callbacks.callbacks.append(self)
        return run_job(
            hydra_context=app.context,
            task_function=app.task_function,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )

    def on_job_start(self, config: DictConfig, **others: object) -> None:
        """Record the output folder for `hpc-det sweep status`. Hydra calls this callback once the folder exists."""
        write_json(self._files.shown(self._attempt.trial.id), {"folder": config.hydra.runtime.output_dir})

    def on_job_end(self, **others: object) -> None:
        """Do nothing: Hydra calls this method on each callback, and warns about a callback that lacks it."""

    def _keep(self, returned: JobReturn) -> None:
        """Write the return value and the outcome, which completes the point."""
        trial, hydra_cfg = self._attempt.trial.id, returned.hydra_cfg
        assert hydra_cfg is not None
        self._files.write(self._files.returned(trial), _pickled(returned))
        found = {"folder": hydra_cfg.hydra.runtime.output_dir, **in_json(returned.return_value)}
        write_json(self._files.shown(trial), found)
        self._write_outcome("finished", self._saves())

    def _note_stop(self, has_saved: bool) -> None:
        """Write the outcome of a stopped point. `has_saved`: whether the app's checkpoint() has returned."""
        if self._number == 0:
            self._write_outcome("stopped", self._saves() + has_saved)

    def _saves(self) -> int:
        """Return how often the app's checkpoint() has returned, in all attempts until now."""
        return int((read_json(self._attempt.trial.outcome) or {}).get("saves", 0))

    def _write_outcome(self, kind: str, saves: int) -> None:
        write_json(
            self._attempt.trial.outcome,
            {
                "attempt": self._attempt.number,
                "steps": saves,
                **(self._run_outcome or {}),
                "kind": kind,
                "saves": saves,
            },
        )


def _find_modules(folders: list[str]) -> None:
    """Put the folders of sys.path on the login node first in this process's sys.path."""
    # Pickles refer to the app's modules by name.
    sys.path[:] = [*folders, *(folder for folder in sys.path if folder not in folders)]


def _silent_job(app: App, config: DictConfig) -> JobReturn:
    """Run the app's function without writing to Hydra's output folder, which belongs to rank 0; return its result."""
    from hydra._internal.callbacks import Callbacks
    from hydra.core.utils import configure_log, run_job, setup_globals
    from hydra.types import HydraContext

    setup_globals()
    config.hydra.output_subdir = None  # else run_job writes the configuration to that folder
    configure_log(None, config.hydra.verbose)  # type: ignore[arg-type]  # None: to stdout
    return run_job(
        hydra_context=HydraContext(config_loader=app.context.config_loader, callbacks=Callbacks()),
        task_function=app.task_function,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
        configure_logging=False,
    )


def _pickled(returned: JobReturn) -> bytes:
    """Return the pickled result of the app. Raises UsageError if it cannot be pickled."""
    import cloudpickle

    try:
        content: bytes = cloudpickle.dumps(returned)
    except Exception as error:
        kind = type(returned.return_value).__name__
        raise UsageError(f"the app's return value, a {kind}, cannot be pickled: {error}; return plain data") from None
    return content


def in_json(value: object) -> dict[str, Any]:
    """Return {"text": repr of `value`}, with the value itself under "value" if it is short and valid JSON."""
    found: dict[str, Any] = {"text": repr(value)[:LONGEST_SHOWN]}
    with suppress(TypeError, ValueError):
        if len(json.dumps(value, allow_nan=False)) <= LONGEST_SHOWN:
            found["value"] = value
    return found


def main() -> int:
    """Run this process as a rank of a point, and return the exit code."""
    process = join_gang(os.environ)
    code = Rank(process, os.environ).run()
    process.report_exit(code)
    return code


if __name__ == "__main__":
    leave(main())
