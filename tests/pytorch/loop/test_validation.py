"""Both forms of evaluation in the loop, on one rank and on several."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError
from hpc_det.pytorch import DataLoader, PyTorchCallback, PyTorchTrial, PyTorchTrialContext, Reducer, Trainer, init
from hpc_det.pytorch.loop.harness import load_trial_class
from hpc_det.pytorch.strategies.strategy import numbered
from hpc_det.pytorch.trial.trial import interface_problems
from hpc_det.store.metrics import read_reports
from tests.distributed.ranks import OnRanks
from tests.facts import each_names, refused
from tests.pytorch.trials import Life, StopAt, Tiny, assert_same


class Steady(Tiny):
    """Nine validation records: five batches of two, the last one short."""

    def build_callbacks(self) -> dict[str, Any]:
        return {}


ONCE: dict[str, Any] = {
    "searcher": {"max_length": {"batches": 2}},
    "min_validation_period": {"batches": 0},
    "min_checkpoint_period": {"batches": 0},
}
TWO = {"global_batch_size": 2}
FOUR = {"global_batch_size": 4}


def validated(life: Life) -> dict[str, Any]:
    (metrics,) = [metrics for kind, _, metrics in life.series if kind == "validation"]
    return metrics


def on_a_rank(distributed: Distributed, life: Life, stop_at: float = math.inf) -> bool:
    return life.attempt(StopAt(stop_at), distributed).end == "stopped"


# --- batch by batch


class Numbered(Steady):
    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:  # type: ignore[override]
        return {"loss": float(batch_idx), "rank": float(self.context.distributed.rank)}


@pytest.mark.parametrize(("size", "loss", "rank"), [(1, 1.0, 0.0), (2, 4 / 5, 2 / 5)])
def test_a_batch_comes_with_its_number_on_its_rank_where_the_trial_asks_for_it(
    on_ranks: OnRanks, tmp_path: Path, size: int, loss: float, rank: float
) -> None:
    """One rank: batches 0, 1, 2. Two: rank 0 has 0, 1, 2 and rank 1 has 0, 1, each of two records."""
    life = Life.begin(tmp_path, Numbered, hparams=FOUR, **ONCE)
    on_ranks(size, on_a_rank, life)
    assert validated(life) == {"loss": loss, "rank": rank}


class Predicting(Steady):
    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"loss": 0.5, "predictions": self.model(batch[0])}

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"keeping": KeepsShapes()}


class KeepsShapes(PyTorchCallback):
    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        print("shapes", [tuple(output["predictions"].shape) for output in outputs])


def test_tensors_beside_the_metrics_reach_the_callbacks_and_are_reported_as_null(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    life = Life.begin(tmp_path, Predicting, hparams=FOUR, **ONCE)
    life.attempt(StopAt(math.inf))
    assert validated(life) == {"loss": 0.5, "predictions": None}
    output = capfd.readouterr().out
    assert "shapes [(4, 1), (4, 1), (1, 1)]" in output
    assert output.count("evaluate_batch: predictions: ") == 1


class Reduced(Steady):
    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        count = float(len(batch[0]))
        return {"loss": 0.0, "mean": count, "records": count, "most": count, "fewest": count}

    def evaluation_reducer(self) -> dict[str, Reducer]:
        names = {"records": Reducer.SUM, "most": Reducer.MAX, "fewest": Reducer.MIN}
        return {"loss": Reducer.AVG, "mean": Reducer.AVG, **names}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_metric_has_a_reducer_of_its_own_over_all_ranks(on_ranks: OnRanks, tmp_path: Path, size: int) -> None:
    life = Life.begin(tmp_path, Reduced, hparams={"global_batch_size": 2 * size}, **ONCE)
    on_ranks(size, on_a_rank, life)
    expected = {"loss": 0.0, "mean": 9 / 5, "records": 9.0, "most": 2.0, "fewest": 1.0}
    assert validated(life) == expected


class Forgetful(Reduced):
    def evaluation_reducer(self) -> dict[str, Reducer]:
        return {"loss": Reducer.AVG, "recall": Reducer.MAX}


def test_reducers_must_name_exactly_the_metrics(tmp_path: Path) -> None:
    with refused(UsageError, "evaluation_reducer", ["loss", "recall"], "evaluate_batch"):
        Life.begin(tmp_path, Forgetful, **ONCE).attempt()


class Normalized(Steady):
    """A model with buffers, which DDP exchanges in every forward pass, even in eval mode."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))


def test_ranks_with_more_batches_than_others_validate_a_model_with_buffers(on_ranks: OnRanks, tmp_path: Path) -> None:
    """Five batches of two on three ranks: two, two and one."""
    life = Life.begin(tmp_path, Normalized, hparams={"global_batch_size": 6}, **ONCE)
    on_ranks(3, on_a_rank, life)
    assert math.isfinite(validated(life)["loss"])


class WithGradients(Normalized):
    """Computes gradients during its validation."""

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        inputs, _ = batch
        with torch.enable_grad():
            inputs = inputs.clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.model(inputs).sum(), inputs)
        return {"loss": slope.abs().mean()}


def test_a_validation_may_compute_gradients_at_each_ranks_own_pace(on_ranks: OnRanks, tmp_path: Path) -> None:
    life = Life.begin(tmp_path, WithGradients, hparams={"global_batch_size": 6}, **ONCE)
    on_ranks(3, on_a_rank, life)
    assert validated(life)["loss"] > 0


# --- the full dataset


class Whole(Steady):
    evaluate_batch = PyTorchTrial.evaluate_batch

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        assert self.context.distributed.is_chief
        records = [len(inputs) for inputs, _ in data_loader]
        assert len(records) == len(data_loader) == 5
        assert len(data_loader.dataset) == 9
        return {"loss": torch.tensor([0.5]), "records": sum(records)}


@pytest.mark.parametrize("size", [1, 2])
def test_rank_0_evaluates_everything_and_all_know_the_result(on_ranks: OnRanks, tmp_path: Path, size: int) -> None:
    life = Life.begin(tmp_path, Whole, hparams={"global_batch_size": 2 * size}, **ONCE)
    on_ranks(size, on_a_rank, life)
    assert validated(life) == {"loss": 0.5, "records": 9.0}
    assert life.newest["progress.pth"]["best"] == 0.5


class Counting(Whole):
    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        batches = [*data_loader]
        assert len(batches) == len(data_loader)
        return {"loss": float(len(batches))}


def test_a_test_evaluates_one_batch_of_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_DET_ROOT", str(tmp_path))
    with init(hparams={**TWO, "workers": 0}, exp_conf={"searcher": {"metric": "loss"}}) as context:
        Trainer(Counting(context), context).fit(test_mode=True)
    (log,) = tmp_path.glob("local/*/metrics.jsonl")
    assert [record["metrics"] for record in read_reports(log) if record["kind"] == "validation"] == [{"loss": 1.0}]


@pytest.mark.integration
def test_a_stop_inside_a_full_evaluation_changes_no_bit(tmp_path: Path) -> None:
    periodic = {**ONCE, "min_validation_period": {"batches": 1}}
    undisturbed, never = Life.begin(tmp_path / "undisturbed", Whole, TWO, **periodic), StopAt()
    undisturbed.attempt(never)
    for tick, look in ((1, 1), (2, 1), (2, 4), (3, 2)):
        life = Life.begin(tmp_path / f"{tick} {look}", Whole, TWO, **periodic)
        assert life.attempt(StopAt(tick, look)).end == "stopped"
        life.attempt()
        assert_same(life, undisturbed)


# --- what is refused


class NoDict(Steady):
    def evaluate_batch(self, batch: Any) -> Any:
        return torch.ones(())


class NoLoss(Steady):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        return None


class NoNumber(Steady):
    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"loss": "small"}


class NothingWhole(Whole):
    def evaluate_full_dataset(self, data_loader: Any) -> Any:
        return None


class TextWhole(Whole):
    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        return {"loss": "small"}


class ChangesNames(Steady):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        return {"loss": 1.0} if batch_idx else {"error": 1.0}


class ForeignLoader(Steady):
    def build_training_data_loader(self) -> Any:
        return torch.utils.data.DataLoader(TensorDataset(torch.ones(4)))


class EmptyForeign(Steady):
    """An external loader without a length, which yields nothing."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        super().__init__(context)
        context.experimental.disable_dataset_reproducibility_checks()

    def build_validation_data_loader(self) -> Any:
        return torch.utils.data.DataLoader(Nothing())


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


class Empty(Steady):
    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.ones(0)))


@pytest.mark.parametrize(
    ("trial", "facts"),
    [
        (NoDict, ["evaluate_batch", "Tensor", "dict"]),
        (NoLoss, ["train_batch", "NoneType", "dict"]),
        (NoNumber, ["evaluate_batch", "'loss'", "number", "str"]),
        (NothingWhole, ["evaluate_full_dataset", None, "dict"]),
        (TextWhole, ["searcher.metric: ", "'loss'", "str", "number"]),
        (ChangesNames, [["error"], ["loss"]]),
        (
            ForeignLoader,
            [
                "build_training_data_loader",
                "DataLoader",
                "context.experimental.disable_dataset_reproducibility_checks()",
            ],
        ),
        (EmptyForeign, ["build_validation_data_loader: ", "batch", "rank"]),
        (Empty, ["build_validation_data_loader: ", "records"]),
    ],
)
def test_what_a_trial_gets_wrong_is_said_with_the_remedy(
    tmp_path: Path, trial: type[Tiny], facts: list[object]
) -> None:
    with refused(UsageError, *facts):
        Life.begin(tmp_path, trial, **ONCE).attempt()


class Both(Whole):
    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {}


class Neither(Steady):
    evaluate_batch = PyTorchTrial.evaluate_batch


@pytest.mark.parametrize(("trial", "how_many"), [(Both, "both"), (Neither, "neither")])
def test_one_form_of_evaluation_is_implemented_not_both_nor_neither(trial: type[Tiny], how_many: str) -> None:
    facts = [how_many, "evaluate_batch", "evaluate_full_dataset"]
    each_names(interface_problems(trial), facts)
    with refused(UsageError, f"--trial {__name__}:{trial.__name__}: ", *facts):
        load_trial_class(f"{__name__}:{trial.__name__}")


# --- signatures and lengths


class Optional(Steady):
    def evaluate_batch(self, batch: Any, model: Any = None, **options: Any) -> dict[str, Any]:
        return {"got": model}


class Keyword(Steady):
    def evaluate_batch(self, batch: Any, *, batch_idx: int = 0) -> dict[str, Any]:
        return {"got": batch_idx}


class Anything(Steady):
    def evaluate_batch(self, *arguments: Any) -> dict[str, Any]:
        return {"got": arguments[1]}


class OtherName(Steady):
    def evaluate_batch(self, batch: Any, number: int) -> dict[str, Any]:  # type: ignore[override]
        return {"got": number}


@pytest.mark.parametrize(("trial", "got"), [(Optional, None), (Keyword, 7), (Anything, 7), (OtherName, 7)])
def test_the_signature_says_whether_a_batch_comes_with_its_number(trial: type[Tiny], got: int | None) -> None:
    assert numbered(object.__new__(trial).evaluate_batch)("a batch", 7) == {"got": got}


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        (torch.ones(3, 2), 3),
        (torch.ones(4).numpy(), 4),
        ([torch.ones(5), torch.ones(1)], 5),
        ({"data": [{"sub": torch.ones(6)}], "label": torch.ones(2)}, 6),
        ((torch.ones(7, 1),), 7),
    ],
)
def test_the_records_of_a_batch_are_those_of_its_first_tensor(batch: Any, length: int) -> None:
    assert object.__new__(PyTorchTrial).get_batch_length(batch) == length


@pytest.mark.parametrize("batch", ["text", [], {}, torch.ones(())])
def test_a_batch_without_a_length_is_refused(batch: Any) -> None:
    with refused(UsageError, "get_batch_length: ", type(batch).__name__):
        object.__new__(PyTorchTrial).get_batch_length(batch)


class Texts(Steady):
    """Batches that only the trial can count and move to a device."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        super().__init__(context)
        context.experimental.disable_auto_to_device()

    def build_training_data_loader(self) -> DataLoader:
        texts: Any = [f"record {number}" for number in range(8)]
        return DataLoader(texts, batch_size=2, collate_fn=" and ".join)

    def get_batch_length(self, batch: Any) -> int:
        return len(batch.split(" and "))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        assert self.get_batch_length(batch) == 2
        return {"length": len(batch)}


def test_a_trial_may_count_and_move_its_batches_by_itself(tmp_path: Path) -> None:
    life = Life.begin(tmp_path, Texts, **ONCE)
    life.attempt()
    assert life.steps("training") == [2]
