"""The Slurm lab with outages: daemons are killed or stopped and come back, and nodes lose their network."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from hpc_det.node.json_files import read_json
from hpc_det.schedulers.own_jobs import known_jobs
from hpc_det.schedulers.scheduler import array_of
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from tests import processes
from tests.e2e.story import COMMAND, DIRECT, Story
from tests.labs.slurm import SlurmLab
from tests.wait import DEADLINE_S, wait_for

REQUEUE_POLICIES = ("requeue", "successor", "resubmit")
TWO_SLOTS = "resources.slots_per_trial=2"
UNCHARGED = "max_restarts=0"
PROFILE = """
name: {name}
scheduler: slurm
slots_per_node: {slots_per_node}
max_nodes: 3
slot_type: cpu
resource_pool: low
signal_lead_s: 70
resume: {policy}
"""
JOBS_GIVE_UP_S, COMMANDS_GIVE_UP_S = 10, 4
"""Seconds until Slurm's own commands give up when slurmctld does not respond: the default in jobs, less in a terminal
to save time.
"""
RESUME_EVERY_S = 5.0
TAKES_JOBS = ("idle", "mixed", "planned")
"""States of a node (sinfo(1)). After a restart of slurmctld, the last two may remain for minutes from jobs that have
ended.
"""

Node = str


class FailingLab:
    def __init__(self, lab: SlurmLab, patch: pytest.MonkeyPatch) -> None:
        self.lab = lab
        self._patch = patch
        self._nodes: set[Node] = set()
        folder = lab.folder()
        self._profiles = folder / "conf" / "cluster"
        self._profiles.mkdir(parents=True)
        self._confs = {seconds: lab.conf_with(folder, seconds) for seconds in (JOBS_GIVE_UP_S, COMMANDS_GIVE_UP_S)}
        lab.use(patch)
        patch.setenv("HPC_DET_ROOT", str(folder))
        patch.setenv("SLURM_CONF", str(self._confs[JOBS_GIVE_UP_S]))

    def begin(self, *overrides: str, policy: str = "successor", slots_per_node: int = 1, setup: str = "") -> Story:
        """Start two ranks. They are on two nodes, unless a node has two slots."""
        name = f"{policy}-{slots_per_node}{'-waits' if setup else ''}"
        profile = PROFILE.format(name=name, policy=policy, slots_per_node=slots_per_node)
        (self._profiles / f"{name}.yaml").write_text(profile + (f'setup: ["{setup}"]\n' if setup else ""))
        return Story.begin(DIRECT, TWO_SLOTS, UNCHARGED, *overrides, cluster=name)

    # --- outages: each ends with its block, also where the block fails

    def without(self, daemon: str) -> AbstractContextManager[None]:
        """Kill slurmctld or slurmdbd; start it again after the block."""
        return self._away(daemon, signal.SIGKILL, lambda: self.lab.start_daemon(daemon))

    def with_stopped(self, daemon: str) -> AbstractContextManager[None]:
        """Stop slurmctld or slurmdbd, so that it accepts connections and does not respond; let it continue after the
        block.
        """
        return self._away(daemon, signal.SIGSTOP, lambda: self.lab.signal(daemon, signal.SIGCONT))

    @contextmanager
    def _away(self, daemon: str, by: signal.Signals, bring_back: Callable[[], None]) -> Iterator[None]:
        self.lab.signal(daemon, by)
        self._patch.setenv("SLURM_CONF", str(self._confs[COMMANDS_GIVE_UP_S]))
        try:
            yield
        finally:
            self._patch.setenv("SLURM_CONF", str(self._confs[JOBS_GIVE_UP_S]))
            bring_back()

    def wait_until_saved(self, job_id: str) -> None:
        """Wait until the job would survive a crash: slurmctld writes its jobs to a file every few seconds."""
        changed = time.time()
        self.lab.run("scontrol", "update", f"JobId={job_id}", "Comment=to be saved")
        wait_for(lambda: (self.lab.path / "state" / "job_state").stat().st_mtime > changed)

    @contextmanager
    def cut_off(self, node: Node) -> Iterator[None]:
        self._nodes.add(node)
        self.lab.cut_network(_number(node))
        try:
            yield
        finally:
            self.lab.mend_network(_number(node))

    @contextmanager
    def without_slurmd(self, node: Node) -> Iterator[None]:
        """Kill the slurmd of a node; its jobs continue."""
        self._nodes.add(node)
        self.lab.signal(f"slurmd.{node}", signal.SIGKILL)
        try:
            yield
        finally:
            self.lab.repair_node(_number(node))

    @contextmanager
    def with_frozen_jobs(self, node: Node) -> Iterator[None]:
        """Stop every process of the jobs of a node without slurmd; let them continue after the block."""
        pids = self.lab.run("ip", "netns", "pids", f"hpcdet-{node}").split()
        with suppress(RuntimeError):  # one has ended meanwhile; the others are stopped
            self.lab.run("kill", "-STOP", *pids)
        try:
            yield
        finally:
            with suppress(RuntimeError):
                self.lab.run("kill", "-CONT", *pids)

    def mark_down(self, node: Node) -> None:
        """Mark a node as down, as Slurm does automatically minutes later."""
        self._nodes.add(node)
        self.lab.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def close(self) -> None:
        try:
            self.lab.cancel_all()
        finally:
            for node in self._nodes:
                wait_for(partial(self._takes_jobs, node), DEADLINE_S, partial(self._state, node), RESUME_EVERY_S)

    def _takes_jobs(self, node: Node) -> bool:
        """Return whether the node takes jobs. If not, make Slurm ping the node, as it does by itself minutes later for
        a node that was down.
        """
        if self._state(node) in TAKES_JOBS:
            return True
        with suppress(RuntimeError):  # the node may be down already
            self.mark_down(node)
        with suppress(RuntimeError):
            self.lab.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        return False

    def _state(self, node: Node) -> str:
        return self.lab.run("sinfo", "--noheader", "--partition=low", f"--nodes={node}", "--format=%T").strip()

    # --- experiments and jobs

    def experiments(self) -> list[ExperimentFolder]:
        return list(ExperimentStore(Path(os.environ["HPC_DET_ROOT"])).folders())

    def jobs_of(self, experiment: ExperimentFolder) -> set[str]:
        """Return all jobs that were ever submitted: Slurm still lists those that have ended."""
        lines = self.lab.run("squeue", "--noheader", "--states=all", "--array", "--format=%i %Z").splitlines()
        jobs = (line.split(maxsplit=1) for line in lines)
        return {array_of(job) for job, folder in jobs if Path(folder).is_relative_to(experiment.path)}

    def check_all_jobs_are_known(self) -> None:
        """Assert that the files of each experiment name all its jobs, and that each job has an experiment."""
        for experiment in self.experiments():
            unknown = self.jobs_of(experiment) - known_jobs(experiment)
            assert not unknown, f"experiment {experiment.id} does not know its jobs {unknown}"
        submitted = self.lab.run("squeue", "--noheader", "--states=all", "--format=%Z").split()
        root = Path(os.environ["HPC_DET_ROOT"], "experiments")
        folders = {Path(work).relative_to(root).parts[0] for work in submitted if Path(work).is_relative_to(root)}
        assert folders <= {str(experiment.id) for experiment in self.experiments()}, "a job without its experiment"


def nodes_of(story: Story) -> list[Node]:
    """Return the nodes of its first attempt."""
    return read_json(story.trial.nodes(1)) or []


def terminate(story: Story) -> None:
    """Send TERM to its agents, as slurmstepd does when a job is preempted."""
    processes.send(processes.agents(story.trial.path), signal.SIGTERM)


def start_hpc_det(*arguments: object) -> subprocess.Popen[str]:
    """Start `hpc-det ARGUMENTS` in the background."""
    command = [str(COMMAND), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for its end, and return its result. Fail if it printed a traceback."""
    out, err = process.communicate(timeout=DEADLINE_S)
    assert "Traceback" not in out + err, err
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _number(node: Node) -> int:
    return int(node.removeprefix("node"))
