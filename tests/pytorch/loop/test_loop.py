from __future__ import annotations

import math
import random
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.gang_messages import GangMessages
from hpc_det.distributed.preempt import StopAgreement, give_notice
from hpc_det.distributed.rng import restore_rng, rng_state
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.pytorch import DataLoader, LRScheduler, PyTorchCallback, PyTorchTrial, PyTorchTrialContext
from hpc_det.pytorch.loop.harness import load_trial_class
from hpc_det.resources import data_path
from tests.distributed.ranks import OnRanks
from tests.facts import refused, unnamed
from tests.pytorch.trials import Life, StopAt, Tiny, assert_same
from tests.wait import wait_for

NAN = math.nan


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    before = rng_state()
    yield
    restore_rng(before)


# --- exact resume

SETTINGS: dict[str, dict[str, Any]] = {
    "periods that end inside an epoch": {},
    "periods of epochs": {"min_validation_period": {"epochs": 1}, "min_checkpoint_period": {"epochs": 2}},
    "periods of records": {"min_validation_period": {"records": 12}, "min_checkpoint_period": {"records": 8}},
    "initial validation, all saved": {"perform_initial_validation": True, "checkpoint_policy": "all"},
    "no periods": {
        "min_validation_period": {"batches": 0},
        "min_checkpoint_period": {"batches": 0},
        "checkpoint_policy": "none",
    },
    "nothing kept": {"checkpoint_storage": {"save_trial_best": 0, "save_trial_latest": 0}},
    "an end inside an epoch": {"searcher": {"max_length": {"batches": 15}}},
}


def keep_the_last(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with a checkpoint kept at the end, so that the final states can be compared."""
    return {**config, "checkpoint_storage": {**config.get("checkpoint_storage", {}), "save_trial_latest": 1}}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "every"),
    [
        *((name, 5) for name in SETTINGS),
        *(pytest.param(name, 1, marks=pytest.mark.long) for name in SETTINGS),
    ],
)
def test_a_stop_at_any_tick_changes_no_bit(tmp_path: Path, name: str, every: int) -> None:
    config = keep_the_last(SETTINGS[name])
    undisturbed, never = Life.begin(tmp_path / "undisturbed", **config), StopAt()
    undisturbed.attempt(never)
    assert never.ticks >= 15
    for tick in range(1, never.ticks + 1, every):
        life = Life.begin(tmp_path / str(tick), **config)
        assert life.attempt(StopAt(tick, look=1 + tick % 3)).end == "stopped"
        assert life.attempt().end == "finished"
        assert_same(life, undisturbed)


@pytest.mark.integration
@pytest.mark.parametrize("every", [5, 7])
def test_many_stops_change_no_bit(tmp_path: Path, every: int) -> None:
    undisturbed, life = (Life.begin(tmp_path / name) for name in ("undisturbed", "stopped"))
    undisturbed.attempt()
    while life.attempt(StopAt(every)).end == "stopped":
        assert life.attempts < 20
    assert life.attempts > 3
    assert_same(life, undisturbed)


class Killed(Exception):
    pass


class Mortal(Tiny):
    """Dies once, in the batch that the test sets."""

    dies_at: int | None = None

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        result = super().train_batch(batch, epoch_idx, batch_idx)
        if batch_idx == Mortal.dies_at:
            Mortal.dies_at = None
            raise Killed
        return result


@pytest.mark.integration
def test_a_death_in_any_batch_changes_no_bit(tmp_path: Path) -> None:
    undisturbed = Life.begin(tmp_path / "undisturbed", Mortal)
    undisturbed.attempt()
    for batch in range(18):
        life = Life.begin(tmp_path / str(batch), Mortal)
        Mortal.dies_at = batch
        with pytest.raises(Killed):
            life.attempt()
        life.attempt()
        assert_same(life, undisturbed)


@pytest.mark.integration
def test_a_stop_changes_no_bit_with_workers(tmp_path: Path) -> None:
    with_workers, alone = {"workers": 2}, {"workers": 0}
    undisturbed = Life.begin(tmp_path / "undisturbed", hparams=alone)
    undisturbed.attempt()
    for tick in (3, 7, 9, 17):  # 7: inside the first validation; 9: the first of an epoch
        life = Life.begin(tmp_path / str(tick), hparams=with_workers)
        assert life.attempt(StopAt(tick)).end == "stopped"
        life.attempt()
        assert_same(life, undisturbed)


class Noticing(Tiny):
    """Gives notice of a stop during a batch."""

    stop: StopAgreement
    at = -1

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == Noticing.at:
            give_notice(Noticing.stop._messages)
            wait_for(lambda: Noticing.stop._settled)  # without this, the agreement might be reached in a later batch
        return super().train_batch(batch, epoch_idx, batch_idx)


@pytest.mark.parametrize("batch", [0, 4, 5, 11, 17])
def test_a_notice_in_any_batch_changes_no_bit(tmp_path: Path, batch: int) -> None:
    undisturbed, life = (Life.begin(tmp_path / name, Noticing) for name in ("undisturbed", "stopped"))
    Noticing.at = -1
    undisturbed.attempt()
    Noticing.stop, Noticing.at = StopAgreement(GangMessages()), batch
    with closing(Noticing.stop):
        assert life.attempt(Noticing.stop).end == "stopped"
    Noticing.at = -1
    life.attempt()
    assert_same(life, undisturbed)


@pytest.mark.integration
def test_a_notice_at_any_time_changes_no_bit(tmp_path: Path) -> None:
    undisturbed = Life.begin(tmp_path / "undisturbed", Noticing)
    undisturbed.attempt()
    for number in range(8):
        life = Life.begin(tmp_path / str(number), Noticing)
        messages = GangMessages()
        timer = threading.Timer(random.Random(number).uniform(0, 0.03), give_notice, [messages])
        timer.start()
        with closing(StopAgreement(messages)) as stop:
            life.attempt(stop)
        timer.join()
        life.attempt()
        assert_same(life, undisturbed)


def test_a_finished_trial_does_nothing_more(tmp_path: Path) -> None:
    life = Life.begin(tmp_path)
    life.attempt()
    series, newest = life.series, life.newest
    assert life.attempt(StopAt(1)).end == "finished"
    assert life.series == series
    assert life.newest.keys() == newest.keys()


# --- two optimizers


GAN = yaml.safe_load(data_path("docs/examples/gan/gan.yaml").read_text())


@pytest.fixture
def gan(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[PyTorchTrial]]:
    """Load the trial class of the example's config."""
    monkeypatch.syspath_prepend(str(data_path("docs/examples/gan")))
    monkeypatch.delitem(sys.modules, "model_def", raising=False)
    trial_class = load_trial_class(GAN["entrypoint"].split()[-1])
    assert issubclass(trial_class, PyTorchTrial)
    yield trial_class
    del sys.modules["model_def"]


def begin_gan(path: Path, gan: type[PyTorchTrial], batches: int, **config: Any) -> Life:
    searcher = {**GAN["searcher"], "max_length": {"batches": batches}}
    return Life.begin(path, gan, GAN["hyperparameters"], searcher=searcher, **config)


@pytest.mark.integration
def test_a_gan_is_stopped_and_resumed_without_a_changed_bit(tmp_path: Path, gan: type[PyTorchTrial]) -> None:
    undisturbed, never = begin_gan(tmp_path / "undisturbed", gan, 14), StopAt()
    undisturbed.attempt(never)
    for tick in range(1, never.ticks + 1, 3):
        life = begin_gan(tmp_path / str(tick), gan, 14)
        assert life.attempt(StopAt(tick)).end == "stopped"
        life.attempt()
        assert_same(life, undisturbed)
    state = undisturbed.newest["state_dict.pth"]
    assert len(state["models_state_dict"]) == len(state["optimizers_state_dict"]) == 2


@pytest.mark.integration
def test_the_gan_learns(tmp_path: Path, gan: type[PyTorchTrial]) -> None:
    life = begin_gan(tmp_path, gan, 250, perform_initial_validation=True, min_validation_period={"batches": 0})
    life.attempt()
    before, after = (metrics["energy_distance"] for kind, _, metrics in life.series if kind == "validation")
    assert after < before / 4


# --- what is due when


@pytest.mark.parametrize(
    ("config", "validations"),
    [
        ({"min_validation_period": {"batches": 5}}, [5, 10, 15, 18]),
        ({"min_validation_period": 9}, [9, 18]),
        ({"min_validation_period": {"epochs": 1}}, [6, 12, 18]),
        ({"min_validation_period": {"epochs": 2}}, [12, 18]),
        ({"min_validation_period": {"records": 20}}, [5, 10, 15, 18]),
        ({"min_validation_period": {"batches": 0}}, [18]),
        ({"min_validation_period": {"batches": 9}, "perform_initial_validation": True}, [0, 9, 18]),
        ({"searcher": {"max_length": {"records": 30}}}, [5, 7]),
        ({"searcher": {"max_length": {"batches": 3}}}, [3]),
        ({"searcher": {"max_length": {"epochs": 1}}}, [5, 6]),
    ],
)
def test_validations_come_when_their_period_says_and_at_the_end(
    tmp_path: Path, config: dict[str, Any], validations: list[int]
) -> None:
    life = Life.begin(tmp_path, **config)
    life.attempt()
    assert life.steps("validation") == validations


def test_training_is_reported_every_scheduling_unit_before_validations_and_checkpoints_and_at_the_end(
    tmp_path: Path,
) -> None:
    life = Life.begin(tmp_path, scheduling_unit=6)
    life.attempt()
    assert life.steps("validation") == [5, 10, 15, 18]
    assert life.config["min_checkpoint_period"] == {"batches": 7}
    assert life.steps("training") == [5, 6, 7, 10, 12, 14, 15, 18]


KEEP_ALL = {"checkpoint_storage": {"save_trial_best": 99, "save_trial_latest": 99}}


class Scripted(Tiny):
    """A validation after every second of eight batches, with the losses that the test sets."""

    losses: tuple[float, ...] = ()

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"loss": Scripted.losses[(self.context.current_train_batch() + 1) // 2 - 1]}

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {}

    @staticmethod
    def begin(path: Path, losses: tuple[float, ...], **config: Any) -> Life:
        Scripted.losses = losses
        periods = {"min_validation_period": {"batches": 2}, "min_checkpoint_period": {"batches": 0}}
        max_length = {"searcher": {"max_length": {"batches": 8}, **config.pop("searcher", {})}}
        return Life.begin(path, Scripted, **{**periods, **max_length, **config})


@pytest.mark.parametrize(
    ("policy", "losses", "checkpoints"),
    [
        ("best", (0.5, 0.6, 0.4, 0.4), [2, 6, 8]),
        ("best", (NAN, 0.5, NAN, 0.4), [4, 8]),
        ("best", (NAN, NAN, NAN, NAN), [8]),
        ("best", (0.1, 0.2, 0.3, 0.4), [2, 8]),
        ("all", (0.1, 0.2, 0.3, 0.4), [2, 4, 6, 8]),
        ("none", (0.4, 0.3, 0.2, 0.1), [8]),
    ],
)
def test_checkpoints_come_as_the_policy_says_and_at_the_end(
    tmp_path: Path, policy: str, losses: tuple[float, ...], checkpoints: list[int]
) -> None:
    life = Scripted.begin(tmp_path, losses, checkpoint_policy=policy, **KEEP_ALL)
    life.attempt()
    assert life.checkpoints == checkpoints


def test_larger_is_better_where_the_config_says_so(tmp_path: Path) -> None:
    life = Scripted.begin(tmp_path, (0.1, 0.3, 0.2, 0.1), searcher={"smaller_is_better": False}, **KEEP_ALL)
    life.attempt()
    assert life.checkpoints == [2, 4, 8]


@pytest.mark.parametrize(
    ("period", "checkpoints"),
    [({"batches": 3}, [3, 6, 8]), ({"epochs": 1}, [6, 8]), ({"records": 16}, [4, 8]), (5, [5, 8])],
)
def test_checkpoints_come_when_their_period_says(tmp_path: Path, period: Any, checkpoints: list[int]) -> None:
    losses = (0.1, 0.1, 0.1, 0.1)
    life = Scripted.begin(tmp_path, losses, checkpoint_policy="none", min_checkpoint_period=period, **KEEP_ALL)
    life.attempt()
    assert life.checkpoints == checkpoints


@pytest.mark.parametrize(
    ("best", "latest", "kept"), [(0, 0, []), (1, 0, [4]), (0, 1, [8]), (1, 1, [4, 8]), (2, 2, [4, 6, 8])]
)
def test_a_finished_trial_keeps_what_its_storage_says(tmp_path: Path, best: int, latest: int, kept: list[int]) -> None:
    storage = {"save_trial_best": best, "save_trial_latest": latest}
    life = Scripted.begin(tmp_path, (0.5, 0.2, 0.4, 0.6), checkpoint_policy="all", checkpoint_storage=storage)
    life.attempt()
    assert life.checkpoints == kept


@pytest.mark.parametrize(("tick", "kept"), [(12, [4, 5]), (18, [6, 8])])
def test_a_stopped_trial_keeps_the_two_newest_to_resume_from(tmp_path: Path, tick: int, kept: list[int]) -> None:
    """This includes a stop in the last validation, which is then repeated."""
    storage = {"save_trial_best": 0, "save_trial_latest": 0}
    life = Scripted.begin(tmp_path, (0.5, 0.2, 0.4, 0.6), checkpoint_policy="all", checkpoint_storage=storage)
    assert life.attempt(StopAt(tick)).end == "stopped"
    assert life.checkpoints == kept


# --- what a trial may ask for


class Satisfied(Tiny):
    """Requests a stop after nine batches; in a gang, only the last rank does."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        distributed = self.context.distributed
        if distributed.rank == distributed.size - 1:
            self.context.set_stop_requested(batch_idx >= 8)
        return super().train_batch(batch, epoch_idx, batch_idx)


@pytest.mark.integration
def test_a_trial_that_asks_to_stop_finishes_with_a_validation_and_a_checkpoint(tmp_path: Path) -> None:
    life, never = Life.begin(tmp_path / "undisturbed", Satisfied), StopAt()
    assert life.attempt(never).end == "finished"
    assert life.steps("training") == [4, 5, 7, 8, 10], "the request takes effect at the next report or validation"
    assert life.steps("validation") == [5, 10]
    assert life.checkpoints[-1] == 10
    for tick in range(1, never.ticks + 1):
        stopped = Life.begin(tmp_path / str(tick), Satisfied)
        assert stopped.attempt(StopAt(tick)).end == "stopped"
        stopped.attempt()
        assert_same(stopped, life)


def test_one_rank_that_asks_to_stop_speaks_for_all(on_ranks: OnRanks, tmp_path: Path) -> None:
    life = Life.begin(tmp_path, Satisfied, hparams=SIX)
    assert all(not stopped for *_, stopped in on_ranks(3, several, life, math.inf))
    assert life.steps("training") == [4, 5, 7, 8, 10]
    assert life.checkpoints[-1] == 10


class Hopeful(Tiny):
    """Requests a stop on rank 0 after a validation, as a callback for early stopping does."""

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"hopeful": Hope(self.context)}


class Hope(PyTorchCallback):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self._context = context

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        if self._context.distributed.is_chief and self._context.current_train_batch() > 8:
            self._context.set_stop_requested(True)


@pytest.mark.parametrize("size", [1, 2])
def test_a_validation_can_end_the_training_at_once(on_ranks: OnRanks, tmp_path: Path, size: int) -> None:
    life = Life.begin(tmp_path, Hopeful, hparams=SIX)
    on_ranks(size, several, life, math.inf)
    assert life.steps("validation") == [5, 10]
    assert life.steps("training") == [4, 5, 7, 8, 10]


class Weary(PyTorchCallback):
    """Requests a stop at the first training report."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self._context = context

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        if self._context.distributed.rank == self._context.distributed.size - 1:
            self._context.set_stop_requested(True)


class Wearied(Tiny):
    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"weary": Weary(self.context)}


@pytest.mark.parametrize("size", [1, 2])
def test_a_stop_asked_for_at_a_report_counts_at_that_report(on_ranks: OnRanks, tmp_path: Path, size: int) -> None:
    life = Life.begin(tmp_path, Wearied)
    on_ranks(size, several, life, math.inf)
    assert (life.steps("training"), life.steps("validation"), life.checkpoints) == ([4], [4], [4])


class BareLoss(Tiny):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        return super().train_batch(batch, epoch_idx, batch_idx)["loss"]


def test_a_bare_tensor_is_the_loss(tmp_path: Path) -> None:
    life = Life.begin(tmp_path, BareLoss)
    life.attempt()
    assert all(metrics.keys() == {"loss"} for kind, _, metrics in life.series if kind == "training")


class TensorRate(BareLoss):
    """The learning rate is a tensor, which torch.compile requires and a scheduler changes in place."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        super().__init__(context)
        self.optimizer.param_groups[0]["lr"] = torch.tensor(0.04)
        schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        context.wrap_lr_scheduler(schedule, LRScheduler.StepMode.STEP_EVERY_BATCH)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        super().train_batch(batch, epoch_idx, batch_idx)
        return {"rate": self.optimizer.param_groups[0]["lr"]}


def test_a_learning_rate_is_reported_as_the_batch_had_it(tmp_path: Path) -> None:
    life = Life.begin(tmp_path, TensorRate, searcher={"max_length": {"batches": 3}}, scheduling_unit=1)
    life.attempt()
    reported = [metrics["rate"] for kind, _, metrics in life.series if kind == "training"]
    assert reported == pytest.approx([0.04, 0.02, 0.01])


class OwnLoader(Tiny):
    """Uses a loader that hpc_det does not provide; a hyperparameter sets the number of records."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        super().__init__(context)
        context.experimental.disable_dataset_reproducibility_checks()

    def build_training_data_loader(self) -> Any:
        dataset = self.loader(self.context.get_hparam("records")).dataset
        return torch.utils.data.DataLoader(dataset, batch_size=4)


def test_an_epoch_that_is_shorter_after_a_resume_ends_for_schedulers_too(tmp_path: Path) -> None:
    ends = {"searcher": {"max_length": {"batches": 8}}, "min_validation_period": {"batches": 0}, "scheduling_unit": 1}
    life = Life.begin(tmp_path, OwnLoader, {"records": 24}, **ends)
    assert life.attempt(StopAt(6)).end == "stopped"
    life.hparams = {**life.hparams, "records": 12}
    life.attempt()
    rates = [metrics["rate"] for kind, _, metrics in life.series if kind == "training"]
    assert rates == pytest.approx([0.05] * 6 + [0.045] * 2), "batch 6 ended the epoch of 3"


class Forgotten(Tiny):
    """When a batch is loaded, records which objects of the previous batch still exist."""

    def loader(self, records: int, shuffle: bool = False) -> DataLoader:
        loader = super().loader(records)
        return DataLoader(loader.dataset, batch_size=4, collate_fn=self.collated)

    def collated(self, records: list[Any]) -> Any:
        Forgotten.alive += [reference() for reference in Forgotten.seen if reference() is not None]
        return default_collate(records)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        Forgotten.seen += [weakref.ref(batch[0]), weakref.ref(metrics["loss"])]
        return metrics

    alive: ClassVar[list[Any]] = []
    seen: ClassVar[list[Any]] = []


def test_a_batch_and_its_metrics_are_gone_before_the_next_is_loaded(tmp_path: Path) -> None:
    Life.begin(tmp_path, Forgotten).attempt()
    assert len(Forgotten.seen) == 36
    assert not Forgotten.alive


def test_a_searcher_metric_that_there_is_not_is_named_with_those_there_are(tmp_path: Path) -> None:
    life = Life.begin(tmp_path, searcher={"metric": "accuracy"})
    with refused(UsageError, "searcher.metric: ", "'accuracy'", ["loss", "noise"]):
        life.attempt()


class Hooks(PyTorchCallback):
    calls: list[str] = []  # noqa: RUF012

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self.calls.append(f"epoch {epoch_idx}")

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.calls.append(f"validation of {sorted(metrics)}")

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        names = {path.name for path in Path(checkpoint_dir).iterdir()}
        assert names == {"state_dict.pth", "progress.pth", "rank-0.pth", "load_data.json", "metadata.json"}
        self.calls.append("checkpoint")


class Hooked(Tiny):
    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"hooks": Hooks()}


def test_hooks_are_called_in_the_order_of_the_loop(tmp_path: Path) -> None:
    Hooks.calls.clear()
    config = {"min_validation_period": {"epochs": 1}, "min_checkpoint_period": 4, "checkpoint_policy": "none"}
    Life.begin(tmp_path, Hooked, **config, searcher={"max_length": {"epochs": 2}}).attempt()
    validation = "validation of ['loss', 'noise']"
    first, last = ["epoch 0", validation], ["epoch 1", "checkpoint", validation, "checkpoint"]
    assert Hooks.calls == ["checkpoint", *first, "checkpoint", *last]


class Modes(Tiny):
    """Records whether its model is in training mode, and whether gradients are enabled."""

    seen: set[tuple[str, bool, bool]] = set()  # noqa: RUF012

    def note(self, where: str) -> None:
        Modes.seen.add((where, all(module.training for module in self.model.modules()), torch.is_grad_enabled()))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.note("training")
        return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        self.note("validation")
        return super().evaluate_batch(batch)


def test_models_train_in_training_and_not_in_validation(tmp_path: Path) -> None:
    Modes.seen.clear()
    Life.begin(tmp_path, Modes, perform_initial_validation=True).attempt()
    assert Modes.seen == {("training", True, True), ("validation", False, False)}


def test_validating_more_often_changes_no_weight(tmp_path: Path) -> None:
    seldom, often = (
        Life.begin(tmp_path / str(period), BareLoss, min_validation_period=period, min_checkpoint_period=0)
        for period in (0, 1)
    )
    for life in (seldom, often):
        life.trial_class = Steady
        life.attempt()
    first, second = (life.newest["state_dict.pth"]["models_state_dict"][0] for life in (seldom, often))
    assert all(torch.equal(first[name], second[name]) for name in first)


class Steady(Tiny):
    """Without the callback that lowers the learning rate after a validation."""

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {}


# --- what a checkpoint holds


def test_the_four_keys_of_the_state_dict(tmp_path: Path) -> None:
    life = Life.begin(tmp_path)
    life.attempt()
    assert set(life.newest) == {"state_dict.pth", "progress.pth", "rank-0.pth"}
    state = life.newest["state_dict.pth"]
    assert state.keys() == {"models_state_dict", "optimizers_state_dict", "lr_schedulers_state_dict", "callbacks"}
    model = nn.Sequential(nn.Linear(5, 8), nn.Identity(), nn.Identity(), nn.Identity(), nn.Linear(8, 1))
    model.load_state_dict(state["models_state_dict"][0])
    assert len(state["lr_schedulers_state_dict"]) == 2
    assert state["callbacks"] == {"watching": {"epochs": 3, "validations": 4}}


class Edited(Tiny):
    """Has an additional model, and one scheduler less."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        super().__init__(context)
        context.wrap_model(torch.nn.Linear(1, 1))
        context.scheduled_steps.pop()


def test_a_checkpoint_of_another_trial_is_refused_with_every_difference(tmp_path: Path) -> None:
    life = Life.begin(tmp_path)
    life.attempt()
    life.trial_class = Edited
    with pytest.raises(HpcDetError) as error:
        life.attempt()
    models, schedulers = error.value.problems
    assert unnamed(models, "state_dict.pth", "models_state_dict", 1, 2) == []
    assert unnamed(schedulers, "state_dict.pth", "lr_schedulers_state_dict", 2, 1) == []


def test_a_callback_that_is_new_starts_anew(tmp_path: Path) -> None:
    life = Life.begin(tmp_path, Steady)
    assert life.attempt(StopAt(4)).end == "stopped"
    life.trial_class = Hooked
    assert life.attempt().end == "finished"


# --- several ranks


def several(distributed: Distributed, life: Life, stop_at: float) -> tuple[list[int], int, bool]:
    """Run one attempt; return this rank's final generator state, its number of ticks, and whether it was stopped."""
    stop = StopAt(stop_at)
    life.attempt(stop, distributed)
    return torch.get_rng_state().tolist(), stop.ticks, stop.stopped


SIX = {"global_batch_size": 6}


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_a_gang_stops_at_any_tick_without_a_changed_bit(on_ranks: OnRanks, tmp_path: Path, size: int) -> None:
    undisturbed = Life.begin(tmp_path / "undisturbed", hparams=SIX)
    ranks = on_ranks(size, several, undisturbed, math.inf)
    assert len({ticks for _, ticks, _ in ranks}) == 1, "one tick before each batch, on every rank"
    assert undisturbed.steps("training") == [4, 5, 7, 8, 10, 12]
    for tick in (3, 6, 7, 11, ranks[0][1]):
        life = Life.begin(tmp_path / str(tick), hparams=SIX)
        assert all(stopped for *_, stopped in on_ranks(size, several, life, tick))
        on_ranks(size, several, life, math.inf)
        assert_same(life, undisturbed)
    assert all(name.startswith(("0.", "4.")) for name in undisturbed.newest["state_dict.pth"]["models_state_dict"][0])
    assert {f"rank-{rank}.pth" for rank in range(size)} < undisturbed.newest.keys()


def test_a_resume_on_more_ranks_gives_each_its_own_noise(on_ranks: OnRanks, tmp_path: Path) -> None:
    life = Life.begin(tmp_path, hparams=SIX)
    on_ranks(1, several, life, 4)
    ranks = on_ranks(3, several, life, math.inf)
    assert len({tuple(noise) for noise, *_ in ranks}) == 3
    assert life.steps("validation")[-1] == 12


class Dropping(Steady):
    """A validation loader with drop_last; every record is still evaluated."""

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.ones(5, 5), torch.ones(5, 1)), batch_size=2, drop_last=True)


def test_a_validation_loader_with_drop_last_is_no_matter_of_the_ranks_agreement(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    life = Life.begin(tmp_path, Dropping, hparams=SIX)
    ranks = on_ranks(2, several, life, math.inf)
    assert len({ticks for _, ticks, _ in ranks}) == 1
    assert life.steps("validation") == [5, 10, 12]
