"""The resume check on loops that resume exactly, and on loops that each lose one known state."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest

from hpc_det.checkpoint.retention import Policy
from hpc_det.core.core import Core
from hpc_det.core.run import JobServices, Purpose, Run
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.metrics import MetricsLog
from hpc_det.distributed.preempt import ForcedStop
from hpc_det.distributed.rng import seed_everything
from hpc_det.distributed.searcher import SearcherContext
from hpc_det.node.json_files import read_json
from hpc_det.store.attempt import read_stop
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import read_reports
from hpc_det.view.resume_causes import causes
from hpc_det.view.resume_check import Comparison, compare
from tests.distributed.ranks import OnRanks

pytestmark = pytest.mark.integration

BATCHES, STOP = 14, 8
"""Two passes of 6 batches and a part of another one."""
CONFIG: dict[str, Any] = {
    "searcher": {"name": "single", "metric": "error", "smaller_is_better": True, "max_length": {"batches": BATCHES}},
    "checkpoint_policy": "none",
}


def train(distributed: Distributed, folder: TrialFolder, loop: str, stops: frozenset[int] | None, attempt: int) -> Any:
    """Run an attempt as `init` does in a job, and return its outcome. `stops` None: it is one of `--test`."""
    seed_everything(5)
    code = folder.path.parents[1] / "code"
    stop = ForcedStop(distributed.messages)
    searcher = create_autospec(SearcherContext, instance=True)
    searcher.compares.return_value = False
    searcher.until.return_value = None
    run = Run(
        spec={"experiment_id": 1, "trial_id": 1, "trial_seed": 5, "hparams": {}, "config": CONFIG},
        folder=folder,
        attempt=attempt,
        distributed=distributed,
        stop=stop,
        log=MetricsLog(folder, attempt),
        job=JobServices(
            code=code,
            searcher=searcher,
            retention=lambda: Policy(trial_latest=1),
            mirror=None,
            grace_s=None,
        ),
        purpose=Purpose(test=True) if stops is None else Purpose(forced_stops=stops),
    )
    try:
        core = Core(run)
        with core.finishing():
            getattr(module_in(code), loop)(core).run()
            core.finish()
    finally:
        stop.close()
    return read_json(folder.outcome) if distributed.is_chief else None


def module_in(code: Path) -> Any:
    """Return the loops, imported from the copy that a job has of its code."""
    sys.path.insert(0, str(code))
    sys.modules.pop("loops", None)
    try:
        return importlib.import_module("loops")
    finally:
        sys.path.remove(str(code))


def new_trial(path: Path) -> TrialFolder:
    """Return the folder of a trial below `path`, beside a copy of the code."""
    folder = TrialFolder(path / "trials" / "1")
    folder.checkpoints.mkdir(parents=True)
    shutil.copytree(Path(__file__).with_name("leaky"), path / "code")
    return folder


def trained(path: Path, loop: str, *stops: int, on_ranks: OnRanks | None = None, ranks: int = 1) -> TrialFolder:
    """Train until the end. `on_ranks`: run each attempt in separate processes."""
    folder = new_trial(path)
    for attempt in range(1, 20):
        arguments = (folder, loop, frozenset(stops), attempt)
        found = on_ranks(ranks, train, *arguments) if on_ranks else [train(Distributed(), *arguments)]
        if found[0]["kind"] == "finished":
            return folder
        request = read_stop(folder.stop, attempt)
        assert request is not None
        assert request.reason == "resume check"
    raise AssertionError("the training does not end")


def checked(path: Path, loop: str, *stops: int, **options: Any) -> Comparison:
    """Compare an undisturbed training of the loop with a stopped one."""
    undisturbed = trained(path / "undisturbed", loop, **options)
    return compare(undisturbed, trained(path / "stopped", loop, *stops, **options))


SOUND = ["Sound", "TrackedScheduler", "SchedulerAfterItsOptimizer", "SeedsEachEpoch", "OwnLoop"]


@pytest.mark.parametrize("loop", SOUND)
def test_a_loop_whose_state_is_in_checkpoints_is_sound(tmp_path: Path, loop: str) -> None:
    found = checked(tmp_path, loop, 3, 6, STOP)
    assert found.first == ()
    assert found.lost == ()
    assert (found.resumes, found.repeated, found.batches) == ((3, 6, STOP), (), BATCHES)


LOST = {
    "UntrackedScheduler": ("state", STOP, "scheduler", "variable run.self.schedule"),
    "DataWithAGenerator": ("data", STOP, "generator", "attribute data loader.dataset.noise"),
    "DrawsForEachEpoch": ("metrics", STOP, "state", "variable run.shift"),
    "TotalOfAnEpoch": ("training", STOP, "state", "variable run.total"),
    "OwnLoopWithALeak": ("training", STOP + 1, "state", "variable run.self.average"),
}
"""By loop: the first difference and its batch, the kind of the likeliest cause, and the value that it concerns."""


@pytest.mark.parametrize("loop", LOST)
def test_what_a_resume_loses_is_named(tmp_path: Path, loop: str) -> None:
    found = checked(tmp_path, loop, STOP)
    first, cause = found.first[0], causes(found)[0]
    assert (first.part, first.batch, cause.kind, cause.name) == LOST[loop]


def test_files_that_a_loop_commits_at_the_end_are_compared(tmp_path: Path) -> None:
    (first,) = checked(tmp_path, "OwnLoopWithOtherFiles", STOP).first
    assert (first.batch, first.name, first.undisturbed, first.stopped) == (BATCHES, "file average.pt['n']", "1", "2")


def test_a_stop_without_a_checkpoint_is_named_and_made_once(tmp_path: Path) -> None:
    found = checked(tmp_path, "WithoutACheckpoint", 3, STOP)
    assert found.is_identical
    assert found.repeated == ((3, 0), (STOP, 0))


def test_a_loop_that_cannot_be_stopped_has_no_resume(tmp_path: Path) -> None:
    found = checked(tmp_path, "WithoutAStop", 3)
    assert (found.is_identical, found.resumes, found.batches) == (True, (), 4)


@pytest.mark.long
def test_a_leak_is_named_on_each_rank(tmp_path: Path, on_ranks: OnRanks) -> None:
    found = checked(tmp_path, "DataWithAGenerator", STOP, on_ranks=on_ranks, ranks=2)
    assert {(each.part, each.rank) for each in found.first} == {("data", 0), ("data", 1)}
    assert causes(found)[0].name == "attribute data loader.dataset.noise"


@pytest.mark.long
def test_a_loop_without_batches_stops_at_the_same_step_on_each_rank(tmp_path: Path, on_ranks: OnRanks) -> None:
    found = checked(tmp_path, "OwnLoopOnRanks", 3, STOP, on_ranks=on_ranks, ranks=2)
    assert (found.first, found.resumes) == ((), (3, STOP))


@pytest.mark.parametrize("loop", ["Sound", "TrackedScheduler", "OwnLoop", "InASearch"])
def test_a_test_trains_one_batch_validates_and_saves(tmp_path: Path, loop: str) -> None:
    folder = new_trial(tmp_path)
    outcome = train(Distributed(), folder, loop, None, 1)
    assert (outcome["kind"], outcome["steps"], outcome["saved"]) == ("finished", 1, True)
    kinds = [(each["kind"], each["steps"]) for each in read_reports(folder.metrics)]
    validates = loop in ("Sound", "InASearch")
    assert kinds == [("training", 1), *([("validation", 1)] if validates else [])]
