"""The files of a job's output: spooled until the end of its last run, or written in place at once (`-k oed`)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.labs.pbs.job import Job
from tests.labs.pbs.site import LOGIN_HOST, Site


def shown_paths(job: Job) -> tuple[str, str]:
    """Return `Output_Path` and `Error_Path`, with the host, as qstat shows them."""
    return f"{LOGIN_HOST}:{_asked(job, 'o')}", f"{LOGIN_HOST}:{_asked(job, 'e')}"


def _asked(job: Job, which: str) -> str:
    asked = job.output if which == "o" else job.error
    if asked is None:
        suffix = "" if not (job.is_array or job.index is not None) else f".{_index(job)}"
        asked = f"{job.name}.{which}{job.number}{suffix}"
    elif job.index is not None:
        asked = asked.replace("^array_index^", str(job.index))
    host, colon, path = asked.partition(":")
    asked = path if colon and "/" not in host else asked
    joined = os.path.join(job.submission.workdir, asked)
    return joined + "/" if asked.endswith("/") and not joined.endswith("/") else joined


def _index(job: Job) -> str:
    return "^array_index^" if job.index is None else str(job.index)


def _final(site: Site, job: Job, which: str) -> Path:
    """Return the final path: in a folder, a file named after the job; with `-k` without `d`, in the home folder."""
    path = Path(_asked(job, which))
    if which in job.submission.keep and "d" not in job.submission.keep:
        return site.user_home / path.name
    kind = "OU" if which == "o" else "ER"
    return path / f"{job.id}.{kind}" if path.is_dir() or _asked(job, which).endswith("/") else path


def while_running(site: Site, job: Job) -> tuple[Path, Path]:
    """Return the files for standard output and error of every process of the job."""
    output, error = (_place(site, job, which) for which in "oe")
    joined = {"oe": (output, output), "eo": (error, error)}
    return joined.get(job.submission.join, (output, error))


def _place(site: Site, job: Job, which: str) -> Path:
    if which in job.submission.keep:
        return _final(site, job, which)
    return site.folder("spool") / f"{job.id}.{'OU' if which == 'o' else 'ER'}"


def deliver(site: Site, job: Job) -> None:
    """Deliver the output after the last run; if the folder does not exist, the output is lost and the job still
    succeeds.
    """
    for which in "oe":
        spooled = site.home / "spool" / f"{job.id}.{'OU' if which == 'o' else 'ER'}"
        if not spooled.exists():
            continue
        final = _final(site, job, which)
        if final.parent.is_dir():
            shutil.copyfile(spooled, final)
            if final.is_file():  # /dev/null is in use by others
                final.chmod(0o666 & ~job.submission.umask)
        spooled.unlink()
