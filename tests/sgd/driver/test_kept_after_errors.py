"""An error after the training, for instance in the last validation, does not lose the trained state."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_det.sgd import TorchTrainer
from tests.sgd.local_nodes import LocalNodes
from tests.sgd.trained import Linear, weights


class FailsToValidate(Linear):
    def validate_batch(self, batch: Any, batch_info: Any) -> dict[str, Any]:
        raise KeyError("val_acuracy")


def trainer(**arguments: Any) -> TorchTrainer:
    return TorchTrainer(training_operator_cls=FailsToValidate, executor=LocalNodes(1), **arguments)


def parameters_of(operator: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in operator.model.parameters()]


def kept_runs(state_folder: Path) -> list[Path]:
    return list((state_folder / "sgd").iterdir())


def is_there(run: Path, trained: list[torch.Tensor]) -> bool:
    """Return whether another program resumes after that training; it may save the state."""
    with trainer(run=run) as its:
        assert its.epochs_done == 1
        return all(map(torch.equal, weights(its).values(), trained))


def train_and_fail(
    its: TorchTrainer, before_it: Callable[[TorchTrainer], object] = lambda its: None
) -> list[torch.Tensor]:
    """Return the weights after the training; the failing validation then ends the `with` block."""
    trained: list[torch.Tensor] = []
    with suppress(KeyError), its:
        its.train()
        trained += its.apply_all_operators(parameters_of)[0]
        before_it(its)
        its.validate()
        raise AssertionError("the validation has to fail")
    return trained


@pytest.mark.parametrize("run", [None, "mine"])
def test_a_validation_that_fails_leaves_what_was_trained(run: str | None, state_folder: Path) -> None:
    trained = train_and_fail(trainer(run=run))
    (kept,) = kept_runs(state_folder)
    assert is_there(kept, trained)


def test_so_does_one_whose_error_the_program_handles_before_it_ends(state_folder: Path) -> None:
    its = trainer()
    its.train()
    trained = its.apply_all_operators(parameters_of)[0]
    with pytest.raises(KeyError):
        its.validate()
    its.shutdown()
    (kept,) = kept_runs(state_folder)
    assert is_there(kept, trained)


PROGRAM = """
from hpc_det.sgd import TorchTrainer
from tests.sgd.trained import Linear

trainer = TorchTrainer(training_operator_cls=Linear, executor="local")
trainer.train()
print(trainer.validate()["val_acuracy"])
"""


def test_an_error_of_the_program_itself_leaves_it_too_and_says_where(state_folder: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert "KeyError: 'val_acuracy'" in ended.stderr
    (kept,) = kept_runs(state_folder)
    assert re.search(rf"TorchTrainer\(run='{re.escape(str(kept))}'\)", ended.stderr)
    with trainer(run=kept) as its:
        assert its.epochs_done == 1


@pytest.mark.parametrize("how", ["saved", "read"])
def test_what_the_program_has_already_is_not_kept_again(how: str, state_folder: Path, tmp_path: Path) -> None:
    train_and_fail(trainer(), lambda its: its.save(tmp_path / "saved.pt") if how == "saved" else its.get_model())
    assert not kept_runs(state_folder)


def test_a_save_that_fails_leaves_what_was_trained(state_folder: Path, tmp_path: Path) -> None:
    trained: list[torch.Tensor] = []
    with suppress(FileNotFoundError), trainer() as its:
        its.train()
        trained += its.apply_all_operators(parameters_of)[0]
        its.save(tmp_path / "no such folder" / "saved.pt")
    (kept,) = kept_runs(state_folder)
    assert is_there(kept, trained)


def test_nothing_is_kept_where_nothing_was_trained(state_folder: Path) -> None:
    with pytest.raises(KeyError), trainer() as its:
        its.validate()
    assert not kept_runs(state_folder)


def test_nothing_is_kept_of_a_training_that_went_on_after_the_error(state_folder: Path) -> None:
    with trainer() as its:
        with pytest.raises(KeyError):
            its.validate()
        its.train()
    assert not kept_runs(state_folder)
