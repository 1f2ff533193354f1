"""The stand-in PBS of three nodes as an object: `submit`, `wait_for`, `preempt`, `fail_node`."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.labs.isolation import path_with_only
from tests.labs.networks import Networks
from tests.labs.pbs import client
from tests.labs.pbs.commands import MANAGER
from tests.labs.pbs.qstat import typed_job
from tests.labs.pbs.site import REPOSITORY, Settings, Site
from tests.wait import DEADLINE_S, wait_for

Job = dict[str, Any]
Done = subprocess.CompletedProcess[str]

ENDS_WITHIN_S = 10
"""Seconds in which processes end on a busy machine after they were killed or lost their job."""


class PbsLab:
    def __init__(
        self, site: Site, settings: Settings, server: subprocess.Popen[bytes], networks: Networks | None = None
    ) -> None:
        self.site = site
        self.settings = settings
        self._server = server
        self._networks = networks

    @classmethod
    def start(cls, *, has_networks: bool = False, **settings: Any) -> PbsLab:
        """Start a new site with nodes `pbsn1` to `pbsn3`; `settings` are fields of `Settings`.

        `has_networks`: each node has a separate network, which can be cut (needs root).
        """
        site = Site(Path(tempfile.mkdtemp(prefix="pbs-")))
        networks = Networks(3) if has_networks else None
        if networks:
            settings["networks"] = dict(zip(networks.paths, networks.addresses, strict=True))
        made = _settings(settings)
        site.make(made)
        command = [sys.executable, "-S", "-m", "tests.labs.pbs.server", str(site.home)]
        server = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL)
        lab = cls(site, made, server, networks)
        wait_for(lambda: site.server_socket.exists() or server.poll() is not None)
        return lab

    def stop(self) -> list[str]:
        """End every process of the site; return those that had left the session of their job."""
        died = self._server.poll()
        strays = self._left_strays() if died is None else [f"its server died with exit code {died}"]
        self._server.terminate()
        self._server.wait(DEADLINE_S)
        shutil.rmtree(self.site.home)
        if self._networks:
            self._networks.close()
        return strays

    def strays(self) -> list[str]:
        """Return the processes that a PBS without cgroups would leave behind on its nodes, as `pid command`."""
        found = client.ask(self.site.mom_socket, do="strays")["strays"]
        return [f"{pid} {command}" for pid, command in found.items()]

    def _left_strays(self) -> list[str]:
        """Return the strays, without those that are about to end."""
        end = time.monotonic() + ENDS_WITHIN_S
        while (strays := self.strays()) and time.monotonic() < end:
            time.sleep(0.05)
        return strays

    @property
    def nodes(self) -> list[str]:
        return self.settings.nodes

    @property
    def home(self) -> Path:
        """The folder in which jobs start."""
        return self.site.user_home

    @property
    def queue(self) -> str | None:
        """The queue for jobs that may be preempted; None: the site's default."""
        return "low"

    @property
    def env(self) -> dict[str, str]:
        """The variables to add to a subprocess's environment so that its PBS commands reach this site, and no other."""
        return {"PATH": path_with_only(self.site.bin, os.environ["PATH"], self.site.home / "machine")}

    def ended(self, *command: str | Path, cwd: Path | None = None, manager: bool = False) -> Done:
        env = os.environ | self.env | ({MANAGER: "1"} if manager else {})
        return subprocess.run(
            command, env=env, cwd=cwd or self.home, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )

    def run(self, *command: str | Path, cwd: Path | None = None, manager: bool = False) -> str:
        """Return the standard output. Raises RuntimeError with the command's output if it fails."""
        done = self.ended(*command, cwd=cwd, manager=manager)
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done.stdout

    def submit(self, *arguments: str | Path, script: str | None = None, cwd: Path | None = None) -> str:
        """Submit a job and return its ID; `script`: the text of a script."""
        if script is not None:
            number = len(list(self.home.glob("*.pbs")))
            (path := self.home / f"job{number}.pbs").write_text(script)
            arguments = (*arguments, path)
        return self.run("qsub", *arguments, cwd=cwd).strip()

    def job(self, job_id: str) -> Job:
        """Return its attributes, ended or not: the content of `qstat -x -f -F json`, but faster."""
        answer = client.ask(self.site.server_socket, do="status", ids=[job_id], history=True, subjobs=False)
        if job_id not in answer["jobs"]:
            raise LookupError(answer["errors"][0][1])
        return typed_job(answer["jobs"][job_id])

    def wait_for(self, job_id: str, states: str | Collection[str], deadline_s: float = DEADLINE_S) -> Job:
        """Return its attributes as soon as it is in one of these states, such as "R" or "F"."""
        end = time.monotonic() + deadline_s
        while (job := self.job(job_id))["job_state"] not in states:
            if time.monotonic() > end:
                raise TimeoutError(f"job {job_id} is not {' or '.join(states)} after {deadline_s} s: {job}")
            time.sleep(0.02)
        return job

    def preempt(self, nodes: int = 3, seconds: float = 1) -> str:
        """Submit a job to `high` that takes whole nodes for some seconds, preempting others; return its ID."""
        chunk = f"ncpus={self.settings.ncpus}:ngpus={self.settings.ngpus}"
        where = ["-q", "high", "-l", f"select={nodes}:{chunk},place=scatter"]
        return self.submit(*where, "-o", "/dev/null", "-e", "/dev/null", "--", "/bin/sleep", str(seconds))

    def set_preempt_order(self, letters: str) -> None:
        """Set the order: S suspends, R requeues, D deletes, C does nothing; several are tried in turn."""
        self.run("qmgr", "-c", f"set sched preempt_order = {letters}", manager=True)

    def set_history(self, enabled: bool) -> None:
        self.run("qmgr", "-c", f"set server job_history_enable = {enabled}", manager=True)

    def set_kill_delay(self, queue: str, seconds: int | None) -> None:
        change = f"unset queue {queue} kill_delay" if seconds is None else f"set queue {queue} kill_delay = {seconds}"
        self.run("qmgr", "-c", change, manager=True)

    def rerun(self, job_id: str) -> None:
        """Rerun the job as a manager; return when the run has ended."""
        self.run("qrerun", job_id, manager=True)

    def fail_node(self, name: str) -> None:
        """Switch a node off: its processes end, and nothing is notified."""
        if self._networks:
            self._networks.power_off(self.nodes.index(name))
        self._turn(do="node", name=name, up=False)

    def cut_network(self, name: str) -> None:
        """Cut the network of one node: all packets are lost, no connection closes, and PBS has not noticed yet."""
        assert self._networks
        self._networks.cut(self.nodes.index(name))

    def repair_node(self, name: str) -> None:
        self._turn(do="node", name=name, up=True)

    def stop_server(self) -> None:
        """Stop the PBS server; jobs keep running."""
        self._turn(do="server", up=False)

    def start_server(self) -> None:
        self._turn(do="server", up=True)

    def _turn(self, **request: Any) -> None:
        if answer := client.ask(self.site.mom_socket, **request).get("text"):
            raise RuntimeError(answer)

    def end_all(self) -> None:
        """Kill every job, and wait until all have ended."""
        self.start_server()
        for job_id in self._current():
            client.ask(self.site.server_socket, do="delete", id=job_id, force=True, history=False, by="the lab")
        wait_for(lambda: not self._current())

    def _current(self) -> list[str]:
        return list(client.ask(self.site.server_socket, do="status", ids=[], history=False, subjobs=False)["jobs"])


@functools.cache
def can_have_hosts() -> bool:
    command = ["unshare", "--uts", "--mount", "true"]
    return os.geteuid() == 0 and not subprocess.run(command, capture_output=True).returncode


def _settings(changes: dict[str, Any]) -> Settings:
    """Return settings in which nodes have separate host names, or, without root, addresses, which resolve
    everywhere.
    """
    own_hosts = (
        os.geteuid() == 0
        and not subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True).returncode
    )
    nodes = [f"pbsn{number}" if own_hosts else f"127.0.1.{number}" for number in (1, 2, 3)]
    return replace(Settings(nodes=nodes, own_hosts=own_hosts), **changes)
