"""The resume check on trials that resume exactly, and on trials that each lose one known state.

Each attempt runs in a separate process if the state outlives the trial.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_det.core.run import Purpose, Run
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.metrics import MetricsLog
from hpc_det.distributed.preempt import ForcedStop
from hpc_det.distributed.rng import seed_everything
from hpc_det.pytorch.loop import run as training
from hpc_det.pytorch.loop.schedule import Schedule
from hpc_det.store.folders import TrialFolder
from hpc_det.view.resume_causes import causes
from hpc_det.view.resume_check import Comparison, compare
from tests.distributed.ranks import OnRanks
from tests.pytorch import leaky
from tests.pytorch.trials import CONFIG

pytestmark = pytest.mark.integration

BATCHES, STOP = 12, 5
"""Two epochs; the stop is in the first one."""
SETTINGS: dict[str, Any] = {
    **CONFIG,
    "searcher": {**CONFIG["searcher"], "metric": "error", "max_length": {"batches": BATCHES}},
    "min_validation_period": {"batches": 6},
    "min_checkpoint_period": {"batches": 0},
    "checkpoint_policy": "none",
}


def train(distributed: Distributed, folder: TrialFolder, trial: str, stops: frozenset[int], attempt: int) -> str:
    """Run an attempt as `Run.of_attempt` and `train_by_name` do, and return how it ended."""
    seed_everything(5)
    stop = ForcedStop(distributed.messages)
    run = Run(
        spec={"experiment_id": 1, "trial_id": 1, "trial_seed": 5, "hparams": {}, "config": SETTINGS},
        folder=folder,
        attempt=attempt,
        distributed=distributed,
        stop=stop,
        log=MetricsLog(folder, attempt),
        purpose=Purpose(forced_stops=stops),
    )
    trial_class = getattr(leaky, trial)
    context = training.new_context(run, trial_class)
    context.set_enable_tensorboard_logging(False)
    try:
        schedule = Schedule.from_config(SETTINGS, None)
        return str(training.train(run, trial_class(context), context, schedule, is_trainer=False)["kind"])
    finally:
        stop.close()


def checked(path: Path, trial: str, *stops: int, on_ranks: OnRanks | None = None) -> Comparison:
    """Compare an undisturbed training of the trial with a stopped one. `on_ranks`: run each attempt in a separate
    process.
    """
    folders = [TrialFolder(path / name / "trials" / "1") for name in ("undisturbed", "stopped")]
    for folder, places in zip(folders, ((), stops), strict=True):
        folder.checkpoints.mkdir(parents=True)
        ends: list[str] = []
        for attempt in range(1, len(places) + 2):
            arguments = (folder, trial, frozenset(places), attempt)
            ends += on_ranks(1, train, *arguments) if on_ranks else [train(Distributed(), *arguments)]
        assert ends == ["stopped"] * len(places) + ["finished"]
    return compare(*folders)


LOST = {
    "TorchGenerator": ("metrics", STOP, "generator", "attribute trial.generator"),
    "NumpyGenerator": ("metrics", STOP, "generator", "attribute trial.generator"),
    "PythonGenerator": ("metrics", STOP, "generator", "attribute trial.generator"),
    "Counter": ("metrics", STOP, "state", "attribute trial.count"),
    "Average": ("validation", 6, "state", "attribute trial.average"),
    "UnwrappedOptimizer": ("validation", 6, "optimizer", "attribute trial.second"),
    "UnwrappedModule": ("metrics", STOP, "module", "attribute trial.scale"),
    "UnwrappedScheduler": ("state", 7, "scheduler", "attribute trial.schedule"),
    "UnwrappedScaler": ("metrics", STOP, "scaler", "attribute trial.scaler"),
    "OwnScaler": ("metrics", STOP, "state", "attribute trial.scale.scale"),
    "CallbackWithoutState": ("metrics", 8, "state", "attribute trial.callback.epochs"),
    "LayerWithACounter": ("metrics", STOP, "state", "attribute model 0.2.calls"),
    "Closure": ("metrics", STOP, "state", "attribute trial.factor (closure).count"),
    "RunningGenerator": ("metrics", STOP, "state", "attribute trial.numbers (running).number"),
    "SecondLoader": ("metrics", STOP, "state", "attribute trial.others"),
    "Cycle": ("metrics", STOP, "hidden state", None),
    "NoisyData": ("data", STOP, "generator", "attribute training data loader.dataset.noise.__self__"),
    "NoiseOfWorkers": ("data", STOP, "data", None),
    "Buffer": ("state", STOP, "not restored", "model 0: 2.mean"),
}
"""By trial: the first difference and its batch, the kind of the likeliest cause, and the value that it concerns."""
SOME_LOST = [name if number % 2 else pytest.param(name, marks=pytest.mark.long) for number, name in enumerate(LOST)]


@pytest.mark.parametrize("trial", SOME_LOST)
def test_what_a_resume_loses_is_named(tmp_path: Path, trial: str) -> None:
    found = checked(tmp_path, trial, 8 if trial == "CallbackWithoutState" else STOP)
    first, cause = found.first[0], causes(found)[0]
    assert (first.part, first.batch, cause.kind, cause.name) == LOST[trial]


@pytest.mark.parametrize(
    ("trial", "name"),
    [
        ("GlobalVariable", "global variable tests.pytorch.leaky.batches"),
        ("ClassAttribute", "global variable tests.pytorch.leaky.ClassAttribute.made"),
    ],
)
def test_what_ends_with_the_process_is_named(tmp_path: Path, on_ranks: OnRanks, trial: str, name: str) -> None:
    found = checked(tmp_path, trial, STOP, on_ranks=on_ranks)
    assert (found.first[0].part, found.first[0].batch) == ("metrics", STOP)
    assert [(cause.kind, cause.name) for cause in causes(found)] == [("state", name)]


UNEQUAL = {
    "Time": ("metrics", 0, "nondeterminism"),
    "NoisyKernel": ("state", 1, "nondeterminism"),
    "NoisyKernelAndAverage": ("state", 1, "nondeterminism"),
    "UnseededGenerator": ("data", 0, "generator"),
    "UnseededWorker": ("data", 0, "data"),
}
"""Trials that differ even without a stop: the first difference, its batch, and the kind of the only cause."""


@pytest.mark.parametrize("stops", [pytest.param((), marks=pytest.mark.long), (STOP,)])
@pytest.mark.parametrize("trial", UNEQUAL)
def test_what_differs_without_any_stop_is_not_blamed_on_a_resume(
    tmp_path: Path, trial: str, stops: tuple[int, ...]
) -> None:
    found = checked(tmp_path, trial, *stops)
    (cause,) = causes(found)
    assert (found.first[0].part, found.first[0].batch, cause.kind) == UNEQUAL[trial]


@pytest.mark.parametrize(
    "trial",
    [
        "Sound",
        "AverageInABuffer",
        "WrappedSchedulerAndScaler",
        "CallbackWithState",
        "NoiseOfTorch",
        "DrawingAtTheStart",
    ],
)
def test_a_trial_whose_state_is_in_checkpoints_is_sound(tmp_path: Path, trial: str) -> None:
    found = checked(tmp_path, trial, 3, STOP, 6)
    assert found.is_identical
    assert found.resumes == (3, STOP, 6)
    assert found.lost == ()


def test_timers_loggers_files_and_caches_are_no_difference(tmp_path: Path) -> None:
    found = checked(tmp_path, "Everyday", 3, STOP)
    assert found.is_identical
    assert found.lost == ()


def test_what_reducers_keep_of_a_validation_is_no_difference(tmp_path: Path) -> None:
    """The second stop comes after the validation at batch 6, when its values are no longer needed."""
    found = checked(tmp_path, "WithReducers", 3, 8)
    assert found.is_identical
    assert found.lost == ()
