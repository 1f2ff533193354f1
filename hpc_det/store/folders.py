"""The names of all files of an experiment, with their content and their writers.

experiments/12/experiment.yaml   the effective config           `hpc-det experiment create`
               effective.json    the same, for programs         "
               origin.json       the origin of each key         "
               cluster.json      the cluster's profile          "
               points.json       the listed trials              " (of a multirun or sweep)
               warm_start.json   the source of initial weights  " (with a searcher.source_...)
               plan.json         the plan of its jobs           "
               storage.json      the place of its checkpoints   " (if not in the trials' folders)
               submitting.json   the process that submits jobs  that process
               settling.json     the process that completes an  that process
                                 interrupted submission
               about.json        its name, labels, and more     `hpc-det experiment set`, label, archive
               masked/           copies of the files above with `hpc-det experiment create` (if it is shared)
                                 secrets, without the secrets
               code/             the code that jobs import      "
               git.json, git.diff its commit, and the changes   " (of a git repository)
                                 that are not committed
               notified/         notifications that were sent   the process that sent them
               submitit/         submitit's own files           `hpc-det experiment create`
               jobs/1.sh, 1.json a script, and the job's id     "
               jobs/1.array.json the workers of its jobs        "
               jobs/1-0.next.json the jobs that wait for its end the job
               jobs/1.log        the output of its jobs         the jobs
               jobs/1.times      the index of that log, as      "
                                 beside each log
               search/           the search's journal           all workers
               local.json        its name and script            a run outside a job
               processes/        a file per process             "
               logs_deleted      the time of deleting its logs  `experiment cleanup`
               sweep/            of a Hydra app: see hpc_det.sweep.files
               trials/1/         one TrialFolder
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_det.node import disk
from hpc_det.node.disk import remove_abandoned
from hpc_det.node.files import flush_folder, is_own, is_shared, make_folder, make_private, share_alike
from hpc_det.node.json_files import read_map
from hpc_det.store.group import Group, name_of_user


@dataclass(frozen=True)
class TrialFolder:
    """The files of one trial. Each has one writer: the trial's worker for the journal, rank 0 for the metrics."""

    path: Path

    @property
    def trial(self) -> Path:
        """The configuration of the ranks: ids, seed, hyperparameters, the effective config."""
        return self.path / "trial.json"

    @property
    def stop(self) -> Path:
        """The stop request, written by a node agent, the job or a command; see store.attempt.request_stop."""
        return self.path / "stop.json"

    @property
    def outcome(self) -> Path:
        """The result of an attempt, written by rank 0 just before it exits."""
        return self.path / "outcome.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def live_progress(self) -> Path:
        """The batches that an attempt has trained since its last report, written by the agent of node 0."""
        return self.path / "progress.json"

    @property
    def groups(self) -> Path:
        """The reports of metrics that are neither of training nor of validation, written by rank 0."""
        return self.path / "groups.jsonl"

    @property
    def run_metadata(self) -> Path:
        """Facts about the trial that its script has set: `train.set_metadata` of Determined's Core API."""
        return self.path / "metadata.json"

    @property
    def checkpoints(self) -> Path:
        """A folder, or a symbolic link to a folder outside of the experiment."""
        return self.path / "checkpoints"

    def checkpoint_metadata(self, uuid: str) -> Path:
        """Return the file with the metadata that users have added to a checkpoint: see hpc_det.checkpoint.metadata."""
        return self.path / "checkpoint-metadata" / f"{uuid}.json"

    @property
    def saves(self) -> Path:
        """The duration of each save, written by rank 0: see hpc_det.store.save_times."""
        return self.path / "saves.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Event files and profiler traces of rank 0; those of a rank R above 0 are in the subfolder rank-R."""
        return self.path / "tensorboard"

    @property
    def loggers(self) -> Path:
        """A folder for each logger (hpc_det.core.loggers), with its files and, offline, its runs; written by rank 0."""
        return self.path / "loggers"

    def logger_calls(self, kind: str) -> Path:
        """Return the journal of what the logger of this kind has sent, written by rank 0."""
        return self.loggers / f"{kind}.jsonl"

    @property
    def outputs(self) -> Path:
        """The outputs of a batch inference: see hpc_det.pytorch.inference.output_folder. Retention keeps them."""
        return self.path / "outputs"

    @property
    def profile(self) -> Path:
        """Measurements of its training: see hpc_det.pytorch.profiling."""
        return self.path / "profile"

    def timings(self, rank: int) -> Path:
        """Return the file with the timings of a rank, written by that rank."""
        return self.profile / f"timings-{rank}.jsonl"

    def system_metrics(self, node: int) -> Path:
        """Return the file with the system metrics of a node, written by its first rank."""
        return self.profile / f"system-{node}.jsonl"

    def resume_trace(self, rank: int) -> Path:
        """Return the file with the state of a rank before each batch, for `experiment verify-resume`.

        Written by that rank.
        """
        return self.path / "resume-check" / f"rank-{rank}.jsonl"

    @property
    def resume_stops(self) -> Path:
        """The file of the stops and resumes of a script by `experiment verify-resume`, written by rank 0.

        {"batch": batches at a stop} or {"resumed": batches from which an attempt resumed} in each line.
        """
        return self.path / "resume-check" / "stops.jsonl"

    @property
    def id(self) -> int:
        return int(self.path.name)

    def create(self) -> None:
        """Create the folders of the trial, with the permissions of the experiment. Several processes may call this."""
        for folder in (self.path.parent, self.path, self.logs):
            make_folder(folder)
            flush_folder(folder.parent)
        elsewhere = self.experiment().checkpoints_elsewhere()
        if elsewhere is None:
            make_folder(self.checkpoints)
            return
        self.experiment().make_elsewhere(elsewhere)  # a scratch folder may have been cleaned up
        make_folder(elsewhere / self.path.name)
        with suppress(FileExistsError):  # created by an earlier attempt
            disk.symlink(self.checkpoints, elsewhere / self.path.name)

    def remove_abandoned(self) -> None:
        """Delete incomplete files that killed processes have left in the folders of the trial and of its experiment."""
        of_attempts = [*self.path.glob("attempt-*"), *self.path.glob("attempt-*/failures")]
        remove_abandoned([self.path, self.checkpoints, *of_attempts, *self.experiment().written_by_many()])

    def experiment(self) -> ExperimentFolder:
        return ExperimentFolder(self.path.parent.parent)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def job_log(self) -> Path:
        """The output of the job process, the agents and the launchers for this trial; one file for all attempts."""
        return self.logs / "job.log"

    def rendezvous(self, attempt: int) -> Path:
        """Return the file with the rendezvous address of an attempt, written by the agent of node 0."""
        return self.path / f"attempt-{attempt}" / "rendezvous.json"

    def nodes(self, attempt: int) -> Path:
        """Return the file with the scheduler's names of the hosts by node rank, written by the agent of node 0."""
        return self.path / f"attempt-{attempt}" / "nodes.json"

    def compilation(self, attempt: int) -> Path:
        """Return the file with the times of an attempt's last compilation of a DeepSpeed op, written by rank 0.

        {"began": SECONDS SINCE THE EPOCH, "ended": the same, or null while it compiles}
        """
        return self.path / f"attempt-{attempt}" / "compilation.json"

    def startup_hook(self, attempt: int) -> Path:
        """Return the file with the times of an attempt's startup hook, written by the agent of node 0.

        {"began": SECONDS SINCE THE EPOCH, "ended": the same, or null while the hook runs on a node}
        """
        return self.path / f"attempt-{attempt}" / "startup-hook.json"

    def launcher(self, attempt: int, node: int) -> Path:
        """Return the file with the address of the launcher on a node, for gangs whose ranks one launcher starts."""
        return self.path / f"attempt-{attempt}" / f"node-{node}.json"

    def failures(self, attempt: int) -> Path:
        """Return the folder with a file for each rank that failed, written by the rank or, if it cannot, its agent."""
        return self.path / f"attempt-{attempt}" / "failures"

    def rank_log(self, attempt: int, rank: int) -> Path:
        return self.logs / f"attempt-{attempt}" / f"rank-{rank}.log"


@dataclass(frozen=True)
class ExperimentFolder:
    """The files of one experiment."""

    path: Path

    @property
    def id(self) -> int:
        return int(self.path.name)

    def is_own(self) -> bool:
        """Return whether the user of this process owns it, and so may change it."""
        return is_own(self.path)

    def owner(self) -> str:
        """Return the name of the owner, or the number of an owner without a name."""
        return name_of_user(self.path.stat().st_uid)

    def shared_with(self) -> Group | None:
        """Return the group whose members may read it; None: only its owner may."""
        return Group(self.path.stat().st_gid) if is_shared(self.path) else None

    def named(self) -> str:
        """Return its name for the command line: ID or, for users other than the owner, STATE_ROOT:ID."""
        return str(self.id) if self.is_own() else f"{self.root()}:{self.id}"

    @property
    def config(self) -> Path:
        return self.path / "experiment.yaml"

    @property
    def effective(self) -> Path:
        """The effective config that workers read; only the owner may read it, since its secrets are not masked."""
        return self.path / "effective.json"

    @property
    def origin(self) -> Path:
        return self.path / "origin.json"

    @property
    def cluster(self) -> Path:
        return self.path / "cluster.json"

    @property
    def submitting(self) -> Path:
        """The process that submits its jobs; exists only during the submission: see hpc_det.store.submitting."""
        return self.path / "submitting.json"

    @property
    def settling(self) -> Path:
        """The process that completes or undoes an interrupted submission; exists only while it does."""
        return self.path / "settling.json"

    @property
    def about(self) -> Path:
        """Changes of its description since the submission: see hpc_det.store.experiment_config."""
        return self.path / "about.json"

    @property
    def code_kept(self) -> Path:
        """A copy of the code from the first attempt, since trials may write files beside the code that they run."""
        return self.path / ".code-kept"

    def submitted_code(self) -> Path:
        """Return the folder with the code as it was submitted, without files that trials have written since."""
        return self.code_kept if self.code_kept.exists() else self.code

    @property
    def points(self) -> Path:
        """The overrides of each trial, if trials are listed explicitly: of a multirun or a sweep."""
        return self.path / "points.json"

    @property
    def warm_start(self) -> Path:
        """The checkpoint from whose weights all trials start, if any."""
        return self.path / "warm_start.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def masked(self) -> Path:
        """Masked copies of files with secrets, for the group: see hpc_det.store.experiment_config."""
        return self.path / "masked"

    @property
    def storage(self) -> Path:
        """{"folder"} or {"url"}: the place of the checkpoints of all trials, if not in the trials' folders."""
        return self.path / "storage.json"

    def checkpoints_elsewhere(self) -> Path | None:
        """Return the folder with one subfolder of checkpoints per trial; None: they are in the trials' own folders."""
        folder = (read_map(self.storage) or {}).get("folder")
        return Path(folder) if folder else None

    def make_elsewhere(self, folder: Path) -> None:
        """Create a folder for checkpoints that the same group may read as the experiment."""
        make_private(folder)
        share_alike(folder, model=self.path)

    def checkpoints_url(self) -> str | None:
        """Return the URL in an object store for copies of all trials' checkpoints; None: they are only on disk."""
        url: str | None = (read_map(self.storage) or {}).get("url")
        return url

    @property
    def code(self) -> Path:
        return self.path / "code"

    def copied_code(self) -> Path | None:
        """Return the copy of the code; None if jobs run the user's own folder, as the points of a Hydra sweep do."""
        return None if self.code.is_symlink() else self.code

    @property
    def git(self) -> Path:
        """The commit of the code and the uncommitted files: a `submit.snapshot.GitState` without the diff."""
        return self.path / "git.json"

    @property
    def git_diff(self) -> Path:
        return self.path / "git.diff"

    @property
    def notified(self) -> Path:
        """A folder with a file for each state change for which hooks were called: see hpc_det.notify.change."""
        return self.path / "notified"

    @property
    def submitit(self) -> Path:
        return self.path / "submitit"

    @property
    def search(self) -> Path:
        """The folder of the search's journal."""
        return self.path / "search"

    @property
    def logs_deleted(self) -> Path:
        """A file whose modification time is the deletion of the logs by retention_policy."""
        return self.path / "logs_deleted"

    @property
    def sweep(self) -> Path:
        """The points of a Hydra app, saved by its launcher, and their results."""
        return self.path / "sweep"

    @property
    def local_run(self) -> Path:
        """The name and script of a run outside a job; other experiments have no such file: see store.local_run."""
        return self.path / "local.json"

    @property
    def processes(self) -> Path:
        """A folder with a file for each process of a run outside a job, written by that process."""
        return self.path / "processes"

    @property
    def jobs(self) -> Path:
        return self.path / "jobs"

    def script(self, number: int = 1) -> Path:
        """Return the batch script of a submission; `number` counts submissions from 1."""
        return self.jobs / f"{number}.sh"

    def job_logs(self) -> list[Path]:
        """Return the logs of all jobs, and their indexes."""
        return sorted([*self.jobs.glob("*.log"), *self.jobs.glob("*.times")])

    def array(self, number: int = 1) -> Path:
        """Return the file with the workers of the jobs of script `number`: a `plan.job_plan.JobArray`."""
        return self.jobs / f"{number}.array.json"

    def next_jobs(self, number: int, index: int) -> Path:
        """Return the file for element `index` of script `number`: {"jobs": [ids]}.

        The ids are of its job and of its successors, each of which waits for the end of the one before.
        """
        return self.jobs / f"{number}-{index}.next.json"

    def all_next_jobs(self, number: int) -> list[Path]:
        """Return the existing `next_jobs` files of script `number`."""
        return sorted(self.jobs.glob(f"{number}-*.next.json"))

    def job(self, number: int = 1) -> Path:
        """Return the file with the job id of script `number`.

        It is written right after the submission, or by the job if the submission was interrupted.
        """
        return self.jobs / f"{number}.json"

    def root(self) -> Path:
        """Return the state root of the experiment."""
        return self.path.parent.parent

    def written_by_many(self) -> list[Path]:
        """Return the folders in which workers, hooks and commands write files."""
        return [self.path, self.search, self.jobs, self.notified, self.masked]

    def trial(self, number: int = 1) -> TrialFolder:
        return TrialFolder(self.path / "trials" / str(number))

    def trials(self) -> list[TrialFolder]:
        """Return the trials that have started, by number."""
        try:
            numbers = sorted(int(entry.name) for entry in (self.path / "trials").iterdir() if entry.name.isdecimal())
        except FileNotFoundError:
            numbers = []
        return [self.trial(number) for number in numbers]

    def remove(self) -> None:
        """Delete the experiment and its folder for checkpoints elsewhere, but not the copies in an object store."""
        # The config first: without it, what remains after a kill does not count as an experiment
        disk.unlink(self.config, missing_ok=True)
        if elsewhere := self.checkpoints_elsewhere():
            disk.remove_tree(elsewhere)
        disk.remove_tree(self.path)


def job_log(script: Path, element: str = "") -> Path:
    """Return the log of the job of `script`. `element`: suffix for an element of an array, which has a separate log."""
    return script.with_name(f"{script.stem}{element}.log")


def times_of(log: Path) -> Path:
    """Return the index of a log with the times of its lines: see hpc_det.store.log_lines."""
    return log.with_suffix(".times")
