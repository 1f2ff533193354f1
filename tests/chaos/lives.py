"""Trials on this machine, as jobs with forked ranks; their results are compared bit by bit."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_det.checkpoint.snapshots import newest
from hpc_det.config.plain_yaml import load_yaml
from hpc_det.config.request import Request
from hpc_det.plan.effective import effective
from hpc_det.schedulers.local import Local
from hpc_det.schedulers.scheduler import JobState, run_command
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.store.run_folder import RunFolder
from hpc_det.submit.submission import submit
from hpc_det.view.resume_check import compare
from hpc_det.view.state import ExperimentView
from tests.chaos.driver import CALLS, FINAL, drive
from tests.chaos.schedules import SIGNALS, Schedule, TrainerSchedule
from tests.e2e.engine_story import EngineStory, four_slots
from tests.e2e.story import Story
from tests.pytorch.trials import Life, differences
from tests.wait import DEADLINE_S, wait_for

TRIALS = Path(__file__).with_name("trials")
START_S, ATTEMPT_S = 60, 90
"""Longest time [s] of a start and of an attempt on a busy machine; two trainings must be shorter than one test."""


@dataclass(frozen=True)
class TrialRun:
    """One training of an experiment's schedule, with or without its stops."""

    story: Story
    attempts: int
    """Largest number of attempts, from the schedule."""

    @classmethod
    def begin(cls, schedule: Schedule, *, undisturbed: bool) -> TrialRun:
        root = Path(os.environ["HPC_DET_ROOT"])
        profile = root / "conf" / "cluster" / "here.yaml"
        if not profile.exists():
            four_slots(root)
        config = schedule.experiment(undisturbed=undisturbed)
        cluster = load_yaml(profile)
        request = Request(cluster=cluster, template=None, template_name=None, config=config, context_dir=TRIALS)
        folder = submit(effective(request), ExperimentStore(root))
        kind = EngineStory if schedule.kind == "deepspeed" else Story
        return cls(kind(folder.id, folder.trial()), 1 if undisturbed else schedule.attempts)

    @property
    def trial(self) -> TrialFolder:
        return self.story.trial

    def wait(self) -> None:
        """Wait until its job has ended."""
        wait_for(self._has_ended, START_S + ATTEMPT_S * self.attempts, lambda: self.logged, every_s=0.05)

    def _has_ended(self) -> bool:
        (job,) = ExperimentView(self.trial.experiment()).job_ids()
        return Local().status([job], run_command)[job].state is JobState.ENDED

    @property
    def logged(self) -> str:
        """Return the ends of the job's log, and of the logs of the last attempt's ranks."""
        last = Journal(self.trial.journal).last_attempt()
        logs = [self.trial.job_log, *sorted(self.trial.rank_log(last, 0).parent.glob("*.log"))]
        return "\n".join(f"{log}:\n{log.read_text(errors='replace')[-2000:]}" for log in logs if log.exists())

    @property
    def attempts_with_signals(self) -> set[int]:
        """The attempts in which a rank has sent a signal of the schedule."""
        attempts = range(1, Journal(self.trial.journal).last_attempt() + 1)
        return {number for number in attempts if any("chaos: {" in text for text in self._printed(number))}

    def _printed(self, attempt: int) -> list[str]:
        """Return the output of each rank."""
        return [log.read_text(errors="replace") for log in self.trial.rank_log(attempt, 0).parent.glob("*.log")]

    def differences(self, undisturbed: TrialRun) -> list[str]:
        """Return the differences from `undisturbed`: in the ranks' state before each batch, in metrics, in the
        checkpoints.
        """
        found = [str(each) for each in compare(undisturbed.trial, self.trial).first]
        if self.story.series != undisturbed.story.series:
            found.append(f"reports: {self.story.series} and {undisturbed.story.series}")
        return found + _different_states(self.story, undisturbed.story)


def _different_states(one: Story, other: Story) -> list[str]:
    """Return the differences between the newest checkpoints."""
    if isinstance(one, EngineStory):  # the engine's own classes would have to be imported
        return differences(one.weights, other.weights)
    return differences(Life(one.trial).newest, Life(other.trial).newest)


# --- TorchTrainer

LEFT = {0, 75, *(-getattr(signal, name) for name in SIGNALS)}
"""Exit codes of drivers that have finished, that requeue their job, or that a signal ended."""


@dataclass(frozen=True)
class TrainerRun:
    """A TorchTrainer's program, started until it ends with 0."""

    folder: Path
    codes: tuple[int, ...]
    """The exit codes, in order."""

    @classmethod
    def to_its_end(cls, folder: Path, schedule: TrainerSchedule, *, undisturbed: bool) -> TrainerRun:
        folder.mkdir()
        codes: list[int] = []
        while not codes or codes[-1]:
            assert len(codes) <= len(schedule.signals), f"exit codes {codes}\n{_logs(folder)}"
            signals = [] if undisturbed else schedule.signals.get(len(codes) + 1, [])
            codes.append(_driven(folder, schedule, len(codes) + 1, signals))
            assert codes[-1] in LEFT, f"exit code {codes[-1]}\n{_logs(folder)}"
        return cls(folder, tuple(codes))

    @property
    def results(self) -> dict[str, str]:
        """The result of each call. A call that is repeated after a stop must have the same result as the first time."""
        recorded = [json.loads(line) for line in (self.folder / CALLS).read_text().splitlines()]
        results = {line["call"]: line["result"] for line in recorded}
        assert [line for line in recorded if results[line["call"]] != line["result"]] == []
        return results

    @property
    def state(self) -> dict[str, Any]:
        """The state that the program gets, and the content of the newest snapshot."""
        snapshot = newest(RunFolder(self.folder / "run"))
        assert snapshot
        own = {str(rank): pickle.loads(part) for rank, part in enumerate(snapshot.own)}
        parts = {"final": self.folder / FINAL, "snapshot": snapshot.state}
        return {"own": own, **{name: torch.load(path, weights_only=False) for name, path in parts.items()}}

    def differences(self, undisturbed: TrainerRun) -> list[str]:
        one, other = self.results, undisturbed.results
        found = [f"call {call}: {one.get(call)} and {other.get(call)}" for call in one | other]
        found = [each for call, each in zip(one | other, found, strict=True) if one.get(call) != other.get(call)]
        return found + differences(self.state, undisturbed.state)


def _driven(folder: Path, schedule: TrainerSchedule, attempt: int, signals: Any) -> int:
    """Start the program once, and return its exit code. Needs the fork server."""
    arguments = (folder, schedule.training, attempt, signals, {**os.environ})
    process = multiprocessing.get_context("forkserver").Process(target=drive, args=arguments)
    process.start()
    process.join(DEADLINE_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        pytest.fail(f"not ended within {DEADLINE_S} s\n{_logs(folder)}")
    return process.exitcode


def _logs(folder: Path) -> str:
    return "\n".join(f"{log}:\n{log.read_text(errors='replace')[-2000:]}" for log in sorted(folder.rglob("*.log")))
