"""Agents, launchers and ranks run in a copy of the Python environment on their node's local disk."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpc_det.launch import staged
from hpc_det.launch.agent import with_own_python
from hpc_det.launch.mounted_image import MOUNTERS
from hpc_det.node import environment_archive, mounts
from hpc_det.node.environment_archive import ORIGIN, on_any_node, shared_python
from hpc_det.submit.stage import archive_path, write_archive
from tests.launch.gang import Gang
from tests.plan.plans import job_plan
from tests.small_environment import Environment
from tests.stub import Stub
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.integration

SHOWS = """
import os, subprocess, sys, staged_package
agent = os.getppid()
while "hpc_det.launch.agent" not in open(f"/proc/{agent}/cmdline").read().split("\\0"):
    agent = int(open(f"/proc/{agent}/stat").read().rpartition(")")[2].split()[1])
with open(f"rank-{os.environ['RANK']}", "w") as file:
    print(sys.prefix, file=file)
    print(staged_package.__file__, file=file)
    print(open(f"/proc/{agent}/cmdline").read().split("\\0")[0], file=file)
    print(subprocess.run(["staged-script"], capture_output=True, text=True).stdout, end="", file=file)
"""
PRINTS = ["timeit", "-n1", "-r1", "import sys; print(sys.prefix)"]
"""A module and its arguments in place of the agent's."""
needs_images = pytest.mark.skipif(
    not (
        shutil.which("mksquashfs")
        and any(map(shutil.which, MOUNTERS))
        and os.access("/dev/fuse", os.R_OK | os.W_OK)
        and any(map(shutil.which, ("fusermount3", "fusermount", "umount")))
    ),
    reason="needs mksquashfs, squashfuse and /dev/fuse",
)
KINDS = ["tar", pytest.param("image", marks=needs_images)]


class Node:
    """An environment with its archive, and a folder on the local disk of a node."""

    def __init__(self, environment: Environment, root: Path, disk: Path) -> None:
        self.environment, self.disk, self._root = environment, disk, root
        self.archive = archive_path(root, "tar")

    def write(self, kind: str = "tar") -> None:
        self.archive = archive_path(self._root, kind)
        write_archive(self.archive)

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a module as a node's agent is started."""
        words = [self.environment.python, "-m", "hpc_det.launch.staged", str(self.archive), str(self.disk)]
        return subprocess.Popen(
            [*words, *(command or PRINTS)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, *command: str) -> tuple[str, str]:
        """Run a module as a node's agent; return its first line of output and what it printed to stderr."""
        printed, said = self.start(*command).communicate(timeout=DEADLINE_S)
        return printed.split("\n")[0], said

    @property
    def copies(self) -> list[Path]:
        return [mark.parent for mark in self.disk.glob(f"*/*/{ORIGIN}")]

    @property
    def copy(self) -> Path:
        (copy,) = self.copies
        return copy


@pytest.fixture(name="node")
def _node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    disk = tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setenv("TMPDIR", str(disk))  # the node has no other folder for copies
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    environment = Environment.make(tmp_path / "venv", monkeypatch)
    return Node(environment, tmp_path / "root", disk)


@contextmanager
def in_use(copy: Path) -> Iterator[None]:
    """Lock a copy within the block, as an agent does."""
    lock = os.open(copy, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    yield
    os.close(lock)


def run_job(gang: Gang, node: Node, entrypoint: Sequence[str] | str) -> int:
    (gang.code / "train.py").write_text(SHOWS)
    gang.plan(entrypoint, python=node.environment.python, stage=str(node.archive), scratch=str(node.disk))
    return gang.start_script().wait(timeout=DEADLINE_S)


def shown(gang: Gang) -> list[list[str]]:
    return [(gang.code / f"rank-{rank}").read_text().splitlines() for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_of_a_shell", [False, True])
def test_agent_ranks_and_console_scripts_of_a_job_use_the_copy(
    gang: Gang, node: Node, kind: str, is_of_a_shell: bool
) -> None:
    node.write(kind)
    words = ["-m", "hpc_det.launch.direct", "train.py"]
    entrypoint = f"python3 {' '.join(words)}" if is_of_a_shell else [node.environment.python, *words]
    assert run_job(gang, node, entrypoint) == 0, gang.trial.job_log.read_text()
    for prefix, package, python, script in shown(gang):
        env = Path(prefix)
        assert env.parent == node.copy
        assert Path(package).is_relative_to(env)
        assert Path(python) == env / "bin" / "python3"
        assert script == prefix
    assert str(node.disk) not in mounts.MOUNTS.read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_job_uses_the_copy_of_a_former_one(node: Node, kind: str) -> None:
    node.write(kind)
    first, said = node.run()
    made = os.stat(node.copy).st_ino
    assert first.startswith(str(node.disk))
    assert "copied" in said
    assert node.run() == (first, "")
    assert os.stat(node.copy).st_ino == made


def test_two_jobs_at_once_make_one_copy(node: Node) -> None:
    node.write()
    jobs = [node.start() for _ in range(2)]
    ends = [job.communicate(timeout=DEADLINE_S) for job in jobs]
    assert {printed.split("\n")[0] for printed, _ in ends} == {str(node.copy / "env")}
    assert sum("copied" in said for _, said in ends) == 1


@pytest.mark.parametrize("change", ["removed", "added", "edited", "without its mark"])
def test_a_copy_whose_files_were_changed_is_made_again(node: Node, change: str) -> None:
    node.write()
    node.run()
    module = next(node.copy.rglob("staged_package.py"))
    match change:
        case "removed":
            module.unlink()
        case "added":
            module.with_name("installed_by_a_hook.py").touch()
        case "without its mark":
            (node.copy / ORIGIN).unlink()
        case "edited":
            module.write_text("")
    assert "copied" in node.run()[1]
    assert module.read_text() == "value = 1\n"
    assert not module.with_name("installed_by_a_hook.py").exists()


def test_what_an_interrupted_job_has_left_is_removed(node: Node) -> None:
    node.write()
    node.run()
    part = node.copy.with_name(f".{node.copy.name}")
    node.copy.rename(part)
    (part / ORIGIN).unlink()
    assert node.run()[0] == str(node.copy / "env")
    assert not part.exists()


def test_a_copy_of_a_former_archive_is_removed_unless_a_job_uses_it(node: Node) -> None:
    node.write()
    node.run()
    former = node.copy
    with in_use(former):
        node.environment.install("later")
        node.write()
        assert node.run()[0].startswith(str(node.disk))
        assert former in node.copies
    node.environment.install("last")
    node.write()
    node.run()
    assert len(node.copies) == 1


def test_a_damaged_copy_that_a_job_uses_is_left_alone(node: Node) -> None:
    node.write()
    node.run()
    next(node.copy.rglob("staged_package.py")).unlink()
    with in_use(node.copy):
        prefix, said = node.run()
    assert prefix == str(node.environment.prefix)
    assert "another job uses it" in said


def falls_back(node: Node, *facts: str) -> None:
    """Assert that a job runs in the environment itself, and that one line says why."""
    prefix, said = node.run()
    assert prefix == str(node.environment.prefix)
    assert said.count("\n") == 1
    assert [fact for fact in (str(node.environment.prefix), *facts) if fact not in said] == []
    assert node.copies == []


def test_without_an_archive_a_job_uses_the_environment_itself(node: Node) -> None:
    falls_back(node, str(node.archive), "hpc-det environment stage")


def test_a_job_does_not_use_the_archive_of_packages_that_were_changed(node: Node) -> None:
    node.write()
    node.environment.install("later")
    falls_back(node, str(node.environment.site), "hpc-det environment stage")


def test_a_job_uses_the_environment_itself_if_the_archive_is_damaged(
    node: Node,
) -> None:
    node.write()
    with node.archive.open("r+b") as file:
        file.seek(1024)
        file.write(bytes(range(256)) * 8)
    falls_back(node, "hpc-det")
    assert [path.suffix for path in next(node.disk.iterdir()).iterdir()] == [".lock"]


@pytest.mark.parametrize(("tool", "kind"), [("tar", "tar"), ("squashfuse_ll", "image")])
def test_a_job_uses_the_environment_itself_if_a_tool_fails(node: Node, stub: Stub, tool: str, kind: str) -> None:
    if kind == "image" and not shutil.which("mksquashfs"):
        pytest.skip("needs mksquashfs")
    node.write(kind)
    for name in {tool, "squashfuse"}:
        stub(name, "echo 'no such luck' >&2; exit 1")
    prefix, said = node.run()
    assert prefix == str(node.environment.prefix)
    assert said.count("failed: no such luck") == 1
    assert str(node.disk) not in mounts.MOUNTS.read_text()


def test_a_disk_without_space_or_on_a_shared_file_system_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert staged.why_unsuitable(str(tmp_path), 0) is None
    assert "GB free" in str(staged.why_unsuitable(str(tmp_path), 1 << 60))
    assert "is not a folder" in str(staged.why_unsuitable(str(tmp_path / "missing"), 0))
    shared = tmp_path / "mounts"
    shared.write_text("server:/tmp / nfs4 rw 0 0\n")
    monkeypatch.setattr(mounts, "MOUNTS", shared)
    assert "nfs4" in str(staged.why_unsuitable(str(tmp_path), 0))


def test_a_folder_of_another_kind_or_mode_with_the_name_of_ours_is_not_used(node: Node, tmp_path: Path) -> None:
    node.write()
    home = node.disk / f"hpc-det-stage-{os.geteuid()}"
    home.mkdir()
    home.chmod(0o777)
    falls_back(node, str(home))
    home.rmdir()
    home.symlink_to(tmp_path)
    falls_back(node, str(home))


def test_a_stop_signal_ends_the_copying_and_reaches_the_agent(node: Node, stub: Stub, tmp_path: Path) -> None:
    node.write()
    stub("tar", f"touch {tmp_path / 'began'}; exec sleep {DEADLINE_S}")
    waits = (
        "import signal, time; print(signal.sigpending(), flush=True); signal.pthread_sigmask(signal.SIG_UNBLOCK, {15})"
    )
    job = node.start("timeit", "-n1", "-r1", waits)
    wait_for((tmp_path / "began").exists)
    job.send_signal(signal.SIGTERM)
    printed, said = job.communicate(timeout=DEADLINE_S)
    assert "SIGTERM" in printed
    assert "stop signal" in said
    assert job.returncode == -signal.SIGTERM


@needs_images
def test_the_mount_of_an_agent_that_was_killed_is_removed(node: Node) -> None:
    node.write("image")
    job = node.start("timeit", "-n1", "-r1", "import time; print('began', flush=True); time.sleep(1e6)")
    assert job.stdout is not None
    assert job.stdout.readline() == "began\n"
    assert str(node.disk) in mounts.MOUNTS.read_text()
    job.kill()
    job.communicate()
    wait_for(lambda: str(node.disk) not in mounts.MOUNTS.read_text())


def test_a_copy_knows_the_path_of_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_python() == sys.executable
    assert on_any_node(sys.executable) == [sys.executable]
    (tmp_path / ORIGIN).write_text("/shared/venv")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "bin" / "python3"))
    assert shared_python() == "/shared/venv/bin/python3"
    plan = job_plan(python="/shared/venv/bin/python3", entrypoint=("/shared/venv/bin/python3", "train.py"))
    assert with_own_python(plan).entrypoint == (sys.executable, "train.py")


def test_another_node_without_the_copy_runs_the_shared_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_archive, "shared_python", lambda: "/bin/echo")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    command = [*on_any_node(sys.executable), "-m", "module"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "-m module\n"
    shutil.copy("/bin/true", tmp_path / "python3")
    assert subprocess.run(command, capture_output=True, text=True).stdout == ""
