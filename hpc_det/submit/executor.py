"""Submits job scripts with submitit, as its executor and plugin host.

submitit's pickle contains only an instance of RunScript, and the job does not read it: the script starts the agents
directly. So `sbatch` with the same script starts the same job, compute nodes unpickle nothing, and submitit's
checkpointing in a signal handler is not used.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from submitit.core import core, utils

from hpc_det.schedulers.scheduler import (
    CommandError,
    JobState,
    Scheduler,
    Submission,
    outside_any_job,
    refusal,
    run_command,
    scheduler,
)


@dataclass(frozen=True)
class RunScript:
    """A picklable function object that runs the script and returns its exit code."""

    script: str

    def __call__(self) -> int:
        return subprocess.call(["/bin/bash", self.script])


class _Watcher(core.InfoWatcher):
    """A submitit watcher that queries hpc_det's scheduler for the state of jobs."""

    def __init__(self, chosen: Scheduler) -> None:
        super().__init__()
        self._scheduler = chosen

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        state = self._scheduler.status([job_id], run_command)[job_id].state
        return "COMPLETED" if state is JobState.ENDED else state.name


class GangExecutor(core.PicklingExecutor):
    """An executor that submits one rendered script to any scheduler."""

    def __init__(self, folder: Path, scheduler_name: str, submission: Submission) -> None:
        self._scheduler = scheduler(scheduler_name)
        self._submission = submission
        self.job_class = type("GangJob", (core.Job,), {"watcher": _Watcher(self._scheduler)})
        super().__init__(folder)

    def submit_script(self) -> str:
        """Submit the script and return the job id. Raises CommandError if the scheduler refuses it; no job is queued
        then.
        """
        with submission():
            return str(self.submit(RunScript(self._submission.script)).job_id)

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        raise NotImplementedError("the script is rendered already; change the plan")

    def _num_tasks(self) -> int:
        return 1

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return Path(self._submission.script).read_text(encoding="utf-8")

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return self._scheduler.submit_command(replace(self._submission, script=str(submission_file_path)))

    def _get_job_id_from_submission_command(self, string: bytes | str) -> str:  # type: ignore[override]
        return self._scheduler.parse_submit(string if isinstance(string, str) else string.decode())


@contextlib.contextmanager
def submission() -> Iterator[None]:
    """Prepare the environment for submitit's call of sbatch or qsub, and convert its errors to CommandError."""
    said = io.StringIO()
    try:
        with _outside_any_job(), contextlib.redirect_stderr(said):
            yield
    except FileNotFoundError as missing:
        raise CommandError(
            f"{missing.filename}: not found on PATH; run this on a login node of the cluster, or choose --cluster local"
        ) from None
    except (utils.FailedJobError, ValueError) as refused:
        answer = str(refused).strip() or said.getvalue().strip()
        remedy = next((f"; {text}" for pattern, text in _REMEDIES if re.search(pattern, answer, re.IGNORECASE)), "")
        raise refusal(f"the scheduler refused the job: {answer}{remedy}", answer) from None


_REMEDIES = (
    ("invalid account", "set resources.account, or `account` in the cluster profile, to one of your accounts"),
    ("invalid qos", "set resources.qos, or `qos` in the cluster profile, to one that you may use"),
    ("invalid feature", "set resources.constraint to features that nodes have: `sinfo -o '%N %f'` lists them"),
    (
        "memory specification",
        "set resources.memory_per_slot to what the nodes have: `sinfo -o '%N %m'` lists it in MiB",
    ),
    ("unknown resource", "the site defines no such resource: correct resources.constraint or `qos_resource`"),
    ("invalid partition|unknown queue", "set resources.resource_pool to one that the site has"),
    ("requested time limit|walltime", "set resources.time_limit to what the partition or queue allows"),
)
"""Remedies for errors of sbatch (slurm_errno.c) and qsub (pbs_error.h), by a pattern of their text."""


@contextlib.contextmanager
def _outside_any_job() -> Iterator[None]:
    """Remove the variables of an enclosing job from os.environ in this block: submitit has no parameter for it."""
    before = dict(os.environ)
    _set_environment(outside_any_job(before))
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(wanted: Mapping[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)
