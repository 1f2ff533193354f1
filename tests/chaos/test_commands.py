"""Commands are killed at each of their changes in the state folder, or the disk fails there.

No job is left that no list shows, none is submitted twice, and the same command, given once more, does its work.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_det.store.experiments import ExperimentStore
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.watch import state
from tests.chaos.injection import Fault, How, Run, Zygote, zygote
from tests.chaos.replay import Disk, Survives, changes
from tests.chaos.table import Amount, Tally
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

SAMPLE = 1
"""Of the changes of each command and kind of trouble, in `make test`."""


@pytest.fixture(scope="module")
def zygote_of_commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with zygote(tmp_path_factory.mktemp("faults"), "tests.chaos.commands") as made:
        yield made


@dataclass
class Site:
    """A state folder and a queue, which begin again with what was there before the command."""

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
        """Of experiment 1, if it is there."""
        shown = list(ExperimentStore(self.root).all())
        return state(ExperimentView(shown[0])) if shown else None


@dataclass(frozen=True)
class Story:
    before: Sequence[Sequence[str]]
    """Commands."""
    command: Sequence[str]
    """The one that is disturbed; none: `create`."""
    again: Sequence[str]
    """Given after it, it finds all done, or does it."""
    ends: ExperimentState | None
    """Then."""
    jobs: int
    """In the queue then."""
    may_be: tuple[ExperimentState, ...] = ()
    """Between the two, beside QUEUED and PAUSED."""

    @property
    def what(self) -> str:
        """In the table."""
        return "commands that submit jobs" if self.jobs else "commands that end jobs"

    def given(self, create: Sequence[str]) -> Sequence[str]:
        return create if self.command is CREATE else self.command


CREATE = ("e", "create")
STORIES = {
    "create": Story([], CREATE, ("e", "activate", "1"), ExperimentState.QUEUED, 1),
    "activate": Story(
        [CREATE, ("e", "pause", "1")], ("e", "activate", "1"), ("e", "activate", "1"), ExperimentState.QUEUED, 1
    ),
    "continue": Story(
        [CREATE, ("e", "kill", "1")],
        ("e", "continue", "1"),
        ("e", "continue", "1"),
        ExperimentState.QUEUED,
        1,
    ),
    "pause": Story([CREATE], ("e", "pause", "1"), ("e", "pause", "1"), ExperimentState.PAUSED, 0),
    "kill": Story([CREATE], ("e", "kill", "1"), ("e", "kill", "1"), ExperimentState.CANCELED, 0),
    "delete": Story(
        [CREATE, ("e", "kill", "1")], ("e", "delete", "1", "--yes"), ("e", "delete", "1", "--yes"), None, 0
    ),
    "kill, then delete": Story(
        [CREATE], ("e", "kill", "1"), ("e", "delete", "1", "--yes"), None, 0, may_be=(ExperimentState.CANCELED,)
    ),
}


@pytest.fixture
def site(zygote_of_commands: Zygote, hpc_det: Command, root: Path, config: Path, queue: Queue, tmp_path: Path) -> Site:
    config.write_text(ARRAYS)
    return Site(zygote_of_commands, hpc_det, root, queue, tmp_path / "saved")


@pytest.fixture(params=STORIES)
def story(request: pytest.FixtureRequest, site: Site, arguments: list[str]) -> Story:
    found = STORIES[request.param]
    for each in found.before:
        assert in_a_process(arguments if each is CREATE else [*each]) == 0
    site.save()
    return found


def is_whole(site: Site, story: Story, before: ExperimentState | None) -> None:
    """After any command that looks at all experiments; and the same command once more does its work."""
    assert site.hpc_det("e", "list").code == 0
    is_settled(site.root, site.queue, before, ExperimentState.QUEUED, ExperimentState.PAUSED, *story.may_be, story.ends)
    assert len(site.queue.jobs()) <= 1, "nothing is submitted twice"
    found = site.state()
    if found is None:
        assert before is None or story.ends is None
        assert site.queue.jobs() == []
        return
    activates = found is ExperimentState.PAUSED and story.ends is ExperimentState.QUEUED
    if story.ends is None and not found.is_final:
        site.hpc_det("e", "kill", "1")
    assert site.hpc_det(*(("e", "activate", "1") if activates else story.again)).code in (0, 2)
    assert (site.state(), len(site.queue.jobs())) == (story.ends, story.jobs)


def test_a_command_that_is_killed_leaves_nothing_half_done(
    site: Site, story: Story, arguments: list[str], amount: Amount, tally: Tally
) -> None:
    command, before, records = story.given(arguments), site.state(), site.saved / "records"
    made = site.run(command, Fault(), records).made
    every = {how: range(1, made + 1) for how in (How.KILL_BEFORE, How.KILL_AFTER)}
    writes = [change.number for change in changes(records) if change.kind == "write"]
    for how, numbers in [*every.items(), (How.KILL_WITHIN, writes)]:
        for number in amount.of(numbers, SAMPLE):
            if site.run(command, Fault(how, number)).killed:  # not every run makes the last changes
                with tally.trying(f"{story.what}: kills"):
                    is_whole(site, story, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_create_that_gets_a_signal_leaves_nothing(
    site: Site, arguments: list[str], amount: Amount, tally: Tally, number: signal.Signals
) -> None:
    site.save()
    made = site.run(arguments, Fault()).made
    for at in amount.of(range(1, made + 1), SAMPLE):
        run = site.run(arguments, Fault(How.SIGNAL, at, number))
        ended = said_code(run)
        with tally.trying("commands that submit jobs: signals"):
            assert ended in (None, 0, 128 + number)
            if ended != 0:
                assert site.queue.jobs() == []
                assert not any(any(folder.path.iterdir()) for folder in ExperimentStore(site.root).folders())


def said_code(run: Run) -> int | None:
    """The exit code; None where the signal has ended the process at once, before it had anything to clean up."""
    return run.said[0][1] if run.said else None


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_create_that_the_disk_fails_says_so_and_leaves_no_job_unknown(
    site: Site, arguments: list[str], amount: Amount, tally: Tally, error: int
) -> None:
    story = STORIES["create"]
    site.save()
    made = site.run(arguments, Fault()).made
    for times in (1, 1_000_000):
        for at in amount.of(range(1, made + 1), SAMPLE):
            run = site.run(arguments, Fault(How.FAIL, at, error, times))
            with tally.trying("commands that submit jobs: errors of the disk"):
                assert run.failed is None, "a sentence, and no traceback"
                is_whole(site, story, None)


@pytest.mark.parametrize("survives", Survives)
def test_what_create_has_made_survives_a_power_cut(
    site: Site, arguments: list[str], tmp_path: Path, amount: Amount, tally: Tally, survives: Survives
) -> None:
    """A job that waits in the queue would train with empty files of code."""
    site.save()
    disk, records = Disk(site.root), tmp_path / "records"
    assert said_code(site.run(arguments, Fault(), records)) == 0
    for change in changes(records):
        disk.apply(change)
    with tally.trying("commands that submit jobs: power cuts"):
        disk.write(tmp_path / "left", survives)
        assert contents(tmp_path / "left") == contents(site.root)


def contents(root: Path) -> dict[str, bytes]:
    """Of the experiments, without what submitit keeps for itself, and what the next command settles."""
    below, others = root / "experiments", {"submitit", "submitting.json"}
    files = (path for path in below.rglob("*") if path.is_file() and not {path.name, path.parent.name} & others)
    return {str(path.relative_to(below)): path.read_bytes() for path in files}
