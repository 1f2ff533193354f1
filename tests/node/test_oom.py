"""The counters of the OOM killer in files like the kernel's."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpc_det.node import oom
from hpc_det.node.oom import OomWatch
from tests.facts import unnamed


class Kernel:
    """Files like those of the kernel."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.own = root / "cgroup", root / "own"
        self.vmstat, self.log = root / "vmstat", root / "kmsg"
        self.log.touch()
        self.node_has_killed(0)
        for name, path in (("_VMSTAT", self.vmstat), ("_OWN", self.own), ("_CGROUPS", self.root)):
            monkeypatch.setattr(oom, name, path)
        monkeypatch.setattr(oom, "_KERNEL_LOG", self.log)

    def node_has_killed(self, count: int) -> None:
        self.vmstat.write_text(f"nr_free_pages 7\noom_kill {count}\npgfault 9\n")

    def cgroup_has_killed(self, path: str, count: int, name: str = "memory.events", head: str = "") -> None:
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{head}oom 1\noom_kill {count}\noom_group_kill 0\n")


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(tmp_path, monkeypatch)


def test_a_kill_at_the_jobs_limit_is_counted_in_the_cgroup_of_the_job(kernel: Kernel) -> None:
    """The rank of another step of the job is killed: only the job's cgroup counts it."""
    kernel.own.write_text("0::/slurm/job_4/step_0/user/task_0\n")
    kernel.cgroup_has_killed("slurm/job_4/step_0/user/task_0", 0)
    kernel.cgroup_has_killed("slurm/job_4", 2)
    kernel.cgroup_has_killed("slurm", 7)
    (kernel.root / "slurm/job_4/memory.max").write_text(f"{4 << 30}\n")
    watch = OomWatch()
    kernel.cgroup_has_killed("slurm", 9)  # of another job
    assert not watch.has_killed
    kernel.cgroup_has_killed("slurm/job_4", 3)
    assert watch.has_killed
    assert unnamed(watch.killer(), "OOM killer", "1 process", "4.0 GiB", "mem_per_node") == []


def test_cgroup_v1_counts_in_memory_oom_control(kernel: Kernel) -> None:
    kernel.own.write_text("9:name=systemd:/\n4:memory:/slurm/uid_0/job_4/step_0/task_0\n0::/\n")
    path, name = "memory/slurm/uid_0/job_4/step_0/task_0", "memory.oom_control"
    kernel.cgroup_has_killed(path, 1, name)
    (kernel.root / path / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    watch = OomWatch()
    kernel.cgroup_has_killed(path, 3, name)
    assert unnamed(watch.killer(), "OOM killer", "2 processes") == []
    assert "GiB" not in watch.killer()


def test_a_kill_elsewhere_on_the_node_is_probable_and_the_kernel_log_names_it(kernel: Kernel) -> None:
    kernel.own.write_text("0::/\n")
    watch = OomWatch()
    kernel.node_has_killed(1)
    microseconds = int(time.monotonic() * 1e6)
    kernel.log.write_text(f"3,77,{microseconds},-;Out of memory: Killed process 4711 (python3) total-vm:9kB, ...\n")
    assert watch.has_killed
    assert unnamed(watch.killer(), "OOM killer", "1 process on this node", "probably", "4711", "python3") == []


def test_processes_that_were_killed_before_are_not_named(kernel: Kernel) -> None:
    kernel.own.write_text("0::/\n")
    kernel.log.write_text("3,77,1,-;Out of memory: Killed process 4711 (python3) total-vm:9kB, ...\n")
    watch = OomWatch()
    kernel.node_has_killed(1)
    assert "4711" not in watch.killer()


def test_without_a_kill_somebody_else_has_sent_the_signal(kernel: Kernel) -> None:
    kernel.own.write_text("0::/\n")
    watch = OomWatch()
    assert not watch.has_killed
    assert unnamed(watch.killer(), "OOM killer ended no process", "a user", "scheduler") == []


def test_without_counters_nothing_is_known(kernel: Kernel) -> None:
    kernel.vmstat.unlink()
    kernel.log.unlink()
    assert OomWatch().killer() == ""
