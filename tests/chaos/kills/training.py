"""A training with kills on this machine or a lab, and the checks of all promises about it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import hpc_det as package
from hpc_det.checkpoint.committed import committed
from hpc_det.requeue import Action, AttemptEnd, Cause, decide
from hpc_det.store.journal import Journal
from hpc_det.store.metrics import BEGINS, each
from tests.chaos.kills import orders
from tests.chaos.kills.plans import FINISHED, Kill, most_failures
from tests.chaos.kills.victims import Processes
from tests.chaos.table import Tally
from tests.e2e.story import Story, hpc_det
from tests.processes import send
from tests.wait import DEADLINE_S, wait_for

REPOSITORY = Path(package.__file__).parents[1]
INJECT = Path(__file__).with_name("inject")
SETUP = 'setup: ["export PYTHONPATH={repository}:{inject} {variable}={kills} TMPDIR={tmp}"]\n'
ALL_KEPT = "checkpoint_storage.save_trial_latest=1000"
NEXT_COMMAND = re.compile(r"`hpc-det (experiment (?:continue|activate) \d+)`")


@dataclass(frozen=True)
class Sandbox:
    """The folders of one training with kills."""

    root: Path
    kills: Path
    tmp: Path
    """For the temporary files of its processes."""

    @property
    def trial(self) -> Path:
        return self.root / "experiments" / "1" / "trials" / "1"

    def left(self) -> dict[int, str]:
        """Return the processes of the experiment that still run, with their command lines."""
        return Processes(self.kills, self.trial).commands()


@contextmanager
def sandbox(profile: str) -> Iterator[Sandbox]:
    """Yield state and profile (`cluster: killed`) for one training; kill its remaining processes at the end."""
    folder = Path(tempfile.mkdtemp(prefix="k", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")))
    made = Sandbox(folder / "root", folder / "kills", folder / "tmp")
    for path in (made.root / "conf" / "cluster", made.kills, made.tmp):
        path.mkdir(parents=True)
    setup = SETUP.format(repository=REPOSITORY, inject=INJECT, variable=orders.FOLDER, kills=made.kills, tmp=made.tmp)
    (made.root / "conf" / "cluster" / "killed.yaml").write_text(f"name: killed\n{profile}{setup}")
    (made.kills / "trial").write_text(str(made.trial))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPC_DET_ROOT", str(made.root))
        try:
            yield made
        finally:
            send(made.left(), signal.SIGKILL)
            wait_for(lambda: not made.left(), DEADLINE_S)
            shutil.rmtree(folder)


def check_survival(profile: str, kills: Sequence[Kill], tally: Tally, undisturbed: Story, *overrides: str) -> None:
    """Train on the cluster `profile` with these kills. Each counts as survived if all promises are kept."""
    with tally.trying_each(kill.what for kill in kills), sandbox(profile) as made:
        story = _begun(made, kills, *overrides)
        commands = _completed(story)
        _check_promises(made, kills, story, commands, undisturbed)


def _begun(made: Sandbox, kills: Sequence[Kill], *overrides: str) -> Story:
    orders.write(made.kills, [kill.order for kill in kills])
    restarts = f"max_restarts={most_failures(kills)}"
    return Story.begin("resources.slots_per_trial=2", restarts, ALL_KEPT, *overrides, cluster="killed")


def _completed(story: Story) -> int:
    """Wait for the end. If it comes too early, run the command that the user is shown. Return the number of such
    commands.
    """
    commands = 0
    while (ended := story.wait(check=False)).returncode:
        shown = NEXT_COMMAND.search(ended.stderr)
        assert shown or f"experiment {story.number}: CANCELED" in ended.stderr, ended.stderr
        commands += 1
        assert commands <= 20, ended.stderr
        # A cancelled experiment shows no command; docs/how-to/resume-and-requeue.md contains the one that continues it.
        hpc_det(*(shown[1].split() if shown else ("experiment", "continue", story.number)))
    return commands


def _check_promises(made: Sandbox, kills: Sequence[Kill], story: Story, commands: int, undisturbed: Story) -> None:
    done = orders.done(made.kills)
    shown = f"{[str(kill.order.moment) for kill in kills]}\n{story.logged}"
    assert len(done) == len(kills), shown
    assert story.describe()["state"] == "COMPLETED"
    assert story.same_as(undisturbed), shown
    assert commands <= sum(kill.ends_job for kill in kills), shown
    _check_ends(story, kills, [each["attempt"] for each in done], shown)
    _check_checkpoints(story, {uuid for each in done for uuid in each["committed"]})
    _check_metrics(story)
    wait_for(lambda: not made.left(), DEADLINE_S, made.left)
    assert not [path for path in made.tmp.iterdir() if path.name.startswith("hpc-det")]


def _check_ends(story: Story, kills: Sequence[Kill], at: Sequence[int], shown: str) -> None:
    """Check that each attempt except the last ended by a kill in it, with a cause that this kill may have. If the job
    was killed after its work was done, the last end may be missing.
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
    _check_charges(Journal(story.trial.journal).history())


def _check_charges(history: Sequence[AttemptEnd]) -> None:
    """Check that a budget for the failed attempts alone is enough."""
    failures = sum(end.cause is Cause.FAILED for end in history)
    decisions = [decide(history[:count], failures) for count in range(1, len(history))]
    assert [decision for decision in decisions if decision.action is Action.GIVE_UP] == []


def _check_checkpoints(story: Story, promised: set[str]) -> None:
    there = committed(story.trial.checkpoints)
    assert promised <= {checkpoint.uuid for checkpoint in there}
    assert {checkpoint.uuid: checkpoint.damage() for checkpoint in there if checkpoint.damage()} == {}
    assert [path.name for path in story.trial.checkpoints.iterdir() if path.name.startswith(".partial")] == []
    assert there[0].steps == 40


def _check_metrics(story: Story) -> None:
    """Check that each attempt continues, without a gap, from its checkpoint."""
    attempt, next_batch = 0, 1
    for line in each(story.trial.metrics):
        assert line["attempt"] >= attempt
        attempt = line["attempt"]
        if line["kind"] == BEGINS:
            next_batch = line["trained"] + 1
        elif line["kind"] == "training":
            assert line["steps"] == next_batch
            next_batch += 1
