"""A training with kills on this machine or a lab, and all that was promised of it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

import hpc_det as package
from hpc_det.checkpoint.committed import committed
from hpc_det.store.journal import Journal
from hpc_det.store.metrics import BEGINS, each
from tests.chaos.kills import orders
from tests.chaos.kills.plans import FINISHED, Kill
from tests.chaos.kills.victims import Processes
from tests.chaos.table import Tally
from tests.e2e.story import Story, hpc_det
from tests.wait import DEADLINE_S, wait_for

REPOSITORY = Path(package.__file__).parents[1]
SITE = Path(__file__).with_name("site")
SETUP = 'setup: ["export PYTHONPATH={repository}:{site} {variable}={kills} TMPDIR={tmp}"]\n'
ALL_KEPT = "checkpoint_storage.save_trial_latest=1000"
TOLD = re.compile(r"go on with `hpc-det (experiment \w+ \d+)`")


@dataclass(frozen=True)
class Place:
    """Where one training with kills runs."""

    root: Path
    kills: Path
    tmp: Path
    """For the temporary files of its processes."""

    @property
    def trial(self) -> Path:
        return self.root / "experiments" / "1" / "trials" / "1"

    def left(self) -> dict[int, str]:
        """The processes of the experiment that still run."""
        return Processes(self.kills, self.trial).commands()


@contextmanager
def place(profile: str) -> Iterator[Place]:
    """State and profile (`cluster: killed`) for one training; what is left of its processes is ended at last."""
    folder = Path(tempfile.mkdtemp(prefix="k", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")))
    made = Place(folder / "root", folder / "kills", folder / "tmp")
    for path in (made.root / "conf" / "cluster", made.kills, made.tmp):
        path.mkdir(parents=True)
    setup = SETUP.format(repository=REPOSITORY, site=SITE, variable=orders.FOLDER, kills=made.kills, tmp=made.tmp)
    (made.root / "conf" / "cluster" / "killed.yaml").write_text(f"name: killed\n{profile}{setup}")
    (made.kills / "trial").write_text(str(made.trial))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPC_DET_ROOT", str(made.root))
        try:
            yield made
        finally:
            for pid in made.left():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_for(lambda: not made.left(), DEADLINE_S)
            shutil.rmtree(folder)


def survives(profile: str, kills: Sequence[Kill], tally: Tally, undisturbed: Story, *overrides: str) -> None:
    """A training on the cluster `profile` with these kills."""
    with ExitStack() as all_of_them, place(profile) as its:
        for kill in kills:
            all_of_them.enter_context(tally.trying(kill.what))
        story = _begun(its, kills, *overrides)
        commands = _completed(story)
        _keeps_promises(its, kills, story, commands, undisturbed)


def _begun(its: Place, kills: Sequence[Kill], *overrides: str) -> Story:
    orders.write(its.kills, [kill.order for kill in kills])
    charged = sum(kill.is_charged for kill in kills)
    return Story.begin("resources.slots_per_trial=2", f"max_restarts={charged}", ALL_KEPT, *overrides, cluster="killed")


def _completed(story: Story) -> int:
    """Waits for the end, and does what the user is told to do where it ended too early: how often."""
    commands = 0
    while (ended := story.wait(check=False)).returncode:
        told = TOLD.search(ended.stderr)
        assert told or f"experiment {story.number}: CANCELED" in ended.stderr, ended.stderr
        commands += 1
        assert commands <= 20, ended.stderr
        # What is cancelled was meant so; docs/reliability.md tells how to go on.
        hpc_det(*(told[1].split() if told else ("experiment", "continue", story.number)))
    return commands


def _keeps_promises(its: Place, kills: Sequence[Kill], story: Story, commands: int, undisturbed: Story) -> None:
    done = orders.done(its.kills)
    shown = f"{[str(kill.order.moment) for kill in kills]}\n{story.logged}"
    assert len(done) == len(kills), shown
    assert story.describe()["state"] == "COMPLETED"
    assert story.same_as(undisturbed), shown
    assert commands <= sum(kill.ends_job for kill in kills), shown
    _attempts_ended_by_kills(story, kills, [each["attempt"] for each in done], shown)
    _checkpoints_are_whole(story, {uuid for each in done for uuid in each["committed"]})
    _metrics_are_in_order(story)
    wait_for(lambda: not its.left(), DEADLINE_S, its.left)
    assert not [path for path in its.tmp.iterdir() if path.name.startswith("hpc-det")]


def _attempts_ended_by_kills(story: Story, kills: Sequence[Kill], at: Sequence[int], shown: str) -> None:
    """Each attempt but the last has ended by a kill in it, and by what that kill may have caused. Where the job was
    killed after all was done, nobody has written the last end.
    """
    events = Journal(story.trial.journal).events()
    last = max(event["attempt"] for event in events)
    ends = {event["attempt"]: event["cause"] for event in events if event["event"] == "ended"}
    killed_in = {
        attempt: [kill for kill, number in zip(kills, at, strict=True) if number == attempt]
        for attempt in range(1, last + 1)
    }
    is_unwritten = any(kill.ends_job and FINISHED in kill.ends for kill in killed_in[last])
    if not is_unwritten or last in ends:
        assert ends.pop(last) == FINISHED, shown
    assert [*ends] == [*range(1, last)], shown
    for attempt, cause in ends.items():
        assert cause in {end for kill in killed_in[attempt] for end in kill.ends}, shown


def _checkpoints_are_whole(story: Story, promised: set[str]) -> None:
    there = committed(story.trial.checkpoints)
    assert promised <= {checkpoint.uuid for checkpoint in there}
    assert {checkpoint.uuid: checkpoint.damage() for checkpoint in there if checkpoint.damage()} == {}
    assert [path.name for path in story.trial.checkpoints.iterdir() if path.name.startswith(".partial")] == []
    assert there[0].steps == 40


def _metrics_are_in_order(story: Story) -> None:
    """Also in what was trained twice: each attempt goes on, without a gap, where its checkpoint was."""
    attempt, next_batch = 0, 1
    for line in each(story.trial.metrics):
        assert line["attempt"] >= attempt
        attempt = line["attempt"]
        if line["kind"] == BEGINS:
            next_batch = line["trained"] + 1
        elif line["kind"] == "training":
            assert line["steps"] == next_batch
            next_batch += 1
