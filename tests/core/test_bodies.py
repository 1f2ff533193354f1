"""Loops that ask for saves in the middle of a body, and are killed or stopped anywhere: nothing is repeated or lost."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_det.core.core import Core
from hpc_det.errors import UsageError
from tests.core.loops import CONFIG, PASS, Loop, PlainLoop, assert_same
from tests.facts import refused
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


@pytest.mark.parametrize("one_of", [3, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: str(each["checkpoint_policy"]))
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_loop_that_is_killed_anywhere_continues_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Any, settings: dict[str, Any], one_of: int
) -> None:
    """`one_of` 3: at every third of the points, which are others for each of the settings."""
    whole = begin(tmp_path / "whole", program, settings)
    whole.attempt()
    for point in range(3, 30, 4)[SETTINGS.index(settings) % one_of :: one_of]:
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


# --- what has no defined position


class Program:
    """A program whose body is a function."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def run(self) -> None:
        self.body(self.core)

    def body(self, core: Core) -> None:
        raise NotImplementedError


def refusing(body: Any, path: Path, *facts: str) -> None:
    class Refused(Program):
        def body(self, core: Core) -> None:
            with refused(UsageError, *facts):
                body(core)

    Loop.begin(path, Refused).attempt()


def test_a_second_loader_in_a_body_is_refused(tmp_path: Path) -> None:
    def nested(core: Core) -> None:
        for _ in core.batches([1, 2]):
            list(core.batches([3, 4]))

    def two_passes(core: Core) -> None:
        for _ in core.epochs(2):
            list(core.batches([1, 2]))
            list(core.batches([3, 4]))

    refusing(nested, tmp_path / "nested", "batches", "batch 1")
    refusing(two_passes, tmp_path / "two", "epochs", "batch 2")


def test_a_report_of_another_step_than_that_of_batches_is_refused(tmp_path: Path) -> None:
    def body(core: Core) -> None:
        for _ in core.batches([1, 2]):
            core.report(8 * core.step, {"loss": 1})

    refusing(body, tmp_path, "report", "8", "1", "core.step")


@pytest.mark.parametrize("loader", [[], iter([1, 2])], ids=["empty", "an iterator"])
def test_a_loader_that_gives_no_batch_is_refused(tmp_path: Path, loader: Any) -> None:
    refusing(lambda core: list(core.batches(loader, until=5)), tmp_path, "batches", "5", "no batch")


@pytest.mark.parametrize("until", [5.0, "5", {"batches": 5}])
def test_a_length_that_is_no_number_is_refused(tmp_path: Path, until: Any) -> None:
    refusing(lambda core: list(core.batches([1], until=until)), tmp_path, "until", repr(until), "Batch")


def test_a_length_may_be_a_number_of_numpy(tmp_path: Path) -> None:
    class Lengths(Program):
        def body(self, core: Core) -> None:
            length: Any = np.int64(5)
            assert len(list(core.batches([1, 2], until=length))) == 5

    Loop.begin(tmp_path, Lengths).attempt()


# --- accumulation, and objects that are tracked late


class Accumulating(Program):
    """Adds the batches of each step of four; validates within a step, and is killed after that."""

    killed = False

    def body(self, core: Core) -> None:
        self.sums = {"sum": 0}
        core.track(sums=self.sums)
        waiting = 0
        for number in core.batches(range(1, 19), accumulate=4):
            waiting += number
            if core.step % 4 == 0:
                self.sums["sum"], waiting = self.sums["sum"] + waiting, 0
            if core.step == 10:
                core.report(10, {"error": 1.0}, group="validation")
            if core.step == 13 and self.killed:
                raise Killed


def test_a_save_within_accumulated_batches_is_made_after_the_step(tmp_path: Path) -> None:
    Loop.begin(tmp_path / "whole", Accumulating, checkpoint_policy="all").attempt()
    loop = Loop.begin(tmp_path / "killed", Accumulating, checkpoint_policy="all", checkpoint_storage=KEPT)
    Accumulating.killed = True
    with suppress(Killed):
        loop.attempt()
    Accumulating.killed = False
    assert loop.checkpoints == [12]
    loop.attempt()
    assert loop.tracked()["sums"]["sum"] == sum(range(1, 17))


def test_a_pass_shorter_than_a_step_is_stopped_at_its_end(tmp_path: Path) -> None:
    class Short(Program):
        def body(self, core: Core) -> None:
            core.track(count={"n": 1})
            for _ in core.epochs(9):
                list(core.batches([1, 2, 3], accumulate=4))

    assert Loop.begin(tmp_path, Short).attempt(StopAt(2)).step == 6


class TrackingLate(Program):
    def body(self, core: Core) -> None:
        core.track(count={"n": 1})
        average: dict[str, int] = {}
        for number in core.batches(range(10)):
            if core.step >= 3:
                if not average:
                    average["sum"] = 0
                    core.track(average=average)
                average["sum"] += number


def test_an_object_that_is_tracked_in_the_loop_is_restored_there(tmp_path: Path) -> None:
    for stop in (2, 6):
        loop = Loop.begin(tmp_path / str(stop), TrackingLate)
        loop.attempt(StopAt(stop))
        loop.attempt()
        assert loop.tracked()["average"]["sum"] == sum(range(2, 10))


def test_a_state_that_does_not_fit_names_its_checkpoint(tmp_path: Path) -> None:
    class Model(Program):
        def body(self, core: Core) -> None:
            core.track(model=torch.nn.Linear(core.hparams["width"], 1))
            list(core.batches([1, 2, 3]))

    loop = Loop.begin(tmp_path, Model, {"width": 2})
    loop.attempt(StopAt(2))
    loop.hparams = {"width": 3}
    with refused(UsageError, "model", str(tmp_path / "checkpoints"), "size mismatch"):
        loop.attempt()


def test_random_numbers_before_the_first_batch_do_not_change_a_later_resume(tmp_path: Path) -> None:
    class Drawing(PlainLoop):
        def run(self) -> None:
            self.validate()
            self.core.report(self.core.step, {"error": 1.0}, group="validation")
            for batch in self.core.batches(self.loader, until=9):
                self.core.report(self.core.step, {"loss": self.train(batch)})

    whole = Loop.begin(tmp_path / "whole", Drawing, checkpoint_policy="all")
    whole.attempt()
    loop = Loop.begin(tmp_path / "stopped", Drawing, checkpoint_policy="all")
    for _ in range(3):
        loop.attempt(StopAt(2))
    loop.attempt()
    kinds = [[each for each in one.series if each[0] == "training"] for one in (loop, whole)]
    assert kinds[0] == kinds[1]
