"""What every test gets: a state folder of its own, and a check that it leaves nothing behind."""

from __future__ import annotations

import gc
import os
import pkgutil
import random
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.labs import pbs_real, slurm
from tests.labs.isolation import forget_other_schedulers
from tests.labs.pbs_fixture import any_pbs as any_pbs
from tests.labs.pbs_fixture import pbs_lab as pbs_lab
from tests.leaks import LeakCheck
from tests.machine import busy
from tests.tiers import STARTERS, held_to_its_tier

forget_other_schedulers(os.environ, keep_pbs=pbs_real.ASKED_FOR)

# A rank that is alone takes a thread for each core, and where others want the cores, too, its threads mostly spin.
os.environ["OMP_NUM_THREADS"] = "1"

# How long an example takes says more about who else wants the cores than about the code. `make test` takes the same
# examples each time; `make chaos` draws others, and more of them, and prints how to repeat one that fails.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", UNTIMED, max_examples=40, derandomize=True)
settings.register_profile("chaos", UNTIMED, max_examples=5000, print_blob=True, database=None)
settings.load_profile("steady")

MEMORY, ROOM = Path("/dev/shm"), 2**31
ENDS_S = 30 if pbs_real.ASKED_FOR else 2
"""What a test has told to end may take so long. A job of a real PBS has ended before the last of its processes."""


# A shell that starts these tests with `&` or nohup has them ignore Ctrl-C or the end of a terminal, and with them every
# command that a test sends one.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are collected: what they import stays
    if config.option.markexpr == "chaos":
        settings.load_profile("chaos")
    _keep_temporary_folders_in_memory()


def _keep_temporary_folders_in_memory() -> None:
    """Temporary folders lie in memory, where there is room. Journals and checkpoints are synced: on a busy disk a test
    would wait for that far longer than it computes. Those of the lab do, and write where all nodes see it.
    """
    if pbs_real.ASKED_FOR:  # nodes see the home folder
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(Path.home()))
    elif MEMORY.is_dir():
        there = os.statvfs(MEMORY)
        takes_programs = not there.f_flag & os.ST_NOEXEC  # tests write some
        if takes_programs and there.f_bavail * there.f_frsize >= ROOM:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.hookimpl(tryfirst=True)  # before others are left out by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what uses a fixture that starts processes, and for `make chaos` what takes more examples there."""
    for item in items:
        if STARTERS & {*getattr(item, "fixturenames", ())}:
            item.add_marker("integration")
        if config.option.markexpr == "chaos" and getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("chaos")


def pytest_collection_finish() -> None:
    """What all tests have imported stays, and nobody looks through it for garbage: half a million objects, and half a
    second in which every thread of a test stands still.
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
    """The real three-node Slurm; one that ran before the tests is left running."""
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
    """A test that leaves a process, a thread or a changed environment variable behind fails."""
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
    no_leaks: None,  # so that it looks last
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For tests with the mark `gpu` alone: the others are about CPUs, or do not care."""
    if request.node.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch sees no GPU")
        return
    if "slurm_lab" not in request.fixturenames:  # its GPUs are none
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for processes that the test starts
    if "torch" in sys.modules:  # which may have looked already
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 0)


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Whatever has drawn in this process before."""
    random.seed(0)
    for library, seed in (("numpy", "numpy.random.seed"), ("torch", "torch.manual_seed")):
        if library in sys.modules:
            pkgutil.resolve_name(seed)(0)


@pytest.fixture(scope="session", autouse=True)
def _not_at_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For fixtures that several tests share, which begin before `state_folder`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPC_DET_ROOT", str(tmp_path_factory.mktemp("shared_root")))
        yield


@pytest.fixture(scope="session")
def _state_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Apart: pytest looks through all its folders to number another, which takes long when each test has one."""
    return tmp_path_factory.mktemp("states")


@pytest.fixture(autouse=True)
def state_folder(
    request: pytest.FixtureRequest,
    no_leaks: None,  # so that it looks last, after all that this and the test set is unset
    monkeypatch: pytest.MonkeyPatch,
    _state_folders: Path,
) -> Path:
    """`$HPC_DET_ROOT` of one test, never the home folder; where all nodes see it for a test of the lab."""
    if "slurm_lab" in request.fixturenames:
        lab: slurm.SlurmLab = request.getfixturevalue("slurm_lab")
        folder = lab.folder()
    else:
        folder = Path(tempfile.mkdtemp(dir=_state_folders))
    monkeypatch.setenv("HPC_DET_ROOT", str(folder))
    return folder
