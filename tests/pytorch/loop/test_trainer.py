"""The Trainer form in one process, without a job."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_det.checkpoint.committed import committed
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.rng import restore_rng, rng_state, seed_everything
from hpc_det.errors import UsageError
from hpc_det.node.json_files import read_json, read_lines
from hpc_det.pytorch import Batch, Epoch, PyTorchTrial, PyTorchTrialContext, Trainer, TrainUnit, init
from hpc_det.pytorch.state.state import stored_state
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import read_reports
from tests.distributed.ranks import OnRanks
from tests.facts import each_names, keys, refused, unnamed, warned
from tests.pytorch.trials import Life, Tiny, differences

HPARAMS = {"global_batch_size": 4, "workers": 0}
SEARCHER = {"searcher": {"metric": "loss"}}


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    before = rng_state()
    yield
    restore_rng(before)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPC_DET_ROOT", str(tmp_path))
    return tmp_path


class Steady(Tiny):
    """Six batches an epoch."""

    def build_callbacks(self) -> dict[str, Any]:
        return {}


def trained(
    root: Path, exp_conf: dict[str, Any] | None = None, trial: type[Tiny] = Steady, **options: Any
) -> TrialFolder:
    """Train with these options of `fit` and return the folder of the run."""
    before = {*(root / "local").glob("*")}
    with init(hparams=HPARAMS, exp_conf=SEARCHER if exp_conf is None else exp_conf) as context:
        Trainer(trial(context), context).fit(**options)
    (folder,) = {*(root / "local").iterdir()} - before
    return TrialFolder(folder)


def steps(folder: TrialFolder, kind: str) -> list[int]:
    return [record["steps"] for record in read_reports(folder.metrics) if record["kind"] == kind]


def checkpoints(folder: TrialFolder) -> list[int]:
    return sorted(checkpoint.steps for checkpoint in committed(folder.checkpoints))


def test_a_trial_is_trained_validated_and_saved_at_the_end(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = trained(root, max_length=Epoch(2))
    assert (steps(folder, "training"), steps(folder, "validation"), checkpoints(folder)) == ([12], [12], [12])
    assert read_json(folder.outcome) == {"attempt": 1, "kind": "finished", "steps": 12, "saved": True}
    shown = capfd.readouterr().out
    assert unnamed(shown, folder.path) == []
    training, validation = (
        re.findall(rf"^hpc-det: {kind} .*$", shown, re.M)[-1] for kind in ("training", "validation")
    )
    assert unnamed(training, "batch 12", "loss", "noise", "rate") == []
    assert unnamed(validation, "batch 12", "loss") == []


def test_a_script_and_its_configuration_may_ask_for_measurements(root: Path) -> None:
    for options in (
        {"profiling_enabled": True},
        {"exp_conf": {**SEARCHER, "profiling": {"enabled": True, "begin_on_batch": 6}}},
    ):
        folder = trained(root, max_length=Epoch(2), **options)
        lines = read_lines(folder.timings(0))
        assert lines[-1]["batches"] == 12
        assert len(read_lines(folder.system_metrics(0))) >= 1
    assert sum(line["count"] for line in lines) == 6, "the last ones"
    assert not trained(root, max_length=Epoch(2)).profile.exists()


def test_units_may_be_mixed_and_may_be_schedules(root: Path) -> None:
    folder = trained(
        root,
        max_length=Batch(14),
        validation_period=Epoch(1),
        checkpoint_period=Batch([3, 5]),
        reporting_period=Batch(5),
        checkpoint_policy="none",
    )
    assert steps(folder, "validation") == [6, 12, 14]
    assert checkpoints(folder) == [3, 5, 14]
    assert steps(folder, "training") == [3, 5, 6, 10, 12, 14]


@pytest.mark.parametrize(("policy", "saved"), [("all", [4, 8, 10]), ("none", [10])])
def test_the_policy_says_which_validations_are_saved(root: Path, policy: Any, saved: list[int]) -> None:
    folder = trained(root, max_length=Batch(10), validation_period=Batch(4), checkpoint_policy=policy)
    assert checkpoints(folder) == saved


def test_without_a_metric_every_validation_is_saved_with_a_warning(root: Path) -> None:
    with warned(UserWarning, "fit: ", "searcher", "metric", "validation"):
        folder = trained(root, {}, max_length=Batch(6), validation_period=Batch(2))
    assert checkpoints(folder) == [2, 4, 6]


def test_a_first_validation_comes_before_the_first_batch(root: Path) -> None:
    assert steps(trained(root, max_length=Batch(2), step_zero_validation=True), "validation") == [0, 2]


def test_a_test_is_one_batch_of_everything(root: Path) -> None:
    folder = trained(root, test_mode=True, validation_period=Batch(1), checkpoint_policy="none")
    assert (steps(folder, "training"), steps(folder, "validation"), checkpoints(folder)) == ([1], [1], [1])


def test_a_length_must_be_given_and_be_a_number(root: Path) -> None:
    with refused(UsageError, "fit: ", "max_length", "Batch(n)", "Epoch(n)"):
        trained(root)
    with refused(TypeError, "max_length: ", "Batch(value=[3])"):
        trained(root, max_length=Batch([3]))


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"max_length": 7}, ("max_length", 7, "Batch(7)", "Epoch(7)")),
        ({"max_length": Batch(1), "validation_period": 2.5}, ("validation_period", 2.5, "Batch(100)")),
        ({"max_length": Batch(1), "checkpoint_period": "7"}, ("checkpoint_period", "'7'", "Batch(100)")),
        ({"max_length": Batch(1), "reporting_period": TrainUnit(5)}, ("reporting_period", "Batch(100)")),
        ({"max_length": Batch(0)}, ("max_length", "value=0", "Batch(1)")),
        ({"max_length": Epoch(-1)}, ("max_length", "value=-1", "Epoch(1)")),
        ({"max_length": Batch(1), "checkpoint_policy": "bset"}, ("checkpoint_policy", "'bset'", "'best'")),
        ({"max_length": Batch(1), "checkpoint_policy": None}, ("checkpoint_policy", None, "best, all, none")),
    ],
)
def test_what_fit_cannot_use_is_named_with_a_remedy(
    root: Path, options: dict[str, Any], facts: tuple[str, ...]
) -> None:
    with refused(UsageError, *facts) as error:
        trained(root, **options)
    assert set(keys(error.value.problems)) <= {"fit", "max_length"}


def test_the_configuration_may_give_the_length(root: Path) -> None:
    folder = trained(root, {"searcher": {"metric": "loss", "max_length": {"records": 12}}})
    assert steps(folder, "validation") == [3]


def test_a_run_goes_on_from_a_checkpoint_of_an_earlier_one_to_the_bit(root: Path, capfd: Any) -> None:
    torch.manual_seed(4321)
    periods = {"validation_period": Batch(4), "checkpoint_period": Batch(7)}
    often: dict[str, Any] = {"max_length": Batch(15), "checkpoint_policy": "none", **periods}
    undisturbed = Life(trained(root, trial=Tiny, **often))
    (at_7, at_14, _) = sorted(committed(undisturbed.folder.checkpoints), key=lambda checkpoint: checkpoint.steps)
    for begin in (at_7, at_14):
        torch.manual_seed(4321)
        life = Life(trained(root, trial=Tiny, latest_checkpoint=begin.path, **often))
        assert life.checkpoints == [steps for steps in (14, 15) if steps > begin.steps]
        assert unnamed(capfd.readouterr().out, begin.path) == []
        assert not differences(life.newest, undisturbed.newest)
        assert life.series == [record for record in undisturbed.series if record[1] > begin.steps]


def test_nothing_is_trained_beyond_the_length(root: Path) -> None:
    torch.manual_seed(4321)
    (end,) = committed(trained(root, max_length=Batch(5)).checkpoints)
    torch.manual_seed(4321)
    folder = trained(root, max_length=Batch(5), latest_checkpoint=end.path)
    assert read_json(folder.outcome) == {"attempt": 1, "kind": "finished", "steps": 5, "saved": True}
    assert steps(folder, "training") == []


def test_a_checkpoint_is_where_a_run_with_another_seed_begins_anew(root: Path, capfd: Any) -> None:
    torch.manual_seed(4321)
    first = trained(root, max_length=Batch(5))
    (checkpoint,) = committed(first.checkpoints)
    torch.manual_seed(4322)
    starts = []

    class Continued(Steady):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            starts.append((batch_idx, self.model.get_parameter("0.bias").tolist()))
            return super().train_batch(batch, epoch_idx, batch_idx)

    trained(root, trial=Continued, max_length=Batch(1), latest_checkpoint=checkpoint.path)
    assert unnamed(capfd.readouterr().out, "batch 0", "another trial or seed", checkpoint.path) == []
    assert starts == [(0, stored_state(checkpoint.path)["models_state_dict"][0]["0.bias"].tolist())]


class Terminated(Steady):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().train_batch(batch, epoch_idx, batch_idx)


def test_a_term_saves_and_leaves_the_training(root: Path) -> None:
    folder = trained(root, trial=Terminated, max_length=Batch(100_000), reporting_period=Batch(1000))
    outcome = read_json(folder.outcome)
    assert outcome is not None
    assert outcome["kind"] == "stopped"
    assert 3 <= outcome["steps"] < 100_000
    assert checkpoints(folder) == [outcome["steps"]]


def test_signals_are_the_scripts_own_again_after_the_block(root: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    trained(root, max_length=Batch(1))
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_seed_of_the_script_is_the_seed_of_the_trial(root: Path) -> None:
    torch.manual_seed(4321)
    random.seed(1)
    with init(hparams=HPARAMS) as context:
        assert context.get_trial_seed() == 4321
    with init(hparams=HPARAMS, exp_conf={"reproducibility": {"experiment_seed": 7}}) as context:
        assert context.get_trial_seed() != 4321


def drawn(distributed: Distributed, root: str, experiment_seed: int | None) -> list[float]:
    """Return random draws of a script outside a job; the ranks begin with different generators."""
    os.environ["HPC_DET_ROOT"] = root
    seed_everything(distributed.rank + int.from_bytes(os.urandom(3), "big"))
    exp_conf = {} if experiment_seed is None else {"reproducibility": {"experiment_seed": experiment_seed}}
    with init(exp_conf=exp_conf, distributed=distributed):
        return [random.random(), float(np.random.random()), float(torch.rand(()))]


def test_generators_are_seeded_outside_a_job_as_within(on_ranks: OnRanks, root: Path) -> None:
    (seeded, other), again = on_ranks(2, drawn, str(root), 7), drawn(Distributed(), str(root), 7)
    assert seeded == other == again
    first, second = on_ranks(2, drawn, str(root), None)
    assert first == second != seeded


def test_arguments_reach_the_trial(root: Path) -> None:
    with init(hparams={**HPARAMS, "depth": 3}, exp_conf={"data": {"x": 1}}, aggregation_frequency=4) as context:
        assert context.get_hparam("depth") == 3
        assert context.get_data_config() == {"x": 1}
        assert context.aggregation_frequency == 4
        assert context.distributed.size == 1


def test_a_failure_goes_through_and_leaves_no_thread(root: Path) -> None:
    with refused(ArithmeticError, "of the script"), init(hparams=HPARAMS):
        raise ArithmeticError("of the script")


class Incomplete(PyTorchTrial):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        return {}


def test_what_a_trial_lacks_is_named(root: Path) -> None:
    with init(hparams=HPARAMS) as context, pytest.raises(UsageError) as error:
        Trainer(Incomplete(context), context)
    builders = ["Incomplete", "build_training_data_loader", "build_validation_data_loader"]
    evaluations = ["Incomplete", "neither", "evaluate_batch", "evaluate_full_dataset"]
    each_names(error.value.problems, builders, evaluations)


def test_a_context_of_another_making_is_refused(root: Path) -> None:
    context = PyTorchTrialContext.from_config({"hyperparameters": HPARAMS})
    with refused(UsageError, "context", "hpc_det.pytorch.init()"):
        Trainer(Steady(context), context)


class Loose(Steady):
    """Trains a weight that belongs to no model."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        super().__init__(context)
        context.wrap_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))


def test_a_parameter_of_no_model_is_warned_about(root: Path) -> None:
    with warned(UserWarning, "Loose: ", "1 parameters", "wrapped"):
        trained(root, trial=Loose, max_length=Batch(1))
