"""The story of the end-to-end tests, which trains as many batches as a test allows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from hpc_det.store.files import read_json, write_atomic
from hpc_det.store.journal import Journal
from tests.e2e.story import HERE, Story, modules, words
from tests.listening import listening

TRIAL = "paced:PacedTrial"
BATCHES = "searcher.max_length.batches=60"
ON_TWO_SLOTS = (BATCHES, "resources.slots_per_trial=2")
PACED = Path(__file__).with_name("paced")


class PacedStory:
    """An experiment whose ranks run."""

    def __init__(self, story: Story, pace: Path) -> None:
        self.story = story
        self._pace = pace
        self._allowed = 0

    @classmethod
    def begin(cls, *overrides: str, folder: Path, variables: Mapping[str, str], cluster: str = "local") -> PacedStory:
        """`variables`: for its processes, beside `pace_in`. On a lab the profile says them."""
        code = folder / "code"
        shutil.copytree(HERE / "trial", code, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(PACED / "paced.py", code)
        (pace := folder / "pace").write_text("0")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**variables, **pace_in(folder)}.items():
                patch.setenv(name, value)
            begun = cls(Story.begin(*ON_TWO_SLOTS, *overrides, cluster=cluster, context=code), pace)
        begun.train(1)
        return begun

    def train(self, batches: int) -> None:
        """So many more."""
        self._allowed = max(self._allowed, self.story.batches_reported) + batches
        write_atomic(self._pace, str(self._allowed))
        self.story.until_batch(self._allowed)

    def finish(self) -> None:
        write_atomic(self._pace, "1000000")
        self.story.wait()

    @property
    def attempt(self) -> int:
        return Journal(self.story.trial.journal).last_attempt()

    @property
    def ranks(self) -> list[int]:
        return [self.story.rank_pid(rank) for rank in range(2)]

    @property
    def pids(self) -> list[int]:
        """Of the job, its agents, its launchers and its ranks."""
        folder = str(self.story.trial.experiment().path)
        found = [int(name) for name in os.listdir("/proc") if name.isdecimal() and _is_in(int(name), folder)]
        return sorted({*found, *self.ranks})

    @property
    def with_a_store(self) -> list[int]:
        """Processes that hold a store of PyTorch's."""
        meeting = read_json(self.story.trial.rendezvous(self.attempt)) or {}
        return [pid for pid in self.pids if meeting.get("port") in [each.port for each in listening(pid)]]

    @property
    def agents(self) -> list[int]:
        return [pid for pid in self.pids if "hpc_det.launch.agent" in modules(pid)[:1]]


def pace_in(folder: Path) -> dict[str, str]:
    return {"CHAOS_PACE": str(folder / "pace")}


def _is_in(pid: int, folder: str) -> bool:
    return any(folder in word for file in ("cmdline", "environ") for word in words(pid, file))
