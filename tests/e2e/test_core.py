"""A plain training loop as a user writes it, in jobs: stopped, requeued, searched, and outside of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint.committed import newest_good
from hpc_det.checkpoint.content import load
from hpc_det.store.attempt import first_failure
from hpc_det.store.metrics import read_reports
from tests.e2e.story import Story, hpc_det
from tests.e2e.test_slurm import use
from tests.facts import unnamed
from tests.labs.slurm import SlurmLab

HERE = Path(__file__).parent / "core"
TORCHRUN = "entrypoint=python3 -m hpc_det.launch.torch_distributed train.py"
FOUR_RANKS = ("resources.slots_per_trial=4", "hyperparameters.workers=1")


class PlainLoop(Story):
    """An experiment with the script in `core`."""

    @classmethod
    def begin(cls, *overrides: str, cluster: str = "local", **_: Any) -> PlainLoop:
        story = Story.begin(*overrides, cluster=cluster, config=HERE / "plain.yaml", context=HERE)
        return cls(story.number, story.trial)

    @property
    def saved(self) -> dict[str, Any]:
        """The content of every file of tensors in the newest checkpoint."""
        checkpoint, _ = newest_good(self.trial.checkpoints)
        assert checkpoint is not None
        # times of events, and their files' names, differ between runs
        return {
            path.name: {**content, "tensorboard": None}
            for path in sorted(checkpoint.path.glob("*.pth"))
            if isinstance(content := load(path), dict)
        }

    def is_same_as(self, other: PlainLoop) -> bool:
        assert self.series == other.series
        assert repr(self.saved) == repr(other.saved)
        return True


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> PlainLoop:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPC_DET_ROOT", str(tmp_path_factory.mktemp("undisturbed")))
        loop = PlainLoop.begin("resources.slots_per_trial=2")
        loop.wait()
    return loop


@pytest.mark.long
@pytest.mark.integration
def test_a_plain_loop_on_two_ranks_is_paused_and_goes_on_bit_for_bit(undisturbed: PlainLoop) -> None:
    loop = PlainLoop.begin(TORCHRUN, "resources.slots_per_trial=2", "hyperparameters.waits_at=[10]")
    loop.until_batch(10)
    hpc_det("experiment", "pause", loop.number)
    hpc_det("experiment", "activate", loop.number)
    loop.wait()
    assert loop.causes == ["paused", "finished"]
    assert loop.is_same_as(undisturbed)
    logged = loop.trial.rank_log(1, 1).read_text(), loop.trial.rank_log(2, 0).read_text()
    assert ["paused" in logged[0], "left at batch 30: None" in logged[1]] == [True, True]


@pytest.mark.long
@pytest.mark.integration
def test_asha_promotes_and_ends_trials_of_a_plain_loop() -> None:
    searcher = "{name: async_halving, max_trials: 4, num_rungs: 2, divisor: 2, max_length: {batches: 16}, "
    searcher += "metric: error, stop_once: false, max_concurrent_trials: 1}"
    rates = "hyperparameters={lr: {type: double, minval: 0.001, maxval: 0.1}, workers: 0, waits_at: []}"
    loop = PlainLoop.begin(f"searcher={searcher}", rates)
    loop.wait()
    trials = json.loads(hpc_det("experiment", "list-trials", loop.number, "--json").stdout)
    assert {trial["batches"] for trial in trials} == {8, 16}
    for trial in trials:
        folder = loop.trial.experiment().trial(trial["id"])
        steps = [report["steps"] for report in read_reports(folder.metrics) if report["kind"] == "training"]
        assert steps == [*range(1, trial["batches"] + 1)]


@pytest.mark.integration
def test_a_job_has_one_run() -> None:
    """The agent sends no stop requests to a rank whose run has ended."""
    loop = PlainLoop.begin("entrypoint=python3 -m hpc_det.launch.direct twice.py")
    hpc_det("experiment", "wait", loop.number, check=False)
    assert loop.causes == ["failed"]
    failure = first_failure(loop.trial, 1)
    assert failure is not None
    assert unnamed(failure.message, "init", "one run") == []


@pytest.mark.slurm
@pytest.mark.parametrize("entrypoint", [TORCHRUN])
def test_a_plain_loop_on_two_nodes_is_preempted_twice_and_the_same(
    slurm_lab: SlurmLab, state_folder: None, monkeypatch: pytest.MonkeyPatch, entrypoint: str
) -> None:
    use(slurm_lab, monkeypatch)
    whole = PlainLoop.begin(entrypoint, *FOUR_RANKS, cluster="lab")
    loop = PlainLoop.begin(entrypoint, *FOUR_RANKS, "hyperparameters.waits_at=[5,17]", cluster="lab")
    for batch in (5, 17):
        loop.until_batch(batch)
        slurm_lab.preempt(3, seconds=2)
        loop.until_ended(1 if batch == 5 else 2)
    for each in (whole, loop):
        each.wait()
    assert loop.causes == ["preempted", "preempted", "finished"]
    assert loop.is_same_as(whole)
