"""faults.c misses no change: strace, which sees all system calls, counts the same number."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.chaos.injection import zygote
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.test_disk import ScenarioRunner

CHANGES = {
    *("write", "pwrite64", "writev", "pwritev", "pwritev2", "sendfile", "copy_file_range", "splice", "io_uring_setup"),
    *("rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat", "unlink", "unlinkat", "mkdir"),
    *("mkdirat", "rmdir", "mknod", "mknodat", "truncate", "ftruncate", "fallocate", "fsync", "fdatasync", "msync"),
    *("sync_file_range", "chmod", "fchmod", "fchmodat", "utimensat", "setxattr", "fsetxattr", "io_submit"),
}
OPENS = {"open", "openat", "openat2", "creat"}
CALL = re.compile(r"^\d+ +(\w+)\((.*)$")


def changes_below(folder: Path, trace: Path) -> list[str]:
    lines = (CALL.match(line) for line in trace.read_text(errors="replace").splitlines() if str(folder) in line)
    calls = [(found[1], found[2]) for found in lines if found]
    mapped = [name for name, rest in calls if name == "mmap" and "MAP_SHARED" in rest and "PROT_WRITE" in rest]
    opened = [name for name, rest in calls if name in OPENS and re.search("O_CREAT|O_TRUNC", rest)]
    return [*mapped, *opened, *(name for name, _ in calls if name in CHANGES)]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strace") / "trace"


@pytest.fixture(scope="module")
def traced(trace: Path) -> list[str]:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    calls = ",".join(sorted({*CHANGES, *OPENS, "mmap"}))
    return [strace, "--seccomp-bpf", "-f", "-qq", "-y", "-s", "0", "-e", f"trace={calls}", "-o", str(trace)]


@pytest.mark.chaos
def test_no_change_goes_past_the_faults(
    traced: list[str], trace: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with zygote(tmp_path_factory.mktemp("faults"), "tests.chaos.scenarios", traced_by=traced) as made:
        runs = {}
        for name in SCENARIOS:
            runner = ScenarioRunner(made, name, tmp_path / name)
            folder = runner.folder()
            run = runner.run(folder)
            assert run.failed is None
            runs[folder] = run.made
    counted = {str(folder): len(changes_below(folder, trace)) for folder in runs}
    assert counted == {str(folder): number for folder, number in runs.items()}
