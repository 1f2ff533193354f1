"""Creates an experiment: its folder with everything that its jobs need, and its jobs in the queue.

A dry run uses the same code without the last calls. Checkpoints outside the experiment's own folder are stored in a
folder `NUMBER-XXXXXXXX` below checkpoint_storage, with eight random digits: several users and state roots may share a
file system or a bucket, and the number of a deleted experiment may be used again.
"""

from __future__ import annotations

import fnmatch
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_det.checkpoint.committed import Committed, committed, lacks_files, newest_good
from hpc_det.config.entrypoint import Context, started_file, trial_of, words_of
from hpc_det.config.merge import Tree
from hpc_det.config.plain_yaml import dump_yaml
from hpc_det.config.secrets import masked, masked_profile
from hpc_det.config.storage import SharedFs, store_url
from hpc_det.errors import UsageError, pip_install
from hpc_det.node.files import PRIVATE_FOLDER, make_folder, write_atomic
from hpc_det.node.json_files import write_json
from hpc_det.plan.container import checkpoint_folder
from hpc_det.search.by_name import search_of
from hpc_det.search.custom import CustomSearch
from hpc_det.search.journal import SearchJournal
from hpc_det.search.optuna_study import no_such_sampler, sampler_names
from hpc_det.search.state import best_trial
from hpc_det.store.attempt import HOOK
from hpc_det.store.experiment_config import write_secrets
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.group import Group
from hpc_det.store.submitting import Unsettled, submitting
from hpc_det.submit.jobs import Jobs, prepare_jobs, queue_jobs, write_jobs
from hpc_det.submit.snapshot import Snapshot, copy_snapshot, git_state, left_out, snapshot_of

if TYPE_CHECKING:
    from hpc_det.plan.effective import Effective

_LIBRARIES = {"s3": "s3fs", "gcs": "gcsfs", "azure": "adlfs"}
"""The package that fsspec needs for each type of object store."""
WEIGHTS = ("*state_dict.pth", "*shard-*.pth", "*/small-files.zip", "engines.json", "model[0-9]*/*")
"""Patterns of the checkpoint files that contain weights, of a PyTorchTrial and of a DeepSpeedTrial."""


@dataclass(frozen=True)
class Submission:
    """Everything that an experiment needs, before it is written."""

    trials: int
    """Number of trials, without replacements of invalid ones."""
    jobs: Jobs
    code: Snapshot
    """The content of the code's copy; empty for live code."""
    source: Path | None
    """The checkpoint whose weights all trials start with; None: none."""


def prepare(effective: Effective, folder: ExperimentFolder, *, is_live: bool = False) -> Submission:
    """Return everything that the experiment needs. Calls no scheduler, and writes nothing to disk.

    Raises UsageError with all problems. `is_live`: jobs import the context directory itself, without a copy.
    """
    trials = trials_expected(effective)
    check_storage(effective)
    code = Snapshot() if is_live else snapshot_of(effective.context)
    if not is_live:
        _insist_on_started_file(effective, code)
    jobs = prepare_jobs(effective, folder, trials, startup_hook=_has_hook(code, effective.context))
    source = source_checkpoint(effective.tree["searcher"], ExperimentStore(folder.root()))
    return Submission(trials, jobs, code, source)


def _insist_on_started_file(effective: Effective, code: Snapshot) -> None:
    """Raise UsageError if the copy lacks the script or the module of the trial that the entrypoint names.

    A startup hook may write the file, and a trial may be part of an installed package or of a container.
    """
    file = started_file(effective.tree["entrypoint"], effective.context)
    if file is None or str(file) in code.files.values() or HOOK in code.files:
        return
    trial = trial_of(words_of(effective.tree["entrypoint"]))
    if trial is None or not (effective.tree["environment"]["image"] or find_spec(trial[0].partition(".")[0])):
        raise UsageError(f"entrypoint: {file} is not copied for the job, since .detignore names it; remove the pattern")


def _has_hook(code: Snapshot, context: Context) -> bool:
    """Return whether the code contains a startup hook. Raises UsageError for one that bash cannot source."""
    hook = context.path(HOOK)
    if HOOK not in code.files:
        is_link = hook.is_symlink() and not left_out(hook.parent)(HOOK)
        if is_link or Path(HOOK) in code.folders:
            what = f"a link to {hook.readlink()}, which does not exist" if is_link else "a folder"
            raise UsageError(
                f"{hook}: is {what}, so bash cannot source it before the entrypoint; replace it by a file, or name it "
                f"in .detignore"
            )
        return False
    text = hook.read_bytes()
    if 2 * text.count(b"\r\n") > text.count(b"\n"):  # a single one may be part of a text between two lines
        raise UsageError(
            f"{hook}: has Windows line ends (CRLF), which bash takes for a part of each command; convert it: "
            f"sed -i 's/\\r$//' {shlex.quote(str(hook))}"
        )
    return True


def submit(
    effective: Effective,
    store: ExperimentStore,
    live: Callable[[ExperimentFolder], None] | None = None,
    group: Group | None = None,
    *,
    paused_by: str | None = None,
) -> ExperimentFolder:
    """Create and queue a new experiment.

    If this fails before jobs are queued, the experiment is deleted. If the scheduler stops answering and may have
    queued jobs, Unsettled is raised, and the experiment is kept.

    `live`: jobs import the context directory itself, not a copy; this function is called to add files to the
    experiment's folder. `group`: the users who may read the experiment, beside its owner. `paused_by`: the user who
    wants it to be created paused, without jobs until `activate`.
    """
    submission = prepare(effective, store.folder(store.next_id()), is_live=live is not None)
    folder, queued = store.create(group), list[str]()
    try:
        with submitting(folder):
            # Planned again: another process may have taken the number, so the folder may be another one.
            has_hook = submission.jobs.plan.startup_hook
            jobs = prepare_jobs(effective, folder, submission.trials, startup_hook=has_hook)
            _write(replace(submission, jobs=jobs), effective, folder, is_live=live is not None)
            if live:
                live(folder)
            # The configuration is written last: with it, the experiment is listed, before jobs are submitted.
            write_config(folder, effective.tree, effective.origins)
            if paused_by:
                SearchJournal(folder).pause(paused_by)
            else:
                queue_jobs(jobs, folder, SearchJournal(folder), queued)
    except Unsettled:  # jobs may be queued, so the folder stays
        raise
    except BaseException as error:
        if queued:
            end = f"`hpc-det experiment kill {folder.id}`"
            print(f"hpc-det: experiment {folder.id} is queued nevertheless; {end} ends it", file=sys.stderr)
        else:
            folder.remove()
            if isinstance(error, KeyboardInterrupt):
                said = f"interrupted before a job was queued; experiment {folder.id} was removed"
                print(f"hpc-det: {said}", file=sys.stderr)
        raise
    return folder


def trials_expected(effective: Effective) -> int:
    """Return the number of trials. Raises UsageError for a search that would otherwise fail only when a
    worker starts.
    """
    method, _ = search_of(effective.tree, effective.points or [], effective.searchers_code())
    expected, searcher = method.trials_expected, effective.tree["searcher"]
    if isinstance(method, CustomSearch):
        if method.problem:
            raise UsageError(method.problem)
        if expected < 1:
            raise UsageError(
                f"searcher.class: {searcher['class']}: trials_expected is {expected}; it must be at least 1"
            )
    if searcher["name"] == "optuna" and not effective.points:
        _check_optuna(searcher["sampler"])
    return expected


def _check_optuna(sampler: str) -> None:
    """Raise UsageError if Optuna is not installed, or has no such sampler."""
    found = find_spec("optuna")  # not imported, which takes a second
    if found is None or found.origin is None:
        raise UsageError(
            f"searcher.name: optuna is not installed for {sys.executable}; run {pip_install('hpc_det[optuna]')}"
        )
    names = sampler_names(Path(found.origin).parent)
    if names and ":" not in sampler and sampler not in names:
        raise UsageError(no_such_sampler(sampler, names))


def write_effective(folder: ExperimentFolder, tree: Tree) -> None:
    """Write the effective configuration, and a copy with masked secrets."""
    write_secrets(folder.effective, tree, masked(tree))


def write_config(folder: ExperimentFolder, tree: Tree, origins: dict[str, str]) -> None:
    """Write the configuration for people, with masked secrets, and the origin of each value."""
    write_json(folder.origin, origins)
    write_atomic(folder.config, dump_yaml(masked(tree)))


def _write(submission: Submission, effective: Effective, folder: ExperimentFolder, *, is_live: bool) -> None:
    """Write all files of the experiment except the configuration for people."""
    for needed in (folder.search, folder.jobs):
        make_folder(needed)
    folder.submitit.mkdir(mode=PRIVATE_FOLDER)  # it contains copies of the scripts
    if is_live:
        folder.code.symlink_to(effective.context_dir, target_is_directory=True)
    else:
        copy_snapshot(submission.code, folder.code)
        _note_commit(effective.context_dir, submission.code, folder)
    profile = effective.cluster.model_dump(mode="json", by_alias=True)
    write_secrets(folder.cluster, profile, masked_profile(profile))
    write_effective(folder, _with_seed(effective))
    if effective.points:
        write_secrets(folder.points, effective.points, [masked(point) for point in effective.points])
    if submission.source:
        write_json(folder.warm_start, {"checkpoint": str(submission.source)})
    write_jobs(submission.jobs, folder)
    make_storage(effective, folder)


def _note_commit(context_dir: Path, code: Snapshot, folder: ExperimentFolder) -> None:
    """Record the state of the code in git."""
    other = ExperimentFolder(context_dir.parent)
    # The code of a forked experiment is a copy without a repository, so the state recorded there is used.
    # effective.json distinguishes it from a user's own folder, which may also have an experiment.yaml beside the code.
    if other.effective.exists() and context_dir == other.submitted_code():
        for before, now in ((other.git, folder.git), (other.git_diff, folder.git_diff)):
            if before.exists():
                write_atomic(now, before.read_bytes())
    elif state := git_state(
        context_dir, [place for place in code.files if code.files[place] == os.path.join(context_dir, place)]
    ):
        write_json(folder.git, state.as_json())
        write_atomic(folder.git_diff, state.diff)


def _with_seed(effective: Effective) -> Tree:
    """Return the configuration with a seed: by default the time of submission, as in Determined."""
    reproducibility = effective.tree["reproducibility"]
    if reproducibility["experiment_seed"] is None:
        reproducibility["experiment_seed"] = int(time.time())
    return effective.tree


def check_storage(effective: Effective) -> None:
    """Raise UsageError if checkpoints could not be stored. A remote store is not contacted."""
    problems = [*_missing_libraries(effective), *_folder_problems(effective)]
    if problems:
        raise UsageError(problems)


def make_storage(effective: Effective, experiment: ExperimentFolder) -> None:
    """Record the experiment's place in the checkpoint store, and create it if it is a folder. Raises UsageError."""
    name = f"{experiment.id}-{os.urandom(4).hex()}"
    if url := store_url(effective.experiment.checkpoint_storage):
        write_json(experiment.storage, {"url": f"{url}/{name}"})
    if folder := checkpoint_folder(effective.experiment, effective.cluster):
        write_json(experiment.storage, {"folder": str(folder / name)})
        try:
            experiment.make_elsewhere(folder / name)
        except OSError as error:
            raise UsageError(f"checkpoint_storage: {folder / name} cannot be created: {error.strerror}") from None


def _missing_libraries(effective: Effective) -> Iterator[str]:
    kind = effective.experiment.checkpoint_storage.type
    missing = [name for name in ("fsspec", _LIBRARIES.get(kind or "")) if name and find_spec(name) is None]
    if kind in _LIBRARIES and missing:
        yield (
            f"checkpoint_storage.type: {kind!r} needs {' and '.join(missing)}, which {sys.executable} does not have; "
            f"run {pip_install(f'hpc_det[{kind}]')}"
        )


def _folder_problems(effective: Effective) -> Iterator[str]:
    """Yield a message if the checkpoint folder does not exist or is not writable."""
    folder = checkpoint_folder(effective.experiment, effective.cluster)
    if folder is None:
        return
    storage = effective.experiment.checkpoint_storage
    key = "host_path" if isinstance(storage, SharedFs) else "container_path"
    # Only storage_path is created if it does not exist.
    base = Path(storage.host_path) if isinstance(storage, SharedFs) else folder
    there = next((path for path in (folder, *folder.parents) if path.exists()), base)
    if not base.is_dir() or not there.is_dir():
        wrong = base if not base.is_dir() else there
        yield (
            f"checkpoint_storage.{key}: {str(wrong)!r} is not a folder on this machine; name one that this machine and "
            f"all nodes can access, since both read checkpoints"
        )
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"checkpoint_storage.{key}: {str(there)!r} is not writable; name a folder that you may write to"


def source_checkpoint(searcher: Mapping[str, Any], store: ExperimentStore) -> Path | None:
    """Return the folder of the checkpoint that `source_trial_id` or `source_checkpoint_uuid` names; None without
    either.

    For a trial, it is the latest checkpoint, as in Determined. Raises UsageError if there is none.
    """
    try:
        if name := searcher.get("source_trial_id"):
            return _latest(_trial(name, store))
        uuid = searcher.get("source_checkpoint_uuid")
        return _of_uuid(uuid, store) if uuid else None
    except UsageError as error:
        key = "source_trial_id" if searcher.get("source_trial_id") else "source_checkpoint_uuid"
        raise UsageError([f"searcher.{key}: {problem}" for problem in error.problems]) from None


def _trial(name: str, store: ExperimentStore) -> TrialFolder:
    """Return the trial's folder. `name`: "12/3", or "12" for the best trial of experiment 12."""
    number, _, trial = name.partition("/")
    experiment = store.existing(int(number))
    known = [begun.id for begun in experiment.trials()]
    if not known:
        raise UsageError(f"experiment {number}: none of its trials has started")
    found = int(trial) if trial else _best(experiment) or known[0]
    if found not in known:
        raise UsageError(f"{name}: experiment {number} has no trial {found}; it has {', '.join(map(str, known))}")
    return experiment.trial(found)


def _best(experiment: ExperimentFolder) -> int | None:
    """Return the number of the best trial; None if no trial has reported a finite value."""
    search = SearchJournal(experiment)
    best = best_trial(search.new(), search.searcher)
    return best.trial if best else None


def _latest(trial: TrialFolder) -> Path:
    """Return the folder of the trial's latest undamaged checkpoint. Raises UsageError if there is none."""
    found, skipped = newest_good(trial.checkpoints)
    if found is None:
        name = f"{trial.experiment().id}/{trial.id}"
        raise UsageError([*skipped, f"trial {name} has no checkpoint; name a trial that has one"])
    return found.path


def _of_uuid(uuid: str, store: ExperimentStore) -> Path:
    """Return the folder of the checkpoint with this UUID. Raises UsageError if no experiment below the root has it."""
    for experiment in store.all():
        for trial in experiment.trials():
            found = (checkpoint for checkpoint in committed(trial.checkpoints) if checkpoint.uuid == uuid)
            if checkpoint := next(found, None):
                _insist_on_weights(checkpoint, experiment)
                return checkpoint.path
    raise UsageError(
        f"no experiment below {store.root} has a checkpoint {uuid!r}; `hpc-det experiment "
        "list-checkpoints ID` shows those of an experiment"
    )


def _insist_on_weights(checkpoint: Committed, experiment: ExperimentFolder) -> None:
    """Raise UsageError if the checkpoint is damaged or its weights were deleted."""
    if any(fnmatch.fnmatch(name, pattern) for name in checkpoint.removed for pattern in WEIGHTS):
        raise UsageError(
            f"{checkpoint.path} {lacks_files(checkpoint)}; name one with weights: "
            f"`hpc-det experiment list-checkpoints {experiment.id}` shows which are COMPLETED"
        )
    if damage := checkpoint.damage():
        raise UsageError([f"{checkpoint.path}: damaged: {problem}" for problem in damage])
