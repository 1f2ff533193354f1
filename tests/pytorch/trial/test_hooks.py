"""The hooks of a callback: which are called, when, and on which ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch import DataLoader, PyTorchCallback, PyTorchTrialContext
from tests.distributed.ranks import OnRanks
from tests.pytorch.trials import Life, StopAt, Tiny, assert_same


class Everything(PyTorchCallback):
    """Records all calls of its hooks."""

    calls: list[Any] = []  # noqa: RUF012

    def state_dict(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls.append("load_state_dict")

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        self.calls.append(("startup", first_batch_idx, checkpoint_uuid is not None))

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        self.calls.append(("load", sorted(checkpoint)))

    def on_training_start(self) -> None:
        self.calls.append("training")

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        self.calls.append(("epoch", epoch_idx))

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self.calls.append(("epoch end", epoch_idx))

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        assert avg_metrics["loss"] == pytest.approx(sum(batch["loss"] for batch in batch_metrics) / len(batch_metrics))
        self.calls.append(("report", len(batch_metrics), round(avg_metrics["loss"], 6)))

    def on_validation_start(self) -> None:
        self.calls.append("validation")

    def on_validation_epoch_start(self) -> None:
        self.calls.append("validation epoch")

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        self.calls.append(("outputs", len(outputs), sorted(outputs[0])))

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.calls.append(("validation end", round(metrics["loss"], 6)))

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["callbacks"]["note"] = {"text": "added by a hook"}
        self.calls.append("save")

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        assert Path(checkpoint_dir, "state_dict.pth").exists()
        self.calls.append("written")

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        assert len(uuid) == 36
        self.calls.append("committed")

    def on_trial_shutdown(self) -> None:
        self.calls.append("shutdown")


class Observed(Tiny):
    """Four batches an epoch, without Tiny's callback."""

    def build_training_data_loader(self) -> DataLoader:
        Everything.calls.append("loaders")
        return self.loader(16, shuffle=True)

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"everything": Everything()}


CONFIG: dict[str, Any] = {
    "searcher": {"max_length": {"epochs": 2}},
    "min_validation_period": {"epochs": 1},
    "min_checkpoint_period": {"batches": 0},
    "checkpoint_policy": "none",
    "scheduling_unit": 3,
}
VALIDATION = ["validation", "validation epoch", "outputs", "validation end"]
SAVE = ["save", "written", "committed"]


def call_names() -> list[Any]:
    """Return only the names of the calls."""
    return [entry if isinstance(entry, str) else entry[0] for entry in Everything.calls]


@pytest.fixture(autouse=True)
def _nothing_heard() -> None:
    Everything.calls.clear()


def test_hooks_come_in_the_order_of_the_loop(tmp_path: Path) -> None:
    Life.begin(tmp_path, Observed, **CONFIG).attempt()
    assert call_names() == [
        *("startup", "loaders", "training"),
        *("epoch", "report", "epoch end", "report", *VALIDATION),
        *("epoch", "report", "epoch end", "report", *SAVE, *VALIDATION),
        *(*SAVE, "shutdown"),
    ]
    assert Everything.calls[0] == ("startup", 0, False)
    assert [entry[1] for entry in Everything.calls if entry[0] == "report"] == [3, 1, 2, 2]


class Asking(PyTorchCallback):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self._context = context

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        context = self._context
        places = (context.current_train_batch(), context.current_train_epoch())
        Everything.calls.append((*places, context.is_epoch_start(), context.is_epoch_end()))


class Asked(Observed):
    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"asking": Asking(self.context)}


def test_an_epoch_starts_with_its_first_batch(tmp_path: Path) -> None:
    Life.begin(tmp_path, Asked, **CONFIG).attempt()
    assert Everything.calls == ["loaders", (0, 0, True, False), (4, 1, True, False)]


def test_a_resume_inside_an_epoch_starts_no_epoch(tmp_path: Path) -> None:
    life = Life.begin(tmp_path, Observed, **CONFIG)
    assert life.attempt(StopAt(3)).end == "stopped"
    assert call_names() == ["startup", "loaders", "training", "epoch", *SAVE, "shutdown"]
    Everything.calls.clear()
    life.attempt()
    assert call_names()[:9] == [
        *("startup", "loaders", "load", "load_state_dict", "training"),
        *("report", "epoch end", "report", "validation"),
    ]
    assert Everything.calls[0] == ("startup", 2, True)


def test_the_initial_validation_follows_the_start_of_training(tmp_path: Path) -> None:
    Life.begin(tmp_path, Observed, **CONFIG, perform_initial_validation=True).attempt()
    assert call_names()[:8] == ["startup", "loaders", "training", *VALIDATION, "epoch"]


def test_what_a_hook_adds_to_a_checkpoint_is_saved(tmp_path: Path) -> None:
    life = Life.begin(tmp_path, Observed, **CONFIG)
    life.attempt()
    assert life.newest["state_dict.pth"]["callbacks"]["note"] == {"text": "added by a hook"}


class Failing(Observed):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        raise ArithmeticError


def test_the_shutdown_is_heard_whatever_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError):
        Life.begin(tmp_path, Failing, **CONFIG).attempt()
    assert call_names()[-1] == "shutdown"


def on_a_rank(distributed: Distributed, life: Life) -> list[Any]:
    life.attempt(StopAt(math.inf), distributed)
    return Everything.calls


def test_every_rank_hears_the_same_but_for_what_rank_0_writes(on_ranks: OnRanks, tmp_path: Path) -> None:
    first, second = on_ranks(2, on_a_rank, Life.begin(tmp_path, Observed, **CONFIG))
    rank_0s = ("save", "written")
    shares = {entry[1] for calls in (first, second) for entry in calls if entry[0] == "outputs"}
    assert shares == {2, 3}, "nine records in batches of two"
    first, second = ([entry for entry in calls if entry[0] != "outputs"] for calls in (first, second))
    assert [entry for entry in first if entry not in rank_0s] == second
    assert {"save", "written"} < {entry for entry in first if isinstance(entry, str)}


class SwapsWeights(PyTorchCallback):
    """Validates with other weights, as callbacks that average weights do, and restores the weights afterwards."""

    def __init__(self, trial: Tiny) -> None:
        self._trial = trial
        self._own: dict[str, Any] = {}
        self.validations = 0

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self.validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.validations = state_dict["validations"]

    def on_validation_start(self) -> None:
        self.validations += 1
        model = self._trial.context.models[0]
        self._own = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict({name: value / 2 for name, value in self._own.items()})

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self._trial.context.models[0].load_state_dict(self._own)


class Averaging(Tiny):
    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {**super().build_callbacks(), "averaging": SwapsWeights(self)}


@pytest.mark.integration
def test_a_stop_inside_a_validation_undoes_what_its_start_did(tmp_path: Path) -> None:
    undisturbed, never = Life.begin(tmp_path / "undisturbed", Averaging), StopAt()
    undisturbed.attempt(never)
    for tick in range(1, never.ticks + 1):
        life = Life.begin(tmp_path / str(tick), Averaging)
        assert life.attempt(StopAt(tick, look=2)).end == "stopped"
        life.attempt()
        assert_same(life, undisturbed)
