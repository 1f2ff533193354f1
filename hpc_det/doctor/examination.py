"""The checks of all subjects in order; their commands run in parallel, and each only once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from hpc_det.config.cluster_choice import Which, schedulers_here
from hpc_det.doctor import Finding, launchers, pbs, profiles, site_conf, slurm, this_machine
from hpc_det.doctor.profiles import Profile
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.schedulers.pbs.answers import check_is_pbs
from hpc_det.schedulers.scheduler import CommandError, Run, outside_any_job, run_command
from hpc_det.schedulers.site import NO_SCHEDULER, Site, ask, scheduler_here

AT_ONCE = 16
"""Number of commands that run in parallel."""
TIMEOUT_S = 20.0
"""Time limit of each command, in seconds."""  # a healthy controller answers in 0.1 s; a busy login node takes longer
NO_QUEUE = Finding(
    "scheduler",
    "note",
    f"{NO_SCHEDULER}: jobs are processes of this machine",
    "to use a cluster, run this on its login node",
)
_SUBJECTS = {"slurm": slurm, "pbs": pbs}
T = TypeVar("T")
_STRANGE = (HpcDetError, OSError, ValueError, LookupError, TypeError, AttributeError)
"""Exceptions that parsing the output of an unknown version or site may raise."""


def asking(env: Mapping[str, str]) -> Run:
    """Return a function that runs commands with the environment of a login shell, even inside a job."""
    return partial(run_command, env=outside_any_job(env), timeout_s=TIMEOUT_S)


def examine(cluster: str | None, env: Mapping[str, str], run: Run, which: Which) -> Iterator[Finding]:
    """Yield the findings for the profile `cluster`, each as soon as it is known; None: for all profiles.

    What several subjects find is yielded once. Raises UsageError if the profile does not exist.
    """
    messages = set[str]()
    for finding in _examined(cluster, env, run, which):
        if finding.verdict != "problem" or finding.message not in messages:
            messages.add(finding.message)
            yield finding


def _examined(cluster: str | None, env: Mapping[str, str], run: Run, which: Which) -> Iterator[Finding]:
    scheduler = scheduler_here(which)
    profiles_read = profiles.read(cluster, env, scheduler)
    read = list(profiles_read if cluster else _readable(profiles.SUBJECT, profiles_read))
    found = [each for each in read if isinstance(each, Profile)]
    if cluster and found:
        scheduler = _scheduler_of(found[0], scheduler, which)
    yield from _readable(site_conf.SUBJECT, site_conf.findings(env))
    # Before the others, because these checks fork, which is not safe once AskedOnce has started threads.
    yield from _readable(this_machine.SUBJECT, this_machine.findings(env, has_nodes=scheduler is not None))
    mpi_launchers = list(dict.fromkeys(each.cluster.mpi_launcher[0] for each in found)) or ["mpirun"]
    with AskedOnce(run) as asked:
        asked.begin(_commands(scheduler, found, mpi_launchers, which))
        only = scheduler if cluster and found else None  # None: the first that answers
        site = _site(scheduler, asked, which, only) if scheduler else NO_QUEUE
        if isinstance(site, Site):
            its = _SUBJECTS[site.scheduler]
            yield from _readable(its.SUBJECT, its.findings(site, asked, which))
        elif scheduler or not cluster:  # a missing scheduler does not matter for a profile without a queue
            yield site
        yield from (each for each in read if isinstance(each, Finding))
        yield from _profiles(found, site if isinstance(site, Site) else None, asked, which, is_named=bool(cluster))
        if not cluster:
            yield from _readable(profiles.SUBJECT, map(profiles.default, [env]))
        yield from _readable(launchers.SUBJECT, launchers.findings(mpi_launchers, asked, which))


def _profiles(
    found: Sequence[Profile], site: Site | None, asked: Run, which: Which, *, is_named: bool
) -> Iterator[Finding]:
    for profile in found:
        its = profiles.findings(profile, site, asked, which, is_named=is_named)
        yield from _readable(profile.subject, its)
    if site and not is_named and all(profile.cluster.scheduler != site.scheduler for profile in found):
        yield from _readable(profiles.SUBJECT, profiles.without_any(site, asked))


def _commands(
    scheduler: str | None, found: Iterable[Profile], mpi_launchers: Iterable[str], which: Which
) -> Iterator[Sequence[str]]:
    """Yield all commands whose output will be needed."""
    if scheduler:
        yield from _SUBJECTS[scheduler].COMMANDS
    for _subject, cluster in found:
        if scheduler == cluster.scheduler == "slurm":
            yield slurm.try_submission(cluster, cluster.usual_pool)
    # slurm.py checks the MPI plugins of srun
    yield from filter(None, (launchers.version_command(name, which) for name in mpi_launchers if name != "srun"))


def _scheduler_of(profile: Profile, first: str | None, which: Which) -> str | None:
    """Return the scheduler of the profile if its commands are here, or else `first`; None: the profile has no queue."""
    if not profile.cluster.has_queue:
        return None
    return profile.cluster.scheduler if profile.cluster.scheduler in schedulers_here(which) else first


def _site(scheduler: str, asked: Run, which: Which, only: str | None) -> Site | Finding:
    """Return the scheduler's description of the site, or a finding if there is none."""
    subject = _SUBJECTS[scheduler].SUBJECT
    try:
        if scheduler == "pbs":
            check_is_pbs(asked)
        return ask(asked, which, only)
    except CommandError as error:
        return _silent(subject, error)
    except _STRANGE as error:
        return _strange(subject, error)


def _readable(subject: str, findings: Iterable[T]) -> Iterator[T | Finding]:
    """Yield `findings`; an error of the configuration, of a command or of its output ends them with a finding."""
    try:
        yield from findings
    except UsageError as error:
        yield Finding(subject, "problem", str(error), "correct that, or ask the site")
    except CommandError as error:
        yield _silent(subject, error)
    except _STRANGE as error:
        yield _strange(subject, error)


def _silent(subject: str, error: CommandError) -> Finding:
    return Finding(subject, "problem", str(error), "make this command work in a shell first, or ask the site")


def _strange(subject: str, error: Exception) -> Finding:
    message = f"the answer cannot be parsed ({type(error).__name__}: {error})"
    return Finding(subject, "problem", message, "report it, with the version of the scheduler")


class AskedOnce:
    """A `Run` that runs each command once, and can start commands before their output is needed."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._threads = ThreadPoolExecutor(AT_ONCE)
        self._answers: dict[tuple[str, ...], Future[str]] = {}

    def __enter__(self) -> AskedOnce:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def begin(self, commands: Iterable[Sequence[str]]) -> None:
        """Start the commands in the background."""
        for command in commands:
            self._begun(command)

    def __call__(self, command: Sequence[str]) -> str:
        """Return the output of the command, run now or before. Raises CommandError if it failed."""
        return self._begun(command).result()

    def _begun(self, command: Sequence[str]) -> Future[str]:
        key = tuple(command)
        if key not in self._answers:
            self._answers[key] = self._threads.submit(self._run, key)
        return self._answers[key]
