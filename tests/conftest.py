"""Fixtures of every test: a state folder, fixed seeds, no GPU, and a check that the test leaves nothing behind."""

from __future__ import annotations

import gc
import os
import pkgutil
import random
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from hpc_det.launch.node_folders import PREFIX, owned, remove_leftovers
from tests.labs import pbs_real, slurm
from tests.labs.isolation import forget_commands, forget_other_schedulers
from tests.labs.pbs_fixture import any_pbs as any_pbs
from tests.labs.pbs_fixture import pbs_lab as pbs_lab
from tests.leaks import LeakCheck
from tests.machine import busy
from tests.tiers import STARTERS, held_to_its_tier

forget_other_schedulers(os.environ, keep_pbs=pbs_real.ASKED_FOR)
# Not in /tmp, which each node of the lab has for itself. Tests that were killed have left such folders.
remove_leftovers("/var/tmp")
LINKS = tempfile.TemporaryDirectory(prefix=PREFIX, dir="/var/tmp")
OWNED = ExitStack()
OWNED.enter_context(owned(LINKS.name))
if not pbs_real.ASKED_FOR:
    os.chmod(LINKS.name, 0o755)  # tests also run as other users
    forget_commands(os.environ, Path(LINKS.name))

# Without this, a rank that runs alone takes one thread per core; where other processes use the cores, those threads
# mostly spin.
os.environ["OMP_NUM_THREADS"] = "1"

# The duration of an example depends more on other users of the cores than on the code. `make test` uses the same
# examples each time; `make chaos` draws more, random ones, and prints how to repeat one that fails.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", UNTIMED, max_examples=40, derandomize=True)
settings.register_profile("chaos", UNTIMED, max_examples=5000, print_blob=True, database=None)
settings.load_profile("steady")

MEMORY, ROOM = Path("/dev/shm"), 2**31
ENDS_S = 30 if pbs_real.ASKED_FOR else 2
"""Seconds that processes and threads have to end after a test. A job of a real PBS ends before the last of its
processes does.
"""


# A shell that starts these tests with `&` or nohup makes them ignore Ctrl-C or the hang-up of a terminal, and every
# command that receives such a signal from a test with them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are collected: imported modules are never garbage
    if config.option.markexpr == "chaos":
        settings.load_profile("chaos")
    _keep_temporary_folders_in_memory()


def pytest_unconfigure() -> None:
    LINKS.cleanup()
    OWNED.close()


def _keep_temporary_folders_in_memory() -> None:
    """Put temporary folders in memory where there is room: journals and checkpoints are synced, and on a busy disk a
    test would wait far longer for that than it computes. Tests of the lab still sync, to folders that all nodes see.
    """
    if pbs_real.ASKED_FOR:  # nodes see the home folder
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(Path.home()))
    elif MEMORY.is_dir():
        there = os.statvfs(MEMORY)
        takes_programs = not there.f_flag & os.ST_NOEXEC  # tests write executables
        if takes_programs and there.f_bavail * there.f_frsize >= ROOM:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.hookimpl(tryfirst=True)  # before other hooks deselect tests by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that use a fixture that starts processes, and for `make chaos` those that take more examples there."""
    for item in items:
        if STARTERS & {*getattr(item, "fixturenames", ())}:
            item.add_marker("integration")
        if config.option.markexpr == "chaos" and getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("chaos")


def pytest_collection_finish() -> None:
    """Exclude all imported objects from garbage collection: half a million objects cost half a second, in
    which every thread of a test waits.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with held_to_its_tier(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append((f"the machine, after {call.duration:.0f} s", busy()))
    return report


@pytest.fixture(scope="session")
def slurm_lab() -> Iterator[slurm.SlurmLab]:
    """Yield the real three-node Slurm. If it ran before the tests, it is left running."""
    if reason := slurm.available():
        pytest.skip(reason)
    was_running = slurm.SlurmLab.is_running()
    lab = slurm.SlurmLab.start()
    with lab.used_alone():
        yield lab
        if not was_running:
            lab.stop()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, a thread or a changed environment variable behind."""
    lab: slurm.SlurmLab | None = None
    if "slurm_lab" in request.fixturenames:
        assert request.node.get_closest_marker("slurm"), "without this mark, tests of other processes could use the lab"
        lab = request.getfixturevalue("slurm_lab")
    check = LeakCheck()
    yield
    if lab:
        lab.cancel_all()  # jobs inherit the environment of the test that submitted them
    if leaks := check.leaks(ENDS_S):
        pytest.fail("this test left behind:\n" + "\n".join(leaks), pytrace=False)


@pytest.fixture(autouse=True)
def _gpus(
    request: pytest.FixtureRequest,
    no_leaks: None,  # so that its check runs last
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hide the GPUs from all tests without the mark `gpu`: they test CPUs, or do not depend on the device."""
    if request.node.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch sees no GPU")
        return
    if "slurm_lab" not in request.fixturenames:  # the GPUs of the lab are not real
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for processes that the test starts
    if "torch" in sys.modules:  # it may have looked for GPUs already
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 0)


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Seed the random number generators, so that the draws of a test do not depend on the tests before it."""
    random.seed(0)
    for library, seed in (("numpy", "numpy.random.seed"), ("torch", "torch.manual_seed")):
        if library in sys.modules:
            pkgutil.resolve_name(seed)(0)


@pytest.fixture(scope="session", autouse=True)
def _not_at_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep module-wide and session-wide fixtures, which start before `state_folder`, out of the home folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPC_DET_ROOT", str(tmp_path_factory.mktemp("shared_root")))
        yield


@pytest.fixture(scope="session")
def _state_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a separate parent folder: pytest looks through all its folders to number a new one, which takes long with
    one per test.
    """
    return tmp_path_factory.mktemp("states")


@pytest.fixture(autouse=True)
def state_folder(
    request: pytest.FixtureRequest,
    no_leaks: None,  # so that its check runs last, after all variables set here and by the test are restored
    monkeypatch: pytest.MonkeyPatch,
    _state_folders: Path,
) -> Path:
    """Return `$HPC_DET_ROOT` of one test, never in the home folder; all nodes see it in a test of the lab."""
    if "slurm_lab" in request.fixturenames:
        lab: slurm.SlurmLab = request.getfixturevalue("slurm_lab")
        folder = lab.folder()
    else:
        folder = Path(tempfile.mkdtemp(dir=_state_folders))
    monkeypatch.setenv("HPC_DET_ROOT", str(folder))
    return folder
