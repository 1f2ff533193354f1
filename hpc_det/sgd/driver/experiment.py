"""The experiment of a run of TorchTrainer, `fit` or `tune_run`, through which commands list, show, stop and delete it.

The driver takes the place of a job, as the process of a script outside a job does (hpc_det.core.local_run). The run
folder keeps what a restarted program continues from; `experiment.json` in it names the experiment.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_det.errors import HpcDetError, UsageError
from hpc_det.node.files import make_folder
from hpc_det.node.json_files import DamagedFile, read_map, write_json
from hpc_det.plan.local_experiment import Arguments, GangSize, write_config_for_people, write_plan_and_config
from hpc_det.schedulers.local import JobId
from hpc_det.store.attempt import Attempt
from hpc_det.store.experiments import ExperimentStore, is_in_sight, state_root
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.local_run import BEAT_S, SILENT_S, Heartbeat, Script, is_alive, run_of_driver, write_script
from hpc_det.store.metrics import in_json
from hpc_det.store.run_folder import RunFolder
from hpc_det.store.submitting import record_job, submitting, unused_job

log = logging.getLogger("hpc_det.sgd")

AGAIN = "start the program again with the same run to resume"
POLL_S = 1.0
"""Seconds between two looks for a stop request, as in a node agent."""
_is_part = ContextVar("_is_part", default=False)
"""Whether drivers that start now are parts of an experiment that exists already."""


@contextmanager
def part_of_an_experiment() -> Iterator[None]:
    """In this block, drivers that start belong to the current experiment and create none."""
    before = _is_part.set(True)
    try:
        yield
    finally:
        _is_part.reset(before)


def has_own_experiment(env: Mapping[str, str]) -> bool:
    """Return whether a driver that starts now gets an experiment: it is not a part of one, such as a trial."""
    return not (_is_part.get() or Attempt.is_in(env))


def named(run: str | os.PathLike[str] | None) -> str | None:
    """Return the name of the experiment of a run: that of the run, or None for the name of the script."""
    return None if run is None else Path(os.fspath(run)).name or None


@dataclass(frozen=True, kw_only=True)
class Description:
    """Fields of an experiment that describe a run."""

    name: str | None
    """None: the name of the script."""
    hparams: Mapping[str, Any]
    """Values that JSON cannot represent are shown as text."""
    sections: Mapping[str, Any]
    """Sections of the configuration of an experiment, such as `searcher`."""
    size: GangSize


class DriverExperiment:
    """The experiment of a run, while this process is its driver."""

    def __init__(
        self, run: Path, about: Description, *, workers: int = 1, link: Callable[[ExperimentFolder], None]
    ) -> None:
        """Open the experiment of the run, or create one.

        `workers`: number of the workers of its search; `link` completes the folder of a new experiment. Raises
        UsageError or OSError if the experiment cannot be created.
        """
        self.job_id = str(JobId.of(os.getpid()))
        script = Script.of_this_process(about.name)
        script = Script(name=script.name, script=script.script, run=str(run))
        self._arguments = Arguments.of_driver(script.name, in_json(dict(about.hparams)), about.sections)
        self._size = about.size
        self._over = threading.Event()
        found = experiment_of(run)
        self.folder = found or ExperimentStore(state_root(os.environ)).create()
        if found:
            self._open(workers)
        else:
            self._create(run, script, workers, link)

    def _create(self, run: Path, script: Script, workers: int, link: Callable[[ExperimentFolder], None]) -> None:
        """Complete the folder of a new experiment; if that fails, remove it."""
        try:
            with submitting(self.folder):  # so that a listing removes the folder if this process is killed here
                make_folder(self.folder.jobs)
                link(self.folder)
                write_script(self.folder, script)
                write_json(RunFolder(run).experiment, {"experiment": self.folder.id}, private=True)
                self._open(workers)
        except BaseException:
            self.folder.remove()
            raise

    def _open(self, workers: int) -> None:
        """Record this process as the job of the experiment; from then on commands list it."""
        self._heartbeat = Heartbeat(self.folder, self.job_id)
        with self._heartbeat.ends_on_error():
            write_plan_and_config(self.folder, self._arguments, self._size)
            record_job(self.folder, unused_job(self.folder), self.job_id, "local", first=0, workers=workers)
            write_config_for_people(self.folder, self._arguments)

    def watch(self, look: Callable[[], None]) -> None:
        """Start a thread that shows that this process is alive, and calls `look` every POLL_S seconds, until `end`."""
        threading.Thread(target=self._watch, args=(look,), name="stop-requests", daemon=True).start()

    def _watch(self, look: Callable[[], None]) -> None:
        beaten = time.monotonic()
        while not self._over.wait(POLL_S):
            with suppress(OSError, DamagedFile):
                look()
            if time.monotonic() - beaten >= BEAT_S:
                self._heartbeat.beat()
                beaten = time.monotonic()

    def end(self) -> None:
        """End the thread, and show that this process drives the run no more."""
        self._over.set()
        self._heartbeat.end()


def experiment_of(run: Path) -> ExperimentFolder | None:
    """Return the experiment of a run; None if it has none, or if that was deleted."""
    with suppress(DamagedFile):
        noted = (read_map(RunFolder(run).experiment) or {}).get("experiment")
        if isinstance(noted, int):
            found = ExperimentStore(state_root(os.environ)).folder(noted)
            if is_in_sight(found) and found.is_own() and run_of_driver(found) == run:
                return found
    return None


def insist_on_no_other_driver(run: Path, *, within_s: float = SILENT_S) -> None:
    """Wait for the end of a driver of this run on another host, which may have been killed.

    Raises UsageError if it still shows that it is alive after `within_s` seconds.
    """
    experiment, end = experiment_of(run), time.monotonic() + within_s
    while experiment and (other := _driver_elsewhere(experiment)):
        if time.monotonic() > end:
            raise UsageError(
                f"{run}: process {other} runs this search; wait for its end, end it with `hpc-det experiment kill "
                f"{experiment.id}`, or name another run"
            )
        log.warning("%s: process %s runs this search, or was killed: waiting for its end", run, other)
        time.sleep(min(BEAT_S, max(end - time.monotonic(), POLL_S)))


def _driver_elsewhere(experiment: ExperimentFolder) -> str | None:
    """Return the job id of a driver on another host that shows that it is alive, or None."""
    with suppress(FileNotFoundError):
        names = [path.name for path in experiment.processes.iterdir() if not path.name.startswith(".")]
        here = socket.gethostname()
        return next((name for name in names if JobId.parse(name).host != here and is_alive(experiment, name)), None)
    return None


def opened_experiment(
    run: Path, about: Description, *, workers: int = 1, link: Callable[[ExperimentFolder], None]
) -> DriverExperiment | None:
    """Return the experiment of the run; None, with a warning, if it cannot be written: the run does not need it."""
    try:
        return DriverExperiment(run, about, workers=workers, link=link)
    except (HpcDetError, OSError) as error:
        log.warning("%s: commands such as `hpc-det experiment list` do not show this run: %s", run, error)
        return None
