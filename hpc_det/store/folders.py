"""The names of all files of an experiment, and who writes each.

experiments/12/experiment.yaml   the effective config           `hpc-det experiment create`
               effective.json    the same, for programs         "
               origin.json       the origin of each key         "
               cluster.json      the cluster's profile          "
               points.json       hyperparameters, one by one    " (of a multirun or sweep)
               warm_start.json   whose weights all trials take  " (with a searcher.source_...)
               plan.json         what its jobs are              "
               storage.json      where its checkpoints lie      " (if elsewhere)
               submitting.json   which process submits it now   whoever submits its jobs
               settling.json     which process settles that who finds it interrupted
               about.json        its name, labels, and more     `hpc-det experiment set`, label, archive
               masked/           those of these with secrets,   " (if it is shared)
                                 without them, for colleagues
               code/             what the jobs import           "
               git.json, git.diff its commit, and what is in none " (of a git repository)
               notified/         what hooks were told           who told them
               submitit/         submitit's own files           "
               jobs/1.sh, 1.json a script, and the job's id     "
               jobs/1.array.json which workers its jobs are     "
               jobs/1-0.next.json the jobs that wait for its end the job
               jobs/1.log        what its jobs print            the jobs
               jobs/1.times      when, as beside each log       "
               search/           the search's journal           all workers
               logs_deleted      when its logs were             `experiment cleanup`
               sweep/            of a Hydra app: see hpc_det.sweep.files
               trials/1/         one TrialFolder
"""

from __future__ import annotations

import pwd
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_det.node import disk
from hpc_det.node.disk import remove_abandoned
from hpc_det.node.files import flush_folder, is_own, is_shared, make_folder, make_private, share_alike
from hpc_det.node.json_files import read_map
from hpc_det.store.group import Group


@dataclass(frozen=True)
class TrialFolder:
    """One trial's files. Every file has one writer; the journal's is the trial's worker, the metrics' is rank 0."""

    path: Path

    @property
    def trial(self) -> Path:
        """What the ranks need to know: ids, seed, hyperparameters, the effective config."""
        return self.path / "trial.json"

    @property
    def stop(self) -> Path:
        """The stop request: a node agent, the job or the command line; the first one stands."""
        return self.path / "stop.json"

    @property
    def outcome(self) -> Path:
        """What the ranks achieved, written by rank 0 as its last act."""
        return self.path / "outcome.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """A folder, or a link to one elsewhere."""
        return self.path / "checkpoints"

    @property
    def saves(self) -> Path:
        """How long each save took: see hpc_det.store.save_times. Written by rank 0."""
        return self.path / "saves.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Event files and profiler traces; those of rank R above 0 in rank-R."""
        return self.path / "tensorboard"

    @property
    def profile(self) -> Path:
        """What was measured of its training: see hpc_det.pytorch.profiling."""
        return self.path / "profile"

    def timings(self, rank: int) -> Path:
        """Where the time of a rank went; the rank."""
        return self.profile / f"timings-{rank}.jsonl"

    def system_metrics(self, node: int) -> Path:
        """What a node did meanwhile; its first rank."""
        return self.profile / f"system-{node}.jsonl"

    def resume_trace(self, rank: int) -> Path:
        """What a rank had before each batch, for `experiment verify-resume`; the rank."""
        return self.path / "resume-check" / f"rank-{rank}.jsonl"

    @property
    def id(self) -> int:
        return int(self.path.name)

    def create(self) -> None:
        """For whom the experiment is, whatever the umask. Any number of processes may do it."""
        for folder in (self.path.parent, self.path, self.logs):
            make_folder(folder)
            flush_folder(folder.parent)
        elsewhere = self.experiment().checkpoints_elsewhere()
        if elsewhere is None:
            make_folder(self.checkpoints)
            return
        self.experiment().make_elsewhere(elsewhere)  # a scratch folder may have been cleaned up
        make_folder(elsewhere / self.path.name)
        with suppress(FileExistsError):
            disk.symlink(self.checkpoints, elsewhere / self.path.name)

    def remove_abandoned(self) -> None:
        """Half-written files that killed processes have left in the folders of the trial and of its experiment."""
        of_attempts = [*self.path.glob("attempt-*"), *self.path.glob("attempt-*/failures")]
        remove_abandoned([self.path, self.checkpoints, *of_attempts, *self.experiment().written_by_many()])

    def experiment(self) -> ExperimentFolder:
        return ExperimentFolder(self.path.parent.parent)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def job_log(self) -> Path:
        return self.logs / "job.log"

    def rendezvous(self, attempt: int) -> Path:
        """Where the ranks of an attempt meet, published by the agent of node 0."""
        return self.path / f"attempt-{attempt}" / "rendezvous.json"

    def nodes(self, attempt: int) -> Path:
        """The hosts of an attempt, as the scheduler calls them, by node rank; from the agent of node 0."""
        return self.path / f"attempt-{attempt}" / "nodes.json"

    def launcher(self, attempt: int, node: int) -> Path:
        """Where the launcher on a node can be asked, for gangs whose ranks one launcher starts."""
        return self.path / f"attempt-{attempt}" / f"node-{node}.json"

    def failures(self, attempt: int) -> Path:
        """A file for each rank that failed, written by the rank, or by its agent when the rank could not."""
        return self.path / f"attempt-{attempt}" / "failures"

    def rank_log(self, attempt: int, rank: int) -> Path:
        return self.logs / f"attempt-{attempt}" / f"rank-{rank}.log"


@dataclass(frozen=True)
class ExperimentFolder:
    path: Path

    @property
    def id(self) -> int:
        return int(self.path.name)

    def is_own(self) -> bool:
        """Whether the user of this process may change it."""
        return is_own(self.path)

    def owner(self) -> str:
        """The user's name, or number where there is none."""
        number = self.path.stat().st_uid
        try:
            return pwd.getpwuid(number).pw_name
        except KeyError:
            return str(number)

    def shared_with(self) -> Group | None:
        """The group whose members may read it."""
        return Group(self.path.stat().st_gid) if is_shared(self.path) else None

    def named(self) -> str:
        """As the command line takes it: the id and, for colleagues of its owner, the root that it is in."""
        return str(self.id) if self.is_own() else f"{self.root()}:{self.id}"

    @property
    def config(self) -> Path:
        return self.path / "experiment.yaml"

    @property
    def effective(self) -> Path:
        """The effective config as the workers read it, for its owner alone: its secrets are not masked."""
        return self.path / "effective.json"

    @property
    def origin(self) -> Path:
        return self.path / "origin.json"

    @property
    def cluster(self) -> Path:
        return self.path / "cluster.json"

    @property
    def submitting(self) -> Path:
        """Which process submits its jobs, as long as it does: see hpc_det.store.submitting."""
        return self.path / "submitting.json"

    @property
    def settling(self) -> Path:
        """Which process brings an interrupted submission to its end, as long as it does."""
        return self.path / "settling.json"

    @property
    def about(self) -> Path:
        """What its owner has said of it since: see hpc_det.store.experiment_config."""
        return self.path / "about.json"

    @property
    def code_kept(self) -> Path:
        """The code as the first attempt found it; trials may write beside the code that they run."""
        return self.path / ".code-kept"

    def submitted_code(self) -> Path:
        """The code as it was submitted, whatever trials have written since."""
        return self.code_kept if self.code_kept.exists() else self.code

    @property
    def points(self) -> Path:
        """What differs between the trials, where somebody listed them one by one: of a multirun or a sweep."""
        return self.path / "points.json"

    @property
    def warm_start(self) -> Path:
        """The checkpoint whose weights all trials begin with, if any."""
        return self.path / "warm_start.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def masked(self) -> Path:
        """Copies of files with secrets, for colleagues: see hpc_det.store.experiment_config."""
        return self.path / "masked"

    @property
    def storage(self) -> Path:
        """{"folder"} or {"url"}: where the checkpoints of all trials lie, if not in the trials' folders."""
        return self.path / "storage.json"

    def checkpoints_elsewhere(self) -> Path | None:
        """The folder for those of all trials, a folder each, where it is not the trials' own."""
        folder = (read_map(self.storage) or {}).get("folder")
        return Path(folder) if folder else None

    def make_elsewhere(self, folder: Path) -> None:
        """A folder for checkpoints, for whom the experiment is."""
        make_private(folder)
        share_alike(folder, model=self.path)

    def checkpoints_url(self) -> str | None:
        """In an object store, where those of all trials are copied to."""
        url: str | None = (read_map(self.storage) or {}).get("url")
        return url

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def git(self) -> Path:
        """The commit of the code, and which files are in none: a `submit.snapshot.GitState` without the diff."""
        return self.path / "git.json"

    @property
    def git_diff(self) -> Path:
        return self.path / "git.diff"

    @property
    def notified(self) -> Path:
        """A file for each change of the state that hooks were told of, see hpc_det.notify.change."""
        return self.path / "notified"

    @property
    def submitit(self) -> Path:
        return self.path / "submitit"

    @property
    def search(self) -> Path:
        """The journal of the search."""
        return self.path / "search"

    @property
    def logs_deleted(self) -> Path:
        """Its time is when the logs were deleted, as retention_policy says."""
        return self.path / "logs_deleted"

    @property
    def sweep(self) -> Path:
        """What the launcher of a Hydra app saved for its points, and what came of them."""
        return self.path / "sweep"

    @property
    def jobs(self) -> Path:
        return self.path / "jobs"

    def script(self, number: int = 1) -> Path:
        """What the scheduler was given, `number` from 1: one script for each call."""
        return self.jobs / f"{number}.sh"

    def job_logs(self) -> list[Path]:
        """What its jobs printed, and when."""
        return sorted([*self.jobs.glob("*.log"), *self.jobs.glob("*.times")])

    def array(self, number: int = 1) -> Path:
        """Which workers the jobs of script `number` are: a `plan.job_plan.JobArray`."""
        return self.jobs / f"{number}.array.json"

    def next_jobs(self, number: int, index: int) -> Path:
        """{"jobs": [ids]}: element `index` of script `number`, and what waits for its end, one for the other."""
        return self.jobs / f"{number}-{index}.next.json"

    def all_next_jobs(self, number: int) -> list[Path]:
        """Of all elements of script `number`."""
        return sorted(self.jobs.glob(f"{number}-*.next.json"))

    def job(self, number: int = 1) -> Path:
        """The scheduler's id of it, written right after the submission, or by the job where that came to no end."""
        return self.jobs / f"{number}.json"

    def root(self) -> Path:
        """The state root that it is below."""
        return self.path.parent.parent

    def written_by_many(self) -> list[Path]:
        """The folders in which workers, hooks and commands write files."""
        return [self.path, self.search, self.jobs, self.notified, self.masked]

    def trial(self, number: int = 1) -> TrialFolder:
        return TrialFolder(self.path / "trials" / str(number))

    def trials(self) -> list[TrialFolder]:
        """Those that have begun."""
        try:
            numbers = sorted(int(entry.name) for entry in (self.path / "trials").iterdir() if entry.name.isdecimal())
        except FileNotFoundError:
            numbers = []
        return [self.trial(number) for number in numbers]

    def remove(self) -> None:
        """With the folder for checkpoints that lie elsewhere; what is in an object store stays there.

        The config goes first: what a KILL leaves behind is no experiment.
        """
        disk.unlink(self.config, missing_ok=True)
        if elsewhere := self.checkpoints_elsewhere():
            disk.remove_tree(elsewhere)
        disk.remove_tree(self.path)


def job_log(script: Path, element: str = "") -> Path:
    """What the jobs of this script print; each element of an array into a file of its own."""
    return script.with_name(f"{script.stem}{element}.log")


def times_of(log: Path) -> Path:
    """When the lines of this log were written: see hpc_det.store.log_lines."""
    return log.with_suffix(".times")
