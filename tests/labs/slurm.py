"""A real Slurm of three nodes on this machine, for tests: `slurm-up` and `slurm-down` as an object."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from hpc_det.node.process import is_running, start_ticks
from tests import processes
from tests.labs import operator
from tests.labs.isolation import ACCOUNTING_COMMANDS, SLURM_COMMANDS, path_with_only, path_without
from tests.wait import DEADLINE_S

SCRIPTS = Path(__file__).parent
DEBIAN = Path("/usr/bin")
"""The folder of the Slurm commands from Debian's packages; a site's own Slurm may come first on PATH."""


def available() -> str | None:
    """Return why the lab cannot run on this machine, or None."""
    if operator.VARIABLE in os.environ:
        return None
    if os.geteuid() != 0:
        return "the Slurm lab needs root: it makes network namespaces"
    if not Path("/etc/debian_version").exists():
        return "the Slurm lab needs Debian: it takes Slurm from Debian's packages"
    if subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True).returncode:
        return "the Slurm lab needs leave to make namespaces, which this machine refuses"
    return None


def reached_paths() -> list[Path]:
    """Return the folders that a Python of the tests needs."""
    return list(dict.fromkeys([Path(sys.base_prefix), Path(sys.prefix), SCRIPTS.parents[1]]))


@dataclass(frozen=True)
class SlurmLab:
    """A running lab. Nodes share every folder with this machine except `/tmp`; jobs run as the user of the tests."""

    conf: Path
    """The value of `SLURM_CONF` with which Slurm commands reach the lab."""

    @classmethod
    def start(cls) -> SlurmLab:
        """Start the lab, or return the one that already runs, as it always does for an ordinary user."""
        if operator.VARIABLE in os.environ:
            return cls(Path(os.environ[operator.VARIABLE]).parents[1] / "etc" / "slurm.conf")
        reached = ":".join(map(str, reached_paths()))
        env = os.environ | {"HPC_DET_LAB_PATHS": reached}
        done = subprocess.run([SCRIPTS / "slurm-up"], env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"slurm-up failed:\n{done.stdout}{done.stderr}")
        lab = cls(Path(done.stdout.splitlines()[-1].removeprefix("export SLURM_CONF=")))
        lab._make_bin()
        return lab

    @staticmethod
    def is_running() -> bool:
        if operator.VARIABLE in os.environ:
            return True
        return subprocess.run([SCRIPTS / "slurm-up", "--check"], capture_output=True).returncode == 0

    @contextmanager
    def used_alone(self) -> Iterator[None]:
        """Lock the lab; fail if other tests use it, since all jobs are cancelled after each test."""
        with self.conf.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pytest.fail(f"other tests use the lab in {self.path}; HPC_DET_LAB names another", pytrace=False)
            yield

    def stop(self) -> None:
        subprocess.run([SCRIPTS / "slurm-down"], check=True)

    @property
    def path(self) -> Path:
        return self.conf.parent.parent

    @property
    def bin(self) -> Path:
        """The folder with the commands of the lab's Slurm."""
        return self.path / "bin"

    def _make_bin(self) -> None:
        self.bin.mkdir(exist_ok=True)
        for command in SLURM_COMMANDS:
            link = self.bin / command
            if not link.is_symlink():
                link.symlink_to(DEBIAN / command)

    @property
    def env(self) -> dict[str, str]:
        """Variables with which Slurm commands reach this Slurm, and no other scheduler is found."""
        return {"SLURM_CONF": str(self.conf), "PATH": path_with_only(self.bin, os.environ["PATH"], self._links)}

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Make it the scheduler of this process and of its children."""
        for name, value in self.env.items():
            patch.setenv(name, value)

    @cached_property
    def _links(self) -> Path:
        """A folder for links to this machine's commands that are not a scheduler's."""
        return self.folder()

    def run(self, *command: str | Path, cwd: Path | None = None) -> str:
        """Return the standard output of a command. Raises RuntimeError with its output if it fails."""
        done = self._ended(*command, cwd=cwd)
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done.stdout

    def _ended(self, *command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        if operator.VARIABLE in os.environ and operator.needs_root(command):
            return operator.run_by_operator(command)
        return subprocess.run(command, env=os.environ | self.env, cwd=cwd, capture_output=True, text=True)

    @cached_property
    def login_address(self) -> str:
        """Address of this host in the network of the nodes."""
        shown = subprocess.run(["ip", "-4", "addr"], capture_output=True, text=True, check=True).stdout
        return re.findall(r"inet (10\.66\.0\.\d+)/", shown)[0]  # type: ignore[no-any-return]

    def folder(self) -> Path:
        """Create a folder that all nodes see."""
        return Path(tempfile.mkdtemp(dir=self.path / "work"))

    def job(self, job_id: int | str) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        return parse_fields(self.run("scontrol", "show", "job", "--oneliner", str(job_id)))

    def wait_for_state(
        self, job_id: int | str, states: str | Collection[str], deadline_s: float = DEADLINE_S
    ) -> dict[str, str]:
        """Return the job's fields as soon as it is in one of the states; it is COMPLETING until its last process has
        ended.
        """
        wanted = {states} if isinstance(states, str) else set(states)
        end = time.monotonic() + deadline_s
        while (job := self.job(job_id))["JobState"] not in wanted:
            if time.monotonic() > end:
                seen = f"{job['JobState']} (reason {job['Reason']}, exit code {job['ExitCode']})"
                raise TimeoutError(f"job {job_id} is {seen} after {deadline_s} s, not {' or '.join(sorted(wanted))}")
            time.sleep(0.1)
        return job

    def preempt(self, nodes: int = 3, seconds: float = 5) -> int:
        """Submit a job to `high` that takes whole nodes for some seconds, preempting others; return its ID."""
        where = ["--partition=high", f"--nodes={nodes}", "--exclusive", "--chdir=/", "--output=/dev/null"]
        return int(self.run("sbatch", "--parsable", *where, f"--wrap=sleep {seconds}"))

    def fail_node(self, number: int) -> None:
        """Kill every process there, as a power failure does."""
        while pids := self.run("ip", "netns", "pids", f"hpcdet-node{number}").split():
            self._ended("kill", "-KILL", *pids)  # some end meanwhile, others start

    def repair_node(self, number: int) -> None:
        self.run(SCRIPTS / "slurm-up", "--node", str(number))

    def signal(self, daemon: str, number: signal.Signals) -> None:
        """Signal a daemon (slurmctld, slurmdbd, or slurmd.node2). After KILL, return when it has ended."""
        pid = int((self.path / "run" / f"{daemon}.pid").read_text())
        ticks = start_ticks(pid)
        self.run("kill", f"-{number.value}", str(pid))
        while number is signal.SIGKILL and is_running(pid, ticks):
            time.sleep(0.02)

    def start_daemon(self, name: str) -> None:
        """Start slurmctld or slurmdbd after its end. For slurmctld, return when it answers."""
        self.run(SCRIPTS / "slurm-up", "--daemon", name)

    def conf_with(self, folder: Path, message_timeout_s: int) -> Path:
        """Write a slurm.conf with which commands wait this long for an answer of slurmctld."""
        text = re.sub(r"(?m)^MessageTimeout=.*$", f"MessageTimeout={message_timeout_s}", self.conf.read_text())
        conf = folder / f"slurm-{message_timeout_s}.conf"
        conf.write_text(text)
        return conf

    def cut_network(self, number: int) -> None:
        """Drop every packet of the node; its connections stay open."""
        self.run("ip", "-n", f"hpcdet-node{number}", "link", "set", "eth0", "down")

    def mend_network(self, number: int) -> None:
        self.run("ip", "-n", f"hpcdet-node{number}", "link", "set", "eth0", "up")

    def cancel_all(self, deadline_s: float = 120) -> None:
        """Cancel every job of the lab, and wait until the last of their processes has ended."""
        end, errors = time.monotonic() + deadline_s, ""
        while jobs := self.run("squeue", "--noheader", "--format=%i %T"):
            if time.monotonic() > end:
                raise TimeoutError(f"jobs are left after {deadline_s} s:\n{jobs}{errors}")
            # KILL first, or a job that saves on TERM would use up its grace; it may have been requeued meanwhile.
            # scancel fails for a job whose state changes at that moment; the next round cancels it.
            errors = self._ended("scancel", "--quiet", "--state=PENDING").stderr
            errors += self._ended("scancel", "--quiet", "--full", "--signal=KILL", "--state=RUNNING").stderr
            time.sleep(0.1)
        while steps := self._steps():
            if time.monotonic() > end:
                raise TimeoutError(f"steps are left after {deadline_s} s: {steps}")
            time.sleep(0.1)

    def _steps(self) -> list[int]:
        """Return the PIDs of steps that still run, also of jobs that squeue does not list: those that were requeued,
        then cancelled.
        """
        nodes = [pid_file.name.split(".")[1] for pid_file in (self.path / "run").glob("slurmd.*.pid")]
        pids = [int(pid) for node in nodes for pid in self.run("ip", "netns", "pids", f"hpcdet-{node}").split()]
        return [pid for pid in pids if "slurmstepd" in processes.words(pid, "comm")[0]]

    def path_without_accounting(self) -> str:
        """Return a `PATH` as on a site without slurmdbd."""
        return path_without(ACCOUNTING_COMMANDS, self.env["PATH"], self.folder())


def parse_fields(text: str) -> dict[str, str]:
    """Parse `A=b C=d e F=`; keys begin with a capital, values may contain blanks and equals signs."""
    pairs = re.split(r"(?:^|\s)([A-Z][\w:/]*)=", text.strip())
    return dict(zip(pairs[1::2], pairs[2::2], strict=True))
