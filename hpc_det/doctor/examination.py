"""All subjects, one after the other; their commands are asked all at once, and none of them twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from hpc_det.doctor import Finding, launchers, pbs, profiles, slurm, this_machine
from hpc_det.doctor.profiles import Profile
from hpc_det.errors import HpcDetError
from hpc_det.schedulers.pbs.answers import check_is_pbs
from hpc_det.schedulers.scheduler import CommandError, Run, outside_any_job, run_command
from hpc_det.schedulers.site import Site, Which, ask, scheduler_here, schedulers_here

AT_ONCE = 16
"""Commands."""
TIMEOUT_S = 20.0
"""Of each command. A healthy controller takes tenths of a second, and a login node that is busy more."""
NO_SCHEDULER = Finding("scheduler", "note", "neither Slurm nor PBS is on PATH", "run this on a login node")
_SUBJECTS = {"slurm": slurm, "pbs": pbs}
_STRANGE = (HpcDetError, OSError, ValueError, LookupError, TypeError, AttributeError)
"""What reading may raise of an answer that no scheduler of ours gives."""


def asking(env: Mapping[str, str]) -> Run:
    """As a login shell would be answered, even inside a job."""
    return partial(run_command, env=outside_any_job(env), timeout_s=TIMEOUT_S)


def examine(cluster: str | None, env: Mapping[str, str], run: Run, which: Which) -> Iterator[Finding]:
    """Of the profile `cluster`, or of all; what is found comes as soon as it is known.

    Raises UsageError for a profile that nobody has.
    """
    scheduler = scheduler_here(which)
    read = list(profiles.read(cluster, env, scheduler))
    found = [each for each in read if isinstance(each, Profile)]
    if cluster and found:
        scheduler = _scheduler_of(found[0], scheduler, which)
    # First, since it forks, which a process with threads must not.
    yield from _readable(this_machine.SUBJECT, this_machine.findings(env, has_nodes=scheduler is not None))
    mpi_launchers = list(dict.fromkeys(each.cluster.mpi_launcher[0] for each in found)) or ["mpirun"]
    with AskedOnce(run) as asked:
        asked.begin(_commands(scheduler, found, mpi_launchers, which))
        only = scheduler if cluster and found else None
        site = _site(scheduler, asked, which, only) if scheduler else NO_SCHEDULER
        if isinstance(site, Site):
            its = _SUBJECTS[site.scheduler]
            yield from _readable(its.SUBJECT, its.findings(site, asked, which))
        elif scheduler or not cluster:
            yield site
        yield from (each for each in read if isinstance(each, Finding))
        yield from _profiles(found, site if isinstance(site, Site) else None, asked, which, is_named=bool(cluster))
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
    """All whose answers will be needed."""
    if scheduler:
        yield from _SUBJECTS[scheduler].COMMANDS
    for _subject, cluster in found:
        if scheduler == cluster.scheduler == "slurm":
            yield slurm.try_submission(cluster, profiles.pool_of_jobs(cluster))
    yield from filter(None, (launchers.version_command(name, which) for name in mpi_launchers if name != "srun"))


def _scheduler_of(profile: Profile, first: str | None, which: Which) -> str | None:
    """That of the profile, if it is here. None: jobs of this profile meet no scheduler."""
    if not profile.cluster.has_queue:
        return None
    return profile.cluster.scheduler if profile.cluster.scheduler in schedulers_here(which) else first


def _site(scheduler: str, asked: Run, which: Which, only: str | None) -> Site | Finding:
    """What the scheduler says of the site, or why that is nothing."""
    subject = _SUBJECTS[scheduler].SUBJECT
    try:
        if scheduler == "pbs":
            check_is_pbs(asked)
        return ask(asked, which, only)
    except CommandError as error:
        return _silent(subject, error)
    except _STRANGE as error:
        return _strange(subject, error)


def _readable(subject: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Whatever a site answers becomes a finding, and is not raised."""
    try:
        yield from findings
    except CommandError as error:
        yield _silent(subject, error)
    except _STRANGE as error:
        yield _strange(subject, error)


def _silent(subject: str, error: CommandError) -> Finding:
    return Finding(subject, "problem", str(error), "have that work by hand first; the site knows how")


def _strange(subject: str, error: Exception) -> Finding:
    message = f"what was answered cannot be read ({type(error).__name__}: {error})"
    return Finding(subject, "problem", message, "report it, with the version of the scheduler")


class AskedOnce:
    """A `Run` whose commands may begin before their answers are needed."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._threads = ThreadPoolExecutor(AT_ONCE)
        self._answers: dict[tuple[str, ...], Future[str]] = {}

    def __enter__(self) -> AskedOnce:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def begin(self, commands: Iterable[Sequence[str]]) -> None:
        for command in commands:
            self._begun(command)

    def __call__(self, command: Sequence[str]) -> str:
        """Raises CommandError, as often as one asks for what failed."""
        return self._begun(command).result()

    def _begun(self, command: Sequence[str]) -> Future[str]:
        key = tuple(command)
        if key not in self._answers:
            self._answers[key] = self._threads.submit(self._run, key)
        return self._answers[key]
