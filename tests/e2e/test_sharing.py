"""A shared experiment that really trains: its group can read the files of its job, agent and ranks, but not the
secrets.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.users import SHARED_GROUP
from tests.e2e.story import HERE, Story, hpc_det

pytestmark = pytest.mark.integration

PRIVATE = {
    "cluster.json",
    "effective.json",
    "plan.json",
    "submitit",
    "jobs/1.sh",
    "trials/1/trial.json",
    "trials/1/attempt-1/rendezvous.json",
}


@pytest.fixture
def in_group(no_leaks: None) -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("only root can join a group")
    before = os.getgroups()
    os.setgroups([*before, SHARED_GROUP])
    yield
    os.setgroups(before)


@pytest.mark.long
def test_all_that_a_training_leaves_is_for_its_group_but_what_holds_secrets(in_group: None) -> None:
    created = hpc_det(
        *("experiment", "create", HERE / "story.yaml", HERE / "trial", "--cluster", "local"),
        *("--config", "entrypoint=model_def:StoryTrial"),
        *(f"--shared={SHARED_GROUP}", "--config", "searcher.max_length=1", "--config", "resources.slots_per_trial=2"),
    )
    assert created.stderr.startswith(f"hpc-det: shared with group '{SHARED_GROUP}', as ")
    story = Story.of(1)
    story.wait()
    assert story.causes == ["finished"]
    folder = story.trial.experiment().path
    left = [folder, *folder.rglob("*")]
    assert {path.lstat().st_gid for path in left} == {SHARED_GROUP}
    assert [path for path in left if _mode(path) & 0o027 and not path.is_symlink()] == []
    private = {path for path in left if not _mode(path) & stat.S_IRGRP and _mode(path.parent) & stat.S_IRGRP}
    assert {str(path.relative_to(folder)) for path in private} == PRIVATE
    made = {path.relative_to(story.trial.path).parts[0] for path in story.trial.path.rglob("*")}
    assert made >= {"checkpoints", "logs", "tensorboard", "metrics.jsonl", "outcome.json", "journal.jsonl"}


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)
