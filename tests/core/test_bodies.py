"""Loops that ask for saves in the middle of a body, and are killed or stopped anywhere: nothing is repeated or lost."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hpc_det.core.core import Core
from tests.core.loops import CONFIG, PASS, Loop, PlainLoop, assert_same
from tests.pytorch.trials import StopAt

KEPT = {"save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 2}


class Killed(Exception):
    pass


class Full(PlainLoop):
    """Saves, validates and steps its schedule in every body; `killed_at` is the number of a point in the program."""

    killed_at: int | None = None

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.points = 0

    def point(self) -> None:
        self.points += 1
        if self.points == self.killed_at:
            raise Killed

    def train_one(self, batch: Any) -> None:
        core = self.core
        self.point()
        core.report(core.step, {"loss": self.train(batch)})
        if core.step == 4:
            core.report(core.step, self.validate(), group="validation")
            core.save()
            self.point()
            self.scheduler.step()

    def end_pass(self) -> None:
        core = self.core
        self.point()
        core.report(core.step, self.validate(), group="validation", checkpoint=core.step == PASS)
        core.save()
        self.point()
        self.scheduler.step()
        self.point()

    def run(self) -> None:
        for _ in self.core.epochs(3):
            for batch in self.core.batches(self.loader):
                self.train_one(batch)
            if self.core.should_stop():
                break
            self.end_pass()


class InAWhile(Full):
    def run(self) -> None:
        while self.core.epoch < 3:
            for batch in self.core.batches(self.loader):
                self.train_one(batch)
            if self.core.should_stop():
                break
            self.end_pass()


class LeavingPasses(Full):
    """Its passes have four batches instead of six."""

    def run(self) -> None:
        for _ in self.core.epochs(3):
            for batch in self.core.batches(self.loader):
                self.train_one(batch)
                if self.core.step % 4 == 0:
                    break
            if self.core.should_stop():
                break
            self.end_pass()


class InOperations(Full):
    def run(self) -> None:
        for operation in self.core.search:
            for batch in self.core.batches(self.loader, until=operation):
                self.train_one(batch)
            if self.core.should_stop():
                break
            self.end_pass()


class EveryFiveBatches(Full):
    def run(self) -> None:
        while self.core.step < 15:
            for batch in self.core.batches(self.loader, until=self.core.step // 5 * 5 + 5):
                self.train_one(batch)
            if self.core.should_stop():
                break
            self.end_pass()


PROGRAMS = [Full, InAWhile, LeavingPasses, InOperations, EveryFiveBatches]
SETTINGS: list[dict[str, Any]] = [
    {"checkpoint_policy": "all"},
    {"checkpoint_policy": "best", "min_checkpoint_period": {"epochs": 1}},
    {"checkpoint_policy": "none", "min_checkpoint_period": {"batches": 1}},
]


def begin(path: Path, program: Any, settings: dict[str, Any]) -> Loop:
    searcher = {**CONFIG["searcher"], "max_length": {"batches": 15}}
    return Loop.begin(path, program, searcher=searcher, checkpoint_storage=KEPT, **settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: str(each["checkpoint_policy"]))
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_loop_that_is_killed_anywhere_continues_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Any, settings: dict[str, Any]
) -> None:
    whole = begin(tmp_path / "whole", program, settings)
    whole.attempt()
    for point in range(3, 30, 4):
        loop = begin(tmp_path / str(point), program, settings)
        monkeypatch.setattr(program, "killed_at", point)
        with suppress(Killed):
            loop.attempt()
        monkeypatch.setattr(program, "killed_at", None)
        loop.attempt()
        assert_same(loop, whole)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_loop_that_is_stopped_anywhere_continues_as_if_it_had_not_been(tmp_path: Path, program: Any) -> None:
    whole = begin(tmp_path / "whole", program, SETTINGS[0])
    whole.attempt()
    for tick in range(1, 17, 2):
        loop = begin(tmp_path / str(tick), program, SETTINGS[0])
        loop.attempt(StopAt(tick))
        loop.attempt()
        assert_same(loop, whole)
