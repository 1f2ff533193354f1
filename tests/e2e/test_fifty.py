"""A run that is preempted fifty times in a row: nothing is lost, and only the records of attempts grow."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import hpc_det as package
from hpc_det.checkpoint.committed import committed, newest_steps
from tests.e2e.conftest import run_undisturbed
from tests.e2e.story import Story
from tests.labs.pbs_lab import PbsLab

PREEMPTIONS = 50
LONG_ENOUGH = "searcher.max_length={batches: 800}"
PROFILE = """
name: lab
scheduler: pbs
slots_per_node: 1
max_nodes: 3
slot_type: cpu
resource_pool: low
setup: ["export PYTHONPATH={repository}"]
"""


@dataclass(frozen=True)
class Traces:
    """Sizes measured during one of many attempts."""

    files: Counter[str]
    """Number of files in each folder, without checkpoints and the folders of single attempts."""
    journals_bytes: int
    path: str
    job_kb: int
    rank_kb: int

    @classmethod
    def of(cls, story: Story) -> Traces:
        """Measure them while the story trains."""
        experiment, rank = story.trial.experiment(), story.rank_pid(0)
        (job,) = story.job_pids()
        journals = [story.trial.journal, *experiment.search.iterdir()]
        return cls(
            files=Counter(_folders(experiment.path)),
            journals_bytes=sum(journal.stat().st_size for journal in journals),
            path=_variable(rank, "PATH"),
            job_kb=_resident_kb(job),
            rank_kb=_resident_kb(rank),
        )


def _folders(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        name = str(path.parent.relative_to(folder))
        if path.is_file() and not re.search(r"/(attempt-\d+|checkpoints|\.nodes-\w+)", name):
            yield name


def _variable(pid: int, name: str) -> str:
    words = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))


def _resident_kb(pid: int) -> int:
    """Return the resident memory [kB] (proc(5))."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_fifty_preemptions_cost_nothing_but_their_time(
    tmp_path_factory: pytest.TempPathFactory, pbs_lab: PbsLab, state_folder: Path
) -> None:
    undisturbed = run_undisturbed(tmp_path_factory, LONG_ENOUGH)
    profile = state_folder / "conf" / "cluster" / "lab.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text(PROFILE.format(repository=Path(package.__file__).parents[1]))
    pbs_lab.set_kill_delay("low", 60)  # the machine may be slow
    pbs_lab.set_preempt_order("D")
    entrypoint = "entrypoint=python3 -m hpc_det.launch.direct --trial model_def:StoryTrial"
    story = Story.begin(entrypoint, LONG_ENOUGH, "hyperparameters.batch_s=0.08", cluster="lab")
    traces = []
    for preempted in range(PREEMPTIONS):
        story.until_ended(preempted)
        story.until_batch(newest_steps(story.trial.checkpoints) + 1)
        traces.append(Traces.of(story))
        pbs_lab.preempt(3, seconds=0)
    story.wait()
    assert story.causes == ["preempted"] * PREEMPTIONS + ["finished"]
    assert story.same_as(undisturbed)

    assert 1 <= len(committed(story.trial.checkpoints)) <= 2

    second, last, more = traces[1], traces[-1], PREEMPTIONS - 2
    print(second, last, sep="\n")
    assert last.files - second.files == {"search": 2 * more, "trials/1/tensorboard": more}
    assert last.path == second.path
    assert last.job_kb < 1.05 * second.job_kb
    assert last.rank_kb < 1.05 * second.rank_kb
    assert last.journals_bytes - second.journals_bytes < 1000 * more
