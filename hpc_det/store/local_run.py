"""A run outside a job: an experiment whose job is the process of a script that the user has started.

experiments/12/local.json                    {"name", "script", "run"}: identify the run when it is started again
               processes/4711-90210@login1   a process that runs the trial, named by its job id (schedulers.local):
                                             {"place"}, its PID namespace; modified every BEAT_S seconds
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_det.errors import UsageError
from hpc_det.node import disk
from hpc_det.node.files import age_s, make_folder
from hpc_det.node.json_files import made, read_map, write_json
from hpc_det.node.process import is_running, process_namespace
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.run_folder import RunFolder, RunKind

BEAT_S = 10.0
"""Seconds between two modifications of the file of a process."""
SILENT_S = 120.0
"""Seconds since the last modification after which a process on another host counts as ended."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """The identity of a run outside a job."""

    name: str
    script: str
    """Path of the script; the working folder for a notebook or an interactive interpreter."""
    run: str | None = None
    """Path of the run folder of a TorchTrainer, `fit` or `tune_run`; None for other scripts."""

    @classmethod
    def of_this_process(cls, name: str | None, *, number: int | None = None) -> Script:
        """Return the identity for the script of this process, with its own name if `name` is None or empty.

        `number`: of the run without a name in this process, from 1; a notebook's runs all have the same name.
        """
        file = getattr(sys.modules["__main__"], "__file__", None)
        if file is None:
            return cls(name=name or "notebook", script=os.getcwd())
        path = Path(file).resolve()
        own_name = path.parent.name if path.stem == "__main__" else path.stem  # __main__: `python -m package`
        numbered = own_name if number in (None, 1) else f"{own_name}-{number}"
        return cls(name=name or numbered, script=str(path))

    def runs(self, store: ExperimentStore) -> Iterator[ExperimentFolder]:
        """Yield the experiments of this script and name, newest first."""
        for experiment in reversed([*store.all()]):
            if is_local(experiment) and experiment.is_own() and script_of(experiment) == self:
                yield experiment


def is_local(experiment: ExperimentFolder) -> bool:
    """Return whether the experiment is a run outside a job."""
    return experiment.local_run.exists()


def script_of(experiment: ExperimentFolder) -> Script:
    """Return the identity of a run outside a job. Raises DamagedFile."""
    return made(Script, read_map(experiment.local_run), experiment.local_run)


def run_of_driver(experiment: ExperimentFolder) -> Path | None:
    """Return the run folder of a TorchTrainer, `fit` or `tune_run`; None for other experiments. Raises DamagedFile."""
    run = script_of(experiment).run if is_local(experiment) else None
    return Path(run) if run else None


def kind_of_run(experiment: ExperimentFolder) -> RunKind:
    """Return what has written the run folder of a driver, by the links to that folder in its experiment."""
    if experiment.search.is_symlink():
        return "tune"
    return "fit" if experiment.trial(1).checkpoints.is_symlink() else "trainer"


def write_script(experiment: ExperimentFolder, script: Script) -> None:
    """Mark the experiment as a run of this script outside a job."""
    write_json(experiment.local_run, asdict(script))


def insist_on_jobs(experiment: ExperimentFolder) -> None:
    """Raise UsageError for a run outside a job, which no command can start."""
    if is_local(experiment):
        script = script_of(experiment)
        raise UsageError(
            f"experiment {experiment.id}: is a run of {script.script} outside a job, which no command can start; start "
            f"the script again: it resumes unless it has finished, and another `name` begins a new run"
        )


def insist_on_resumable(experiment: ExperimentFolder) -> None:
    """Raise UsageError for a temporary run of a TorchTrainer, which a new start of its script does not resume."""
    run = run_of_driver(experiment)
    if run and RunFolder(run).temporary.exists():
        raise UsageError(
            f"experiment {experiment.id}: is a temporary run of a TorchTrainer, which cannot resume; end it with "
            f"`hpc-det experiment kill {experiment.id}`, and pass run=NAME to have one that can"
        )


def resumed_with(experiment: ExperimentFolder, command: str) -> str:
    """Return what resumes an unfinished experiment, for a message.

    `command`: activate or continue, for an experiment that has jobs.
    """
    return "a new start of its script" if is_local(experiment) else f"`hpc-det experiment {command} {experiment.id}`"


# --- processes


class Heartbeat:
    """The file that shows other hosts that this process runs the trial."""

    def __init__(self, experiment: ExperimentFolder, job_id: str) -> None:
        """Create the file, and delete those of processes that have ended."""
        make_folder(experiment.processes)
        for path in experiment.processes.iterdir():
            is_complete = not path.name.startswith(".")
            if is_complete and path.name != job_id and not is_alive(experiment, path.name):
                disk.unlink(path, missing_ok=True)
        self._path = _file_of(experiment, job_id)
        write_json(self._path, {"place": process_namespace()})

    def beat(self) -> None:
        """Modify the file, so that the process counts as alive for SILENT_S seconds."""
        with suppress(OSError):
            os.utime(self._path)

    @contextmanager
    def ends_on_error(self) -> Iterator[None]:
        """Delete the file if the block raises."""
        try:
            yield
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Delete the file."""
        with suppress(OSError):
            disk.unlink(self._path, missing_ok=True)


def is_alive(experiment: ExperimentFolder, job_id: str) -> bool:
    """Return whether the process with this job id runs the trial; on another host, by the age of its file."""
    path = _file_of(experiment, job_id)
    found = read_map(path, {"place": str})
    if found is None:
        return False
    if found["place"] != process_namespace():
        return age_s(path) < SILENT_S
    pid, _, ticks = job_id.partition("@")[0].partition("-")
    return is_running(int(pid), int(ticks))


def _file_of(experiment: ExperimentFolder, job_id: str) -> Path:
    return experiment.processes / job_id
