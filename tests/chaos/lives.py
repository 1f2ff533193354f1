"""Trials on this machine, as jobs whose ranks are forked; what is left of them is compared bit by bit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hpc_det.config.effective import effective
from hpc_det.config.plain_yaml import load_yaml
from hpc_det.config.request import Request
from hpc_det.resume_check.comparison import compare
from hpc_det.schedulers.command import run_command
from hpc_det.schedulers.local import Local
from hpc_det.schedulers.scheduler import JobState
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.submit.submission import submit
from hpc_det.view.state import ExperimentView
from tests.chaos.schedules import Schedule
from tests.e2e.engine_story import EngineStory, four_slots
from tests.e2e.story import Story
from tests.pytorch.trials import Life, differences
from tests.wait import DEADLINE_S, wait_for

TRIALS = Path(__file__).with_name("trials")


@dataclass(frozen=True)
class Lived:
    """One training of a schedule, with or without its stops."""

    story: Story

    @classmethod
    def begin(cls, schedule: Schedule, *, undisturbed: bool) -> Lived:
        root = Path(os.environ["HPC_DET_ROOT"])
        profile = root / "conf" / "cluster" / "here.yaml"
        if not profile.exists():
            four_slots(root)
        config = schedule.experiment(undisturbed=undisturbed)
        cluster = load_yaml(profile)
        request = Request(cluster=cluster, template=None, template_name=None, config=config, context_dir=TRIALS)
        folder = submit(effective(request), ExperimentStore(root))
        kind = EngineStory if schedule.kind == "deepspeed" else Story
        return cls(kind(folder.id, folder.trial()))

    @property
    def trial(self) -> TrialFolder:
        return self.story.trial

    def wait(self) -> None:
        """Until its job has ended."""
        wait_for(self._has_ended, DEADLINE_S, lambda: self.said)

    def _has_ended(self) -> bool:
        (job,) = ExperimentView(self.trial.experiment()).job_ids()
        return Local().status([job], run_command)[job].state is JobState.ENDED

    @property
    def said(self) -> str:
        """By the job, and by the ranks of its last attempt."""
        last = Journal(self.trial.journal).last_attempt()
        logs = [self.trial.job_log, *sorted(self.trial.rank_log(last, 0).parent.glob("*.log"))]
        return "\n".join(f"{log}:\n{log.read_text(errors='replace')[-2000:]}" for log in logs if log.exists())

    def differences(self, undisturbed: Lived) -> list[str]:
        """Where it was another training: in what the ranks had before each batch, in metrics, in the checkpoints."""
        found = [str(each) for each in compare(undisturbed.trial, self.trial).first]
        if self.story.series != undisturbed.story.series:
            found.append(f"reports: {self.story.series} and {undisturbed.story.series}")
        return found + _different_states(self.story, undisturbed.story)


def _different_states(one: Story, other: Story) -> list[str]:
    """In the newest checkpoint."""
    if isinstance(one, EngineStory):  # whose own objects would have to be imported
        return differences(one.weights, other.weights)
    return differences(Life(one.trial).newest, Life(other.trial).newest)
