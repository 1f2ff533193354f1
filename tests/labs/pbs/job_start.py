"""Start a job: its folders, its nodefile, its first process, and later those of pbsdsh and pbs_tmrsh."""

from __future__ import annotations

import time
from pathlib import Path

from tests.labs.pbs import arrays, environment, mom, output
from tests.labs.pbs.job import STARTING, Job, Slot, Task
from tests.labs.pbs.site import Site
from tests.labs.pbs.state import Pbs


def start(pbs: Pbs, job: Job, slots: list[Slot]) -> None:
    now = time.time()
    job.slots, job.tasks, job.run_count = slots, [], job.run_count + 1
    job.state, job.substate, job.stime, job.mtime = "R", STARTING, now, now
    job.exit_status = job.gone_at = job.lost_at = None
    job.suspended_s = 0
    job.comment = f"Job run at {time.strftime('%a %b %d at %H:%M')} on {job.vnodes}"
    for node in job.nodes:
        pbs.nodes[node].used = now
        Path(environment.temporary_folder(pbs.site, job, node)).mkdir(0o700, parents=True, exist_ok=True)
    (pbs.site.folder("aux") / job.id).write_text(environment.nodefile(job))
    if job.parent:
        arrays.begin(job.parent, now)
    spawn(pbs, job, 0, _argv(pbs.site, job))


def _argv(site: Site, job: Job) -> list[str]:
    if job.submission.argv is not None:
        return job.submission.argv
    path = _script_path(site, job)
    path.write_text(job.submission.script or "")
    path.chmod(0o700)
    return [environment.shell_of(job)]


def _script_path(site: Site, job: Job) -> Path:
    return site.folder("jobs") / f"{job.id}.SC"


def spawn(pbs: Pbs, job: Job, node: int, argv: list[str]) -> Task:
    """Start a process. The first one of a job is its script below a login shell, or its program; others come from
    pbsdsh.
    """
    is_script = not job.tasks and job.submission.argv is None
    number = _task_number(job, node) if job.tasks else "1"
    env = environment.of_task(pbs.site, job, node, number)
    name = job.nodes[node]
    out, err = output.while_running(pbs.site, job)
    program = mom.Program(
        argv=argv,
        env=env if pbs.settings.own_hosts else env | {"HOSTNAME": name},
        cwd=pbs.site.user_home,
        umask=job.submission.umask,
        output=out,
        error=err,
        name="-" + Path(argv[0]).name if is_script else "",
        stdin=f"{_script_path(pbs.site, job)}\n".encode() if is_script else b"",
        host=name if pbs.settings.own_hosts else None,
        hosts=pbs.site.hosts,
        network=list(pbs.settings.networks)[pbs.settings.nodes.index(name)] if pbs.settings.networks else None,
    )
    job.tasks.append(task := Task(mom.start(program), node, number))
    return task


def _task_number(job: Job, node: int) -> str:
    """Return the number, counted per node; on the first node, the job itself is number 1."""
    return f"{(node << 30) + 1 + sum(task.node == node for task in job.tasks):08X}"
