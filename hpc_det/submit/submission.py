"""plan -> script -> job id. A dry run is the same code without the last call."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hpc_det.config.secrets import masked
from hpc_det.errors import UsageError
from hpc_det.plan.job_plan import JobPlan
from hpc_det.plan.planner import plan_trial
from hpc_det.search.single import trial_seed
from hpc_det.store.files import write_atomic, write_json
from hpc_det.store.folders import ExperimentFolder, ExperimentStore
from hpc_det.submit.command import run_command
from hpc_det.submit.render import render
from hpc_det.submit.scheduler import scheduler
from hpc_det.submit.snapshot import copy_snapshot, snapshot_files

if TYPE_CHECKING:
    from hpc_det.config.effective import Effective


@dataclass(frozen=True)
class Submission:
    """All that a job needs, not yet anywhere."""

    plan: JobPlan
    script: str
    files: list[Path]
    """The snapshot, relative to the context directory."""


def prepare(effective: Effective, folder: ExperimentFolder) -> Submission:
    """Touches neither scheduler nor disk. Raises UsageError with all that is wrong."""
    _check_path("HPC_DET_ROOT", str(folder.path))
    _check_path("the Python that runs hpc-det", sys.executable)
    plan = plan_trial(effective.experiment, effective.cluster, folder, python=sys.executable)
    return Submission(plan=plan, script=render(plan), files=snapshot_files(effective.context_dir))


def submit(effective: Effective, store: ExperimentStore) -> ExperimentFolder:
    """The new experiment, queued. Where anything fails, nothing of it is left, on disk or in the queue."""
    prepare(effective, store.folder(store.next_id()))
    folder = store.create()
    job_id = None
    try:
        plan = _write(effective, folder)
        job_id = _queue(plan, folder)
        write_json(folder.trial().job, {"job_id": job_id, "scheduler": plan.scheduler, "submitted": time.time()})
        # The config comes last: a folder without it was never created.
        write_atomic(folder.config, yaml.safe_dump(masked(effective.tree), sort_keys=False, allow_unicode=True))
    except BaseException:
        if job_id is not None:
            scheduler(plan.scheduler).cancel(job_id, run_command)
        folder.remove()
        raise
    return folder


def _check_path(what: str, path: str) -> None:
    """A path reaches the script, where a control character would end a line, and submitit, which replaces patterns."""
    if found := re.search("%[jAat]|[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029]", path):
        raise UsageError(f"{what}: {path!r} holds {found[0]!r}, which no job script can; choose another folder")


def _write(effective: Effective, folder: ExperimentFolder) -> JobPlan:
    submission = prepare(effective, folder)
    trial = folder.trial()
    for needed in (trial.path, trial.logs, trial.checkpoints, folder.submitit):
        needed.mkdir(mode=0o700, parents=True)
    copy_snapshot(effective.context_dir, submission.files, folder.code)
    write_json(folder.origin, effective.origins)
    write_json(trial.trial, _trial_spec(effective, submission.plan))
    write_atomic(trial.plan, submission.plan.to_json())
    write_atomic(trial.script, submission.script)
    return submission.plan


def _trial_spec(effective: Effective, plan: JobPlan) -> dict[str, Any]:
    """What the ranks need beside the plan. The seed defaults to the time of submission, as upstream's does."""
    reproducibility = effective.tree["reproducibility"]
    if reproducibility["experiment_seed"] is None:
        reproducibility["experiment_seed"] = int(time.time())
    return {
        "experiment_id": plan.experiment_id,
        "trial_id": plan.trial_id,
        "trial_seed": trial_seed(reproducibility["experiment_seed"], plan.trial_id),
        "hparams": effective.experiment.hparams,
        "config": effective.tree,
    }


def _queue(plan: JobPlan, folder: ExperimentFolder) -> str:
    from hpc_det.submit.executor import GangExecutor  # submitit loads for a real submission only

    return GangExecutor(folder.submitit, plan.scheduler, folder.trial().script).submit_script()
