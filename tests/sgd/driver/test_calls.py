"""If a program ends during a round of TorchTrainer.remaining(), the next program starts that round again."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_det.checkpoint.snapshots import newest
from hpc_det.sgd import BATCH_SIZE, TorchTrainer
from hpc_det.sgd.driver.calls import Call, Rounds, reduce
from hpc_det.store.run_folder import RunFolder, path_of
from tests.facts import unnamed
from tests.pytorch.trials import differences
from tests.sgd.local_nodes import LocalNodes
from tests.sgd.runners import Regression


class Program:
    """Simulated programs of one run, which make calls without ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[str] = []
        """Methods of the calls whose effect is part of the current state."""
        self.epochs_done = 0
        self.snapshots: list[dict[str, Any]] = []
        self.start()

    def start(self, snapshot: int = -1) -> None:
        """Start another program, which resumes from that snapshot."""
        self.rounds = Rounds(self.folder / "round", is_durable=True)
        if self.snapshots:
            self.rounds.resume(self.snapshots[snapshot])

    def call(self, method: str, **arguments: Any) -> Any:
        call = Call(method, arguments)
        return self.rounds.once(call, lambda: self._make(call))

    def _make(self, call: Call) -> str:
        self.made.append(call.method)
        self.epochs_done += call.method == "train"
        self.rounds.add(call, result := f"{call.method} {len(self.made)}", self.epochs_done)
        self.snapshots.append(self.rounds.record())
        return result

    def remaining(self, epochs: int) -> Iterator[int]:
        """Iterate over the remaining epochs like TorchTrainer.remaining()."""
        while (epoch := self.rounds.next_epoch(self.rounds.epochs_done(self.epochs_done))) < epochs:
            with self.rounds.opened(epoch):
                yield epoch


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


def left_after(program: Program, epoch: int, *calls: str) -> list[Any]:
    """Run a program that ends in this round after these calls, and return their results."""
    for each in program.remaining(epoch + 1):
        if each == epoch:
            return [program.call(call) for call in calls]
        program.call("train")
    raise AssertionError


def test_calls_that_are_in_the_state_are_not_made_again(program: Program) -> None:
    first = left_after(program, 1, "train", "validate")
    program.start()
    again = [(epoch, program.call("train"), program.call("validate")) for epoch in program.remaining(3)]
    assert again == [(1, *first), (2, "train 4", "validate 5")]
    assert program.made == ["train", "train", "validate", "train", "validate"]


def test_calls_that_are_not_in_it_are_made_though_the_epoch_was_the_last(program: Program) -> None:
    left_after(program, 0, "train")
    program.start()
    assert [(program.call("train"), program.call("validate")) for _ in program.remaining(1)] == [
        ("train 1", "validate 2")
    ]
    program.start()
    assert list(program.remaining(1)) == []


def test_a_round_may_be_left_as_often_as_it_likes(program: Program) -> None:
    for calls in range(1, 5):
        left_after(program, 0, *["train", "validate", "apply", "update_scheduler"][:calls])
        program.start()
    left_after(program, 0)
    program.start()
    left_after(program, 0, "train", "validate", "apply", "update_scheduler", "apply")
    assert program.made == ["train", "validate", "apply", "update_scheduler", "apply"]


def test_a_round_has_ended_when_the_next_is_asked_for(program: Program) -> None:
    for epoch in program.remaining(2):
        if epoch == 1:
            break  # as if the program were killed during the next train()
        program.call("train")
        program.call("validate")
    program.start()
    assert list(zip(program.remaining(2), [1], strict=False)) == [(1, 1)]


def test_a_round_that_has_ended_is_begun_again_where_the_state_has_not_all_of_its_calls(program: Program) -> None:
    for _ in program.remaining(1):
        program.call("train")
        program.call("validate")
    program.start(snapshot=-2)
    assert [(program.call("train"), program.call("validate")) for _ in program.remaining(1)] == [
        ("train 1", "validate 3")
    ]


def test_the_epochs_done_are_those_after_the_same_call(program: Program) -> None:
    def loop() -> list[int]:
        seen = []
        for _ in program.remaining(1):
            for method in ("validate", "train", "validate"):
                seen.append(program.rounds.epochs_done(program.epochs_done))
                program.call(method)
            return seen
        raise AssertionError

    first = loop()
    program.start()
    assert first == loop() == [0, 0, 1]


def test_after_a_break_the_same_round_is_the_next_programs_and_no_other_call_is_part_of_it(program: Program) -> None:
    first = left_after(program, 1, "train", "validate")
    program.call("validate")
    program.start()
    assert left_after(program, 1, "train", "validate") == first
    assert program.made[-1] == "validate"


@pytest.mark.parametrize("method", ["train", "load_state_dict"])
def test_outside_of_rounds_another_training_ends_the_one_that_was_open(program: Program, method: str) -> None:
    left_after(program, 0, "train")
    program.start()
    program.call(method)
    assert next(program.remaining(9)) == program.epochs_done


def test_another_loop_of_the_same_program_has_rounds_of_its_own(program: Program) -> None:
    left_after(program, 0, "train")
    left_after(program, 1, "train")
    assert program.made == ["train", "train"]


@pytest.mark.parametrize("other", [("validate", {}), ("train", {"num_steps": 7})])
def test_a_program_that_was_changed_makes_its_calls_from_there_on(
    program: Program, caplog: pytest.LogCaptureFixture, other: tuple[str, dict[str, Any]]
) -> None:
    for _ in program.remaining(1):
        program.call("apply")
        program.call("train", num_steps=5)
        program.call("validate")
        break
    for _ in range(2):
        program.start()
        for _ in program.remaining(1):
            program.call("apply")
            program.call(other[0], **other[1])
            break
    assert program.made == ["apply", "train", "validate", other[0]]
    assert caplog.text.count("train(num_steps=5)") == 1


def test_a_result_that_cannot_be_read_any_more_is_as_one_of_another_call(program: Program) -> None:
    left_after(program, 0, "train")
    (call,) = program.snapshots[-1]["calls"]
    program.snapshots[-1]["calls"] = [call._replace(result="of a class that was removed")]
    program.start()
    left_after(program, 0, "train")
    assert program.made == ["train", "train"]


def test_more_results_than_there_is_room_for_are_not_kept(
    program: Program, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hpc_det.sgd.driver.calls.MOST_BYTES", 300)
    left_after(program, 0, "train", *["validate"] * 10)
    assert max(len(str(record)) for record in program.snapshots) < 1000
    assert program.snapshots[-1] == {}
    assert unnamed(caplog.text, "epoch 0", 300) == []
    program.start()
    assert left_after(program, 1, "train") == ["train 12"]
    program.start()
    assert left_after(program, 1, "train") == ["train 12"]


def test_a_round_whose_state_went_back_is_not_begun_again(program: Program) -> None:
    for epoch in program.remaining(3):
        program.call("train")
        if epoch == 1:
            program.rounds.forget()
            program.call("validate")
            break
    assert program.snapshots[-1] == {}
    program.start()
    assert next(program.remaining(3)) == 2


def test_a_file_that_cannot_be_written_ends_no_training(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    (program.folder / "round").mkdir()
    assert [program.call("train") for _ in program.remaining(2)] == ["train 1", "train 2"]
    program.start()
    assert [program.call("train") for _ in program.remaining(2)] == ["train 2"]


# --- with ranks


CONFIG = {BATCH_SIZE: 6, "length": 12}


def rounds_of(trainer: TorchTrainer, stop_after: int) -> list[Any]:
    """Run the documented loop until the program ends after `stop_after` calls; return the epoch and result of each
    call.
    """
    seen: list[Any] = []
    for epoch in trainer.remaining(2):
        for call in (
            trainer.train,
            trainer.validate,
            lambda: trainer.apply_all_operators(lambda operator: operator.global_step),
            lambda: trainer.train(num_steps=1, reduce_results=False),
        ):
            if len(seen) == stop_after:
                return seen
            seen.append((epoch, repr(call()), trainer.epochs_done))
    return seen


def trainer_of(run: str) -> TorchTrainer:
    options: dict[str, Any] = {"executor": LocalNodes(1), "config": CONFIG, "scheduler_step_freq": "batch"}
    return TorchTrainer(training_operator_cls=Regression, run=run, **options)


def left_by(trainer: TorchTrainer, run: str) -> Any:
    """Return the trained state and the other content of the newest snapshot."""
    trainer.shutdown()
    snapshot = newest(RunFolder(path_of(run, os.environ)))
    assert snapshot
    own = [pickle.loads(part) for part in snapshot.own]
    return [own, torch.load(snapshot.state, weights_only=False)]


def test_wherever_in_a_round_programs_end_the_last_one_has_seen_and_trained_the_same() -> None:
    with trainer_of("undisturbed") as trainer:
        expected = rounds_of(trainer, stop_after=100)
        state = left_by(trainer, "undisturbed")
    assert len(expected) == 8
    for stop_after, begins_at in ((1, 0), (3, 0), (6, 0), (100, 4)):
        with trainer_of("stopped") as trainer:
            seen = rounds_of(trainer, stop_after)
            assert seen == expected[begins_at:][:stop_after]
            found = left_by(trainer, "stopped")
    assert differences(found, state) == []


def test_samples_are_summed_and_other_numbers_averaged_over_the_ranks() -> None:
    ranks = [
        {"epoch": 1, "batch_count": 3, "num_samples": 30, "train_loss": 1.0},
        {"epoch": 1, "batch_count": 2, "num_samples": 10, "train_loss": 2.0},
    ]
    reduced = reduce(ranks)
    assert reduced == {"epoch": 1.0, "batch_count": 2.5, "num_samples": 40, "train_loss": 1.5}
    assert isinstance(reduced["epoch"], np.float64)
    assert type(reduced["num_samples"]) is int


@pytest.mark.parametrize(
    ("first", "second", "reduced"),
    [
        (1.0, math.nan, 1.0),
        (np.float32(1), 2, 1.5),
        (True, False, 0.5),
        ("of rank 0", "of rank 1", "of rank 0"),
        ({"a": 1}, {"a": 3}, {"a": 1}),
        (None, 2.0, None),
        (1.0, None, 1.0),
    ],
)
def test_what_becomes_of_a_value_of_two_ranks(first: Any, second: Any, reduced: Any) -> None:
    assert reduce([{"value": first}, {"value": second}]) == {"value": reduced}


def test_a_number_that_no_rank_has_is_nan() -> None:
    assert math.isnan(reduce([{"value": math.nan}, {"value": math.nan}])["value"])


def test_rank_0_says_which_keys_there_are() -> None:
    assert reduce([{"here": 1.0}, {"there": 2.0}]) == {"here": 1.0}
    assert reduce([{"here": 1.0, "there": 4.0}, {"there": 2.0}]) == {"here": 1.0, "there": 3.0}
