"""The environment of a job's processes, and the files that it names."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping

from tests.labs.pbs.job import Job
from tests.labs.pbs.resources import Chunk
from tests.labs.pbs.site import SERVER, Site

PATH = "/bin:/usr/bin"


def variables_of_login(env: Mapping[str, str], workdir: str, queue: str) -> dict[str, str]:
    """Return the `PBS_O_*` of a submission."""
    return {
        "PBS_O_HOME": env.get("HOME", "/"),
        "PBS_O_LANG": env.get("LANG", "C.UTF-8"),
        "PBS_O_LOGNAME": user(),
        "PBS_O_PATH": env.get("PATH", PATH),
        "PBS_O_SHELL": env.get("SHELL", "/bin/bash"),
        "PBS_O_INTERACTIVE_AUTH_METHOD": "resvport",
        "PBS_O_INTERACTIVE_ENCRYPT_METHOD": "",
        "PBS_O_WORKDIR": workdir,
        "PBS_O_SYSTEM": "Linux",
    }


def user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def shell_of(job: Job) -> str:
    return job.submission.shell or "/bin/bash"


def of_task(site: Site, job: Job, node: int, task: str) -> dict[str, str]:
    """Return the environment of a process of a job on the node with this number; `node` counts each node once."""
    slot = next(slot for slot in job.slots if slot.node == job.nodes[node])
    threads = str(slot.chunk.ompthreads or slot.chunk.ncpus)
    home = str(site.user_home)
    own = {
        "ENVIRONMENT": "BATCH",
        "HOME": home,
        "LOGNAME": user(),
        "NCPUS": threads,
        "OMP_NUM_THREADS": threads,
        "PATH": PATH,
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_JOBCOOKIE": os.urandom(16).hex().upper(),
        "PBS_JOBDIR": home,
        "PBS_JOBID": job.id,
        "PBS_JOBNAME": job.name,
        "PBS_MOMPORT": "15003",
        "PBS_NODEFILE": str(site.folder("aux") / job.id),
        "PBS_NODENUM": str(node),
        "PBS_QUEUE": job.queue,
        "PBS_TASKNUM": task,
        "SHELL": shell_of(job),
        "TMPDIR": str(temporary_folder(site, job, slot.node)),
        "USER": user(),
    }
    return job.submission.variables | own | _of_subjob(job)


def _of_subjob(job: Job) -> dict[str, str]:
    if job.index is None:
        return {}
    return {"PBS_ARRAY_INDEX": str(job.index), "PBS_ARRAY_ID": f"{job.number}[].{SERVER}"}


def temporary_folder(site: Site, job: Job, node: str) -> os.PathLike[str]:
    """Return `TMPDIR`; on a real site the nodes have the same path on separate disks."""
    return site.home / "nodes" / node / f"pbs.{job.id}"


def nodefile(job: Job) -> str:
    """Return a line for each MPI process: `mpiprocs` of each chunk, by default one."""
    return "".join(f"{slot.node}\n" * _processes(slot.chunk) for slot in job.slots)


def _processes(chunk: Chunk) -> int:
    return 1 if chunk.mpiprocs is None else chunk.mpiprocs
