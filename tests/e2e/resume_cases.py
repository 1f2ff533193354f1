"""The parts of the table of resume cases: trainings (rows), troubles (columns), and the places where they run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.e2e.engine_story import EngineStory, UndisturbedEngines
from tests.e2e.story import WAITS_AT, Story, hpc_det
from tests.launch import mpiruns

BUSY_AT = 10
"""The batch at which the trouble comes, after the first checkpoint."""
ENGINES_WAIT_AT = 13
"""The batch in which engines wait, after the first of its four micro batches."""
MPIRUNS: Mapping[str, tuple[str, Callable[[], str]]] = {
    "mpich": ("mpi", lambda: mpiruns.mpirun("mpich")),
    "open_mpi": ("mpi", lambda: mpiruns.mpirun("open_mpi")),
    "mpich_by_srun": ("mpi", lambda: "srun, --mpi=pmi2"),
}
"""Launchers that are `hpc_det.launch.mpi` with this `mpi_launcher` in the profile. The function skips the test where
the MPI is missing.
"""


@dataclass(frozen=True)
class Training:
    """A row. `kind`: `trial` (a PyTorchTrial), `script` (the same with a Trainer), or an engine (a DeepSpeedTrial)."""

    kind: str
    launcher: str

    @property
    def is_engine(self) -> bool:
        return self.kind not in ("trial", "script")

    @property
    def slots(self) -> int:
        return 4 if self.is_engine else 2

    @property
    def module(self) -> str:
        return MPIRUNS[self.launcher][0] if self.launcher in MPIRUNS else self.launcher

    @property
    def entrypoint(self) -> str:
        program = "train.py" if self.kind == "script" else "--trial model_def:StoryTrial"
        return f"entrypoint=python3 -m hpc_det.launch.{self.module} {program}"

    def mpi_launcher(self) -> str:
        """Return the profile's `mpi_launcher`; skip the test where the machine has no such MPI."""
        return MPIRUNS[self.launcher][1]() if self.launcher in MPIRUNS else "mpirun"

    def begin(self, trouble: Trouble) -> Story:
        """Start the training on the cluster `lab`, and return at the batch at which the trouble comes."""
        if self.is_engine:
            return self._begin_engines(trouble)
        story = Story.begin(
            self.entrypoint,
            f"resources.slots_per_trial={self.slots}",
            WAITS_AT.format(BUSY_AT),
            *trouble.overrides,
            cluster="lab",
        )
        story.until_batch(BUSY_AT)
        return story

    def _begin_engines(self, trouble: Trouble) -> EngineStory:
        waits = f"hyperparameters.waits_at=[{ENGINES_WAIT_AT}]"
        story = EngineStory.with_engine(self.kind, 4, waits, *trouble.overrides, cluster="lab", launcher=self.module)
        story.until_waiting(ENGINES_WAIT_AT)
        return story


class Place(Protocol):
    """The place where jobs run: this machine, or a lab."""

    def write_profile(self, training: Training, resume: str) -> None:
        """Write the profile of the cluster `lab`. Its `slots_per_node` spreads the training over two nodes, if the
        place has nodes.
        """


@dataclass(frozen=True)
class Trouble:
    """A column: what happens to a running training, the causes with which its attempts end, and its number of jobs."""

    comes: Callable[[Any, Story], object]
    causes: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    resume: str = "successor"
    """Value of `resume` in the profile."""
    jobs: int | None = None
    """None: not checked, because it depends on the launcher or on timing."""


def nothing(place: object, story: Story) -> None:
    """Do nothing from outside: the training itself goes wrong."""


def paused_for_a_while(place: object, story: Story) -> None:
    hpc_det("experiment", "pause", story.number)
    story.until(lambda: story.describe()["state"] == "PAUSED")
    hpc_det("experiment", "activate", story.number)


def a_rank_killed(place: object, story: Story) -> None:
    os.kill(story.rank_pid(1), signal.SIGKILL)


ANYWHERE = {
    "pause": Trouble(paused_for_a_while, ("paused", "finished"), jobs=2),
    "crash": Trouble(a_rank_killed, ("failed", "finished"), ("max_restarts=1",), jobs=1),
    "hang": Trouble(nothing, ("hung", "finished"), ("hang_timeout_s=10", "max_restarts=0"), jobs=1),
}
"""Troubles that need no scheduler."""


def cases(table: str) -> list[Any]:
    """Return the cases of a table: a line of troubles, then for each training a mark below each trouble.

    T: in `make test`; L: in `make test-long`; .: there is no such case.
    """
    head, *rows = (line.split() for line in table.strip().splitlines())
    marks = {"T": [], "L": [pytest.mark.long]}
    found = []
    for kind, launcher, *cells in rows:
        assert len(cells) == len(head), f"{kind} {launcher}: {len(cells)} cells for {len(head)} troubles"
        for trouble, cell in zip(head, cells, strict=True):
            if cell != ".":
                id_ = f"{kind}-{launcher}-{trouble}"
                found.append(pytest.param(Training(kind, launcher), trouble, id=id_, marks=marks[cell]))
    return found


def run(place: Place, training: Training, trouble: Trouble) -> Story:
    """Run the training with this trouble, and return it when it has ended."""
    place.write_profile(training, trouble.resume)
    story = training.begin(trouble)
    trouble.comes(place, story)
    story.wait()
    assert tuple(story.causes) == trouble.causes, story.logged
    described = story.describe()
    assert described["state"] == "COMPLETED"
    if trouble.jobs is not None:
        assert len({attempt["job_id"] for attempt in described["attempts"]}) == trouble.jobs
    return story


def assert_resumed_exactly(
    story: Story, training: Training, undisturbed: Story, undisturbed_engines: UndisturbedEngines
) -> None:
    """Check that every metric and weight is bit-equal to the training without trouble, and that engines saw each micro
    batch once.
    """
    if not isinstance(story, EngineStory):
        assert story.same_as(undisturbed)
        return
    other = undisturbed_engines(training.kind, 4)
    assert story.same_as(other)
    if story.causes[0] != "failed" and story.causes[0] != "node lost":
        assert [story.micro_batches(rank) for rank in range(4)] == [other.micro_batches(rank) for rank in range(4)]


def write_profile(root: Path, text: str) -> None:
    path = root / "conf" / "cluster" / "lab.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
