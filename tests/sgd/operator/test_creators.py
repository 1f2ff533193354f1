from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from hpc_det.errors import HpcDetError, UsageError
from hpc_det.sgd.operator.training_operator import TrainingOperator
from tests.facts import refused
from tests.sgd.operators import batches
from tests.wait import DEADLINE_S, wait_for


@pytest.fixture(autouse=True)
def _lock_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def a_model(config: dict[str, Any]) -> nn.Module:
    return nn.Linear(4, 3)


def two_models(config: dict[str, Any]) -> list[nn.Module]:
    return [nn.Linear(4, 3), nn.Linear(4, 3)]


def sgd(models: Any, config: dict[str, Any]) -> Any:
    rate = config.get("lr", 0.5)
    if isinstance(models, list):
        return tuple(torch.optim.SGD(model.parameters(), lr=rate) for model in models)
    return torch.optim.SGD(models.parameters(), lr=rate)


def step_lr(optimizers: Any, config: dict[str, Any]) -> Any:
    first = optimizers[0] if isinstance(optimizers, tuple) else optimizers
    return torch.optim.lr_scheduler.StepLR(first, 1, gamma=0.1)


def test_creators_make_an_operator_that_trains() -> None:
    loaders = batches(4, 4), batches(3)
    operator_cls = TrainingOperator.from_creators(a_model, sgd, lambda config: loaders, nn.CrossEntropyLoss, step_lr)
    operator = operator_cls({"lr": 0.25}, 0, 0, scheduler_step_freq="epoch")
    assert operator.optimizer.param_groups[0]["lr"] == 0.25
    assert operator.train_epoch(operator._get_train_loader())["num_samples"] == 8
    assert operator.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    assert operator.validate(operator._get_validation_loader())["num_samples"] == 3
    assert (operator.models, operator.optimizers) == ([operator.model], [operator.optimizer])
    assert operator.schedulers == [operator.scheduler]


def test_the_first_of_several_is_the_one_of_the_default_loops() -> None:
    operator_cls = TrainingOperator.from_creators(two_models, sgd, None, nn.CrossEntropyLoss, step_lr)
    operator = operator_cls({}, 0, 0, scheduler_step_freq="manual")
    second = [parameter.detach().clone() for parameter in operator.models[1].parameters()]
    operator.train_epoch(batches(4))
    assert operator.optimizer is operator.optimizers[0]
    assert operator.model is operator.models[0]
    assert operator.model.weight.grad is not None
    assert all(map(torch.equal, second, operator.models[1].parameters()))


def test_schedulers_without_a_loss_are_no_criterion() -> None:
    operator = TrainingOperator.from_creators(a_model, sgd, None, None, step_lr)({}, 0, 0, scheduler_step_freq="batch")
    assert (operator.criterion, len(operator.schedulers)) == (None, 1)
    with refused(RuntimeError, "self.criterion"):
        operator.train_epoch(batches(2))


def test_what_creators_made_is_read_only() -> None:
    operator = TrainingOperator.from_creators(a_model, sgd)({}, 0, 0)
    assert operator.scheduler is None
    with pytest.raises(AttributeError):
        operator.model = nn.Linear(1, 1)


def test_a_loss_is_a_class_of_torch_or_a_function_of_the_config() -> None:
    def criterion(creator: Any) -> Any:
        return TrainingOperator.from_creators(a_model, sgd, loss_creator=creator)({"beta": 3.0}, 0, 0).criterion

    assert isinstance(criterion(nn.BCELoss), nn.BCELoss)
    assert criterion(lambda config: nn.SmoothL1Loss(beta=config["beta"])).beta == 3.0


@pytest.mark.parametrize(
    ("given", "loaders"),
    [(iter("a"), "a"), ((iter("a"),), "a"), ([iter("a"), iter("b")], "ab")],
    ids=["one", "one in a tuple", "two"],
)
def test_data_are_one_loader_or_two(given: Any, loaders: str) -> None:
    operator = TrainingOperator.from_creators(a_model, sgd, lambda config: given)({}, 0, 0)
    found = [operator._train_loader, operator._validation_loader]
    assert [next(iter(loader)) for loader in found if loader is not None] == list(loaders)


@pytest.mark.parametrize("given", [None, (), (1, 2, 3)])
def test_no_loader_and_three_are_refused(given: Any) -> None:
    operator_cls = TrainingOperator.from_creators(a_model, sgd, lambda config: given)
    with refused(ValueError, "data_creator"):
        operator_cls({}, 0, 0)


def test_what_cannot_be_called_is_named_at_once() -> None:
    with refused(ValueError, "model_creator", "None") as raised:
        TrainingOperator.from_creators(None, 3, data_creator=4)  # type: ignore[arg-type]
    assert isinstance(raised.value, UsageError)
    assert len(raised.value.problems) == 3


def test_a_subclass_keeps_its_steps_and_can_be_derived_from() -> None:
    class Mine(TrainingOperator):
        def train_batch(self, batch: Any, batch_info: Any) -> dict[str, Any]:
            return {"mine": 1.0}

    class Derived(Mine.from_creators(a_model, sgd)):  # type: ignore[misc]
        def validate_batch(self, batch: Any, batch_info: Any) -> dict[str, Any]:
            return {"derived": 2.0}

    operator = Derived({}, 0, 0)
    assert operator.train_epoch([0])["mine"] == 1.0
    assert operator.validate([0])["derived"] == 2.0


def test_the_class_goes_to_another_process_by_value() -> None:
    rate = 0.75
    made = TrainingOperator.from_creators(
        lambda config: nn.Linear(4, 3), lambda model, config: torch.optim.SGD(model.parameters(), lr=rate)
    )
    operator = cloudpickle.loads(cloudpickle.dumps(made))({}, 0, 0)
    assert operator.optimizer.param_groups[0]["lr"] == 0.75


# --- one rank of a node after the other


def lock_file(folder: Path) -> Path:
    return folder / f"hpc_det-{os.geteuid()}.data.lock"


@pytest.mark.integration
def test_data_are_created_while_no_other_rank_of_the_node_does(tmp_path: Path) -> None:
    is_locked = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    answers = []

    def data(config: dict[str, Any]) -> Any:
        tried = subprocess.run([sys.executable, "-c", is_locked, lock_file(tmp_path)], stderr=subprocess.DEVNULL)
        answers.append(tried.returncode)
        return batches(4)

    TrainingOperator.from_creators(a_model, sgd, data)({}, 0, 0)
    assert answers == [1]
    with lock_file(tmp_path).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _waits_for(lock: int) -> bool:
    """Return whether a process waits for the lock (proc(5), /proc/locks: "->")."""
    inode = os.fstat(lock).st_ino
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and f":{inode} " in line for line in lines)


def test_a_rank_waits_until_the_one_before_has_its_data(tmp_path: Path) -> None:
    created = threading.Event()

    def data(config: dict[str, Any]) -> Any:
        created.set()
        return batches(4)

    operator_cls = TrainingOperator.from_creators(a_model, sgd, data)
    with lock_file(tmp_path).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        rank = threading.Thread(target=operator_cls, args=({}, 0, 0))
        rank.start()
        wait_for(lambda: _waits_for(held.fileno()))
        assert not created.is_set()
    rank.join(DEADLINE_S)
    assert created.is_set()


def test_without_serialize_data_creation_there_is_no_lock(tmp_path: Path) -> None:
    TrainingOperator.from_creators(a_model, sgd, lambda config: batches(4), serialize_data_creation=False)({}, 0, 0)
    assert not lock_file(tmp_path).exists()


def test_a_lock_that_cannot_be_made_is_named_with_the_ways_out(tmp_path: Path) -> None:
    lock_file(tmp_path).symlink_to(tmp_path / "of someone else")
    with refused(HpcDetError, "TMPDIR", "serialize_data_creation=False"):
        TrainingOperator.from_creators(a_model, sgd, lambda config: batches(4))({}, 0, 0)
