"""Commands are killed at each of their changes in the state folder, the disk fails there, or the power is cut.

No job remains that is not listed, none is submitted twice, and the same command, repeated, completes its work.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_det.store.experiments import ExperimentStore
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.watch import state
from tests.chaos.injection import Fault, FaultKind, Run, Zygote, zygote
from tests.chaos.replay import Disk, Survives, changes
from tests.chaos.table import SAMPLED_IN_LONG, Amount, Tally
from tests.cli.conftest import Command
from tests.cli.conftest import code as code
from tests.cli.conftest import config as config
from tests.cli.conftest import hpc_det as hpc_det
from tests.cli.conftest import root as root
from tests.cli.conftest import umask as umask
from tests.cli.submissions import ARRAYS, Queue, in_a_process, is_settled
from tests.cli.submissions import arguments as arguments
from tests.cli.submissions import queue as queue
from tests.stub import stub as stub

pytestmark = pytest.mark.integration

SAMPLE = 1
"""Number of changes per command and kind of trouble in a sample."""


@pytest.fixture(scope="module")
def zygote_of_commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with zygote(tmp_path_factory.mktemp("faults"), "tests.chaos.commands") as made:
        yield made


@dataclass
class Sandbox:
    """A state folder and a queue, which can be reset to the state before the command."""

    zygote: Zygote
    hpc_det: Command
    root: Path
    queue: Queue
    saved: Path

    def save(self) -> None:
        self.root.mkdir(exist_ok=True)
        shutil.copytree(self.root, self.saved / "root", symlinks=True)
        shutil.copytree(self.queue.folder, self.saved / "queue")

    def begin_again(self) -> None:
        for folder in (self.root, self.queue.folder):
            shutil.rmtree(folder)
            shutil.copytree(self.saved / folder.name, folder, symlinks=True)

    def lose_power(self, disk: Disk, survives: Survives, jobs: Path) -> None:
        """Replace the state folder by what `disk` keeps; the scheduler, on another machine, still has these jobs."""
        shutil.rmtree(self.root)
        disk.write(self.root, survives)
        shutil.rmtree(self.queue.folder)
        shutil.copytree(jobs, self.queue.folder)

    def run(self, arguments: Sequence[str], fault: Fault, records: Path | None = None) -> Run:
        self.begin_again()
        environment = {name: os.environ[name] for name in ("HPC_DET_ROOT", "PATH")}
        return self.zygote.run(
            "tests.chaos.commands:command",
            self.root,
            fault,
            records,
            arguments=[*arguments],
            environment=environment,
        )

    def state(self) -> ExperimentState | None:
        """Return the state of experiment 1, or None if it does not exist."""
        shown = list(ExperimentStore(self.root).all())
        return state(ExperimentView(shown[0])) if shown else None


@dataclass(frozen=True)
class CommandCase:
    before: Sequence[Sequence[str]]
    """Commands that come before."""
    command: Sequence[str]
    """The disturbed command."""
    again: Sequence[str]
    """A command that follows, which finds the work done, or does it."""
    ends: ExperimentState | None
    """The state after that."""
    jobs: int
    """The number of jobs in the queue after that."""
    may_be: tuple[ExperimentState, ...] = ()
    """Permitted states between the two commands, beside QUEUED and PAUSED."""

    @property
    def what(self) -> str:
        """The row of the table."""
        return "commands that submit jobs" if self.jobs else "commands that end jobs"

    def given(self, create: Sequence[str]) -> Sequence[str]:
        return create if self.command is CREATE else self.command


CREATE = ("e", "create")
CASES = {
    "create": CommandCase([], CREATE, ("e", "activate", "1"), ExperimentState.QUEUED, 1),
    "activate": CommandCase(
        [CREATE, ("e", "pause", "1")], ("e", "activate", "1"), ("e", "activate", "1"), ExperimentState.QUEUED, 1
    ),
    "continue": CommandCase(
        [CREATE, ("e", "kill", "1")],
        ("e", "continue", "1"),
        ("e", "continue", "1"),
        ExperimentState.QUEUED,
        1,
    ),
    "pause": CommandCase([CREATE], ("e", "pause", "1"), ("e", "pause", "1"), ExperimentState.PAUSED, 0),
    "kill": CommandCase([CREATE], ("e", "kill", "1"), ("e", "kill", "1"), ExperimentState.CANCELED, 0),
    "delete": CommandCase(
        [CREATE, ("e", "kill", "1")], ("e", "delete", "1", "--yes"), ("e", "delete", "1", "--yes"), None, 0
    ),
    "kill, then delete": CommandCase(
        [CREATE], ("e", "kill", "1"), ("e", "delete", "1", "--yes"), None, 0, may_be=(ExperimentState.CANCELED,)
    ),
}


@pytest.fixture
def sandbox(
    zygote_of_commands: Zygote, hpc_det: Command, root: Path, config: Path, queue: Queue, tmp_path: Path
) -> Sandbox:
    config.write_text(ARRAYS)
    return Sandbox(zygote_of_commands, hpc_det, root, queue, tmp_path / "saved")


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, sandbox: Sandbox, arguments: list[str]) -> CommandCase:
    return prepared(sandbox, CASES[request.param], arguments)


def prepared(sandbox: Sandbox, case: CommandCase, arguments: list[str]) -> CommandCase:
    """Run the commands that come before the case."""
    for each in case.before:
        assert in_a_process(arguments if each is CREATE else [*each]) == 0
    sandbox.save()
    return case


def check_nothing_is_half_done(sandbox: Sandbox, case: CommandCase, before: ExperimentState | None) -> None:
    """Check the state after a command that looks at all experiments; then check that the repeated command completes its
    work.
    """
    assert sandbox.hpc_det("e", "list").code == 0
    is_settled(
        sandbox.root, sandbox.queue, before, ExperimentState.QUEUED, ExperimentState.PAUSED, *case.may_be, case.ends
    )
    assert len(sandbox.queue.jobs()) <= 1, "nothing is submitted twice"
    found = sandbox.state()
    if found is None:
        assert before is None or case.ends is None
        assert sandbox.queue.jobs() == []
        return
    activates = found is ExperimentState.PAUSED and case.ends is ExperimentState.QUEUED
    if case.ends is None and not found.is_final:
        sandbox.hpc_det("e", "kill", "1")
    assert sandbox.hpc_det(*(("e", "activate", "1") if activates else case.again)).code in (0, 2)
    assert (sandbox.state(), len(sandbox.queue.jobs())) == (case.ends, case.jobs)


def undisturbed(sandbox: Sandbox, command: Sequence[str], records: Path | None = None) -> Run:
    run = sandbox.run(command, Fault(), records)
    assert run.failed is None
    assert said_code(run) == 0
    return run


@SAMPLED_IN_LONG
def test_a_command_that_is_killed_leaves_nothing_half_done(
    sandbox: Sandbox, case: CommandCase, arguments: list[str], amount: Amount, tally: Tally
) -> None:
    command, before, records = case.given(arguments), sandbox.state(), sandbox.saved / "records"
    made = undisturbed(sandbox, command, records).made
    every = {how: range(1, made + 1) for how in (FaultKind.KILL_BEFORE, FaultKind.KILL_AFTER)}
    writes = [change.number for change in changes(records) if change.kind == "write"]
    for how, numbers in [*every.items(), (FaultKind.KILL_WITHIN, writes)]:
        for number in amount.of(numbers, SAMPLE):
            if sandbox.run(command, Fault(how, number)).killed:  # not every run makes the last changes
                with tally.trying(f"{case.what}: killed"):
                    check_nothing_is_half_done(sandbox, case, before)


@SAMPLED_IN_LONG
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_create_that_gets_a_signal_leaves_nothing_or_a_whole_experiment(
    sandbox: Sandbox, arguments: list[str], amount: Amount, tally: Tally, number: signal.Signals
) -> None:
    records = sandbox.saved / "records"
    sandbox.save()
    made = undisturbed(sandbox, arguments, records).made
    queued = next(change.number for change in changes(records) if Path(change.second).match("jobs/1.json"))
    for at in amount.of(range(1, made + 1), SAMPLE):
        run = sandbox.run(arguments, Fault(FaultKind.SIGNAL, at, number))
        ended = said_code(run)
        with tally.trying("commands that submit jobs: signals"):
            assert run.failed is None or "wait status" in run.failed, "no traceback"
            assert ended in (None, 0, 128 + number)
            left = [folder for folder in ExperimentStore(sandbox.root).folders() if any(folder.path.iterdir())]
            assert len(sandbox.queue.jobs()) == len(left)
            assert not left or ended == 0 or at > queued
            if left and ended is not None:
                is_settled(sandbox.root, sandbox.queue, ExperimentState.QUEUED)


def said_code(run: Run) -> int | None:
    """Return the exit code, or None if the signal ended the process at once, before it had anything to clean up."""
    return run.said[0][1] if run.said else None


@SAMPLED_IN_LONG
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_create_that_the_disk_fails_says_so_and_leaves_no_job_unknown(
    sandbox: Sandbox, arguments: list[str], amount: Amount, tally: Tally, error: int
) -> None:
    case = CASES["create"]
    sandbox.save()
    made = undisturbed(sandbox, arguments).made
    for times in (1, 1_000_000):
        for at in amount.of(range(1, made + 1), SAMPLE):
            run = sandbox.run(arguments, Fault(FaultKind.FAIL, at, error, times))
            with tally.trying("commands that submit jobs: errors of the disk"):
                assert run.failed is None, "a sentence, and no traceback"
                assert said_code(run) != 0 or sandbox.queue.jobs()
                check_nothing_is_half_done(sandbox, case, None)


@SAMPLED_IN_LONG
@pytest.mark.parametrize("name", ["create", "activate", "continue"])
def test_a_power_cut_within_a_command_loses_no_job_and_repeats_none(
    sandbox: Sandbox, arguments: list[str], tmp_path: Path, amount: Amount, tally: Tally, name: str
) -> None:
    case = prepared(sandbox, CASES[name], arguments)
    command, before, disk, records = case.given(arguments), sandbox.state(), Disk(sandbox.root), tmp_path / "records"
    made = undisturbed(sandbox, command, records).made
    for at in range(1, made + 2) if amount.is_all else [after_sbatch(records, sandbox.queue.jobs()[0])]:
        records.unlink()
        run = sandbox.run(command, Fault(FaultKind.KILL_BEFORE, at), records)
        left = deepcopy(disk)
        for change in changes(records):
            left.apply(change)
        jobs = shutil.copytree(sandbox.queue.folder, tmp_path / f"jobs-{at}")
        assert run.killed or at > made
        assert amount.is_all or sandbox.queue.jobs()
        for survives in amount.of([*Survives], 2):
            with tally.trying("commands that submit jobs: power cuts"):
                sandbox.lose_power(left, survives, jobs)
                check_nothing_is_half_done(sandbox, case, before)


def after_sbatch(records: Path, job: str) -> int:
    """Return the first change after the call of sbatch: submitit names its script after the job."""
    renames = (change for change in changes(records) if change.kind == "rename")
    return next(change.number for change in renames if Path(change.second).name.startswith(job))


@SAMPLED_IN_LONG
@pytest.mark.parametrize("survives", Survives)
def test_what_create_has_made_survives_a_power_cut(
    sandbox: Sandbox, arguments: list[str], tmp_path: Path, amount: Amount, tally: Tally, survives: Survives
) -> None:
    """A job that waits in the queue would otherwise train with empty files of code."""
    sandbox.save()
    disk, records = Disk(sandbox.root), tmp_path / "records"
    undisturbed(sandbox, arguments, records)
    for change in changes(records):
        disk.apply(change)
    with tally.trying("commands that submit jobs: power cuts"):
        disk.write(tmp_path / "left", survives)
        assert contents(tmp_path / "left") == contents(sandbox.root)


def contents(root: Path) -> dict[str, bytes]:
    """Return the files of the experiments, without those of submitit, and those that the next command updates."""
    below, others = root / "experiments", {"submitit", "submitting.json"}
    files = (path for path in below.rglob("*") if path.is_file() and not {path.name, path.parent.name} & others)
    return {str(path.relative_to(below)): path.read_bytes() for path in files}
