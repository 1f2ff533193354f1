"""A plain loop on the Core API: stopped anywhere, resumed, and compared with an undisturbed run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from hpc_det.checkpoint.committed import committed
from hpc_det.core import profile
from hpc_det.core.core import Core
from hpc_det.core.progress import Batch, Epoch
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import HpcDetError, UsageError
from tests.core.loops import PASS, Loop, PlainLoop, assert_same
from tests.distributed.ranks import OnRanks
from tests.facts import refused, unnamed
from tests.pytorch.trials import StopAt

# torch takes a resume at the end of a pass for a wrong order of calls: the schedule's step comes before a batch
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")

IN_THE_FIRST_PASS, AT_ITS_END, AFTER_IT, IN_THE_LAST = 2, PASS, PASS + 1, 2 * PASS + 3


def undisturbed(path: Path, **options: Any) -> Loop:
    loop = Loop.begin(path / "undisturbed", **options)
    loop.attempt()
    return loop


def stopped_at(path: Path, *ticks: int, **options: Any) -> Loop:
    """Run a loop that is stopped after so many batches of each attempt, and then to its end."""
    loop = Loop.begin(path / "stopped", **options)
    for tick in ticks:
        loop.attempt(StopAt(tick))
        assert loop.outcome["kind"] == "stopped"
    loop.attempt()
    assert loop.outcome == {"attempt": len(ticks) + 1, "kind": "finished", "steps": 3 * PASS, "saved": True}
    return loop


@pytest.mark.parametrize("ticks", [(IN_THE_FIRST_PASS,), (AT_ITS_END,), (AFTER_IT,), (IN_THE_LAST,), (2, 3, 1, 5)])
@pytest.mark.parametrize("random_items", [False, True])
def test_a_loop_that_is_stopped_and_resumed_is_the_same_as_an_undisturbed_one(
    tmp_path: Path, ticks: tuple[int, ...], random_items: bool
) -> None:
    options = {"hparams": {"random_items": random_items}}
    assert_same(stopped_at(tmp_path, *ticks, **options), undisturbed(tmp_path, **options))


@pytest.mark.integration
def test_random_items_of_loader_workers_are_the_same_after_a_resume(tmp_path: Path) -> None:
    options = {"hparams": {"random_items": True, "workers": 2}}
    assert_same(stopped_at(tmp_path, IN_THE_LAST, **options), undisturbed(tmp_path, **options))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(46):
            inputs = torch.randn(4)
            yield inputs, inputs.sum(dim=0, keepdim=True)


class OverStream(PlainLoop):
    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.loader = torch.utils.data.DataLoader(Stream(), batch_size=8)


class OverGenerator(PlainLoop):
    """Batches of a generator function, which is no loader of torch."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.loader = self

    def __iter__(self) -> Iterator[Any]:
        order = random.sample(range(PASS), PASS)
        for number in order:
            inputs = torch.full((8, 4), float(number)) + random.random()
            yield inputs, inputs.sum(dim=1, keepdim=True)


@pytest.mark.parametrize("program", [OverStream, OverGenerator])
def test_any_iterable_is_resumed_at_its_next_batch(tmp_path: Path, program: Any) -> None:
    assert_same(stopped_at(tmp_path, IN_THE_LAST, program=program), undisturbed(tmp_path, program=program))


class Asking(PlainLoop):
    """Asks by itself, and leaves the loop."""

    def run(self) -> None:
        for _ in self.core.epochs(3):
            for batch in self.core.batches(self.loader):
                self.core.report(self.core.step, {"loss": self.train(batch)})
                if self.core.should_stop():
                    return
            self.scheduler.step()
            self.core.report(self.core.step, self.validate(), group="validation")


def test_a_loop_may_ask_itself_whether_to_stop(tmp_path: Path) -> None:
    loop = Loop.begin(tmp_path / "stopped", Asking)
    core = loop.attempt(StopAt(8))
    assert (core.step, core.should_stop().reason, core.should_stop().deadline) == (8, "preempted", None)
    assert loop.checkpoints == [8]
    loop.attempt()
    assert_same(loop, undisturbed(tmp_path))


def test_a_failing_loop_saves_nothing_and_writes_no_outcome(tmp_path: Path) -> None:
    class Failing(PlainLoop):
        def train(self, batch: Any) -> float:
            return super().train(batch) if self.core.step < 9 else 1 / 0

    loop = Loop.begin(tmp_path, Failing)
    with pytest.raises(ZeroDivisionError):
        loop.attempt()
    assert (loop.checkpoints, loop.folder.outcome.exists()) == ([], False)


def test_saves_come_by_the_periods_of_the_configuration(tmp_path: Path) -> None:
    kept = {"save_experiment_best": 0, "save_trial_best": 0, "save_trial_latest": 99}
    in_batches = Loop.begin(tmp_path / "a", min_checkpoint_period={"batches": 5}, checkpoint_storage=kept)
    in_batches.attempt()
    assert in_batches.checkpoints == [5, 10, 15, 18]
    in_epochs = Loop.begin(tmp_path / "b", min_checkpoint_period={"epochs": 2}, checkpoint_storage=kept)
    in_epochs.attempt()
    assert in_epochs.checkpoints == [12, 18]
    validated = Loop.begin(tmp_path / "c", checkpoint_policy="all", checkpoint_storage=kept)
    validated.attempt()
    assert sorted({*validated.checkpoints}) == [6, 12, 18]


def test_after_a_kill_the_newest_checkpoint_is_resumed(tmp_path: Path) -> None:
    class Killed(PlainLoop):
        dies_at = 14

        def train(self, batch: Any) -> float:
            if self.core.step == self.dies_at:
                raise KeyboardInterrupt
            return super().train(batch)

    period: dict[str, Any] = {"min_checkpoint_period": {"batches": 5}}
    loop = Loop.begin(tmp_path / "killed", Killed, **period)
    with pytest.raises(KeyboardInterrupt):
        loop.attempt()
    assert loop.checkpoints == [5, 10]
    Killed.dies_at = 0
    assert loop.attempt().info.attempt == 2
    assert_same(loop, undisturbed(tmp_path, **period))


# --- lengths


@pytest.mark.parametrize(("until", "steps"), [(Batch(8), 8), (8, 8), (Epoch(2), 12)])
def test_batches_go_on_over_passes_until_a_length(tmp_path: Path, until: Any, steps: int) -> None:
    class Lengths(PlainLoop):
        def run(self) -> None:
            assert [self.core.step for _ in self.core.batches(self.loader, until=until)] == [*range(1, steps + 1)]
            assert [*self.core.batches(self.loader, until=until)] == []
            assert len([*self.core.batches(self.loader, until=steps + 1)]) == 1  # of the same pass, or the next one

    Loop.begin(tmp_path, Lengths).attempt()


def test_a_pass_that_the_loop_leaves_early_counts_as_done(tmp_path: Path) -> None:
    class Leaving(PlainLoop):
        def run(self) -> None:
            for epoch in self.core.epochs(2):
                assert self.core.epoch == epoch
                for number, _ in enumerate(self.core.batches(self.loader)):
                    if number == 2:
                        break
            assert (self.core.step, self.core.epoch) == (6, 2)

    Loop.begin(tmp_path, Leaving).attempt()


def test_micro_batches_are_neither_saved_nor_stopped_within_a_step(tmp_path: Path) -> None:
    class Accumulating(PlainLoop):
        def run(self) -> None:
            for _ in self.core.batches(self.loader, accumulate=4):
                pass

    loop = Loop.begin(tmp_path, Accumulating)
    assert loop.attempt(StopAt(1)).step == 4
    assert loop.checkpoints == [4]


# --- tracked objects


def in_the_block(path: Path, body: Any, **options: Any) -> Loop:
    class Program:
        def __init__(self, core: Core) -> None:
            self._core = core

        def run(self) -> None:
            body(self._core)

    loop = Loop.begin(path, Program, **options)
    loop.attempt()
    return loop


def test_what_cannot_be_tracked_is_named(tmp_path: Path) -> None:
    def body(core: Core) -> None:
        model = torch.nn.Linear(1, 1)
        core.track(model=model)
        with refused(UsageError, "model", "count", "int"):
            core.track(model=model, count=3)
        with refused(HpcDetError, "when", "datetime.timedelta"):
            import datetime

            core.track(when={"at": datetime.timedelta(1)})

    in_the_block(tmp_path, body)


def test_a_scheduler_that_is_created_after_its_optimizer_was_restored_changes_nothing(tmp_path: Path) -> None:
    class Scheduled(PlainLoop):
        def __init__(self, core: Core) -> None:
            super().__init__(core)
            optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
            core.track(late=optimizer)
            self.late = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=100)
            core.track(schedule=self.late)

        def train(self, batch: Any) -> float:
            found = super().train(batch)
            self.late.optimizer.step()
            self.late.step()
            return found

    assert_same(stopped_at(tmp_path, 3, program=Scheduled), undisturbed(tmp_path, program=Scheduled))


def test_a_name_that_the_checkpoint_lacks_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    loop = Loop.begin(tmp_path)
    loop.attempt(StopAt(3))

    class Renamed(PlainLoop):
        def __init__(self, core: Core) -> None:
            core.track(modle=torch.nn.Linear(1, 1))

    loop.program = Renamed
    with refused(UsageError, "modle", "model", str(loop.newest)):
        loop.attempt()


# --- reports


def test_reports_are_void_after_the_checkpoint_from_which_the_next_attempt_resumes(tmp_path: Path) -> None:
    loop = stopped_at(tmp_path, 4)
    assert [steps for kind, steps, _ in loop.series if kind == "training"] == [*range(1, 19)]
    assert [steps for kind, steps, _ in loop.series if kind == "validation"] == [6, 12, 18]


def test_metrics_are_written_as_json_takes_them(tmp_path: Path) -> None:
    def body(core: Core) -> None:
        kept = torch.tensor(1.5)
        core.report(1, {"loss": kept, "nan": float("nan"), "array": torch.ones(2), "odd": object(), "text": "a"})
        kept += 1
        core.report(2, {"error": torch.tensor([0.25])}, group="validation")
        core.report(2, {"accuracy": 1}, group="test")

    loop = in_the_block(tmp_path, body)
    training = {"loss": 1.5, "nan": "NaN", "array": [1.0, 1.0], "odd": None, "text": "a"}
    assert loop.series == [("training", 1, training), ("validation", 2, {"error": 0.25})]
    (group,) = loop.folder.groups.read_text().splitlines()
    assert '"group": "test", "steps": 2, "metrics": {"accuracy": 1}' in group


# --- checkpoints of a loop's own files


def test_a_checkpoint_has_the_files_of_the_block_and_what_is_tracked(tmp_path: Path) -> None:
    def body(core: Core) -> None:
        assert core.latest_checkpoint is None
        core.track(model=torch.nn.Linear(1, 1))
        with core.checkpoint(7, metadata={"note": "first"}) as folder:
            (folder / "parts").mkdir()
            (folder / "parts" / "a.txt").write_text("a")
        assert core.latest_checkpoint
        assert (core.latest_checkpoint / "parts" / "a.txt").read_text() == "a"
        assert '"note": "first"' in (core.latest_checkpoint / "metadata.json").read_text()

    loop = in_the_block(tmp_path, body)
    assert loop.checkpoints == [7]
    (checkpoint,) = committed(loop.folder.checkpoints)
    assert {"parts/a.txt", "tracked.pth", "rank-0.pth", "progress.pth", "metadata.json"} <= checkpoint.files.keys()
    assert checkpoint.damage() == []


def test_an_exception_in_the_block_of_a_checkpoint_commits_nothing(tmp_path: Path) -> None:
    def body(core: Core) -> None:
        with pytest.raises(ZeroDivisionError), core.checkpoint(3):
            1 / 0  # noqa: B018
        with core.checkpoint(4) as folder:
            (folder / "b.txt").write_text("b")

    loop = in_the_block(tmp_path, body)
    assert loop.checkpoints == [4]
    assert [path.name for path in loop.folder.checkpoints.iterdir()] == [loop.newest.name]


def test_a_file_of_the_checkpoint_itself_cannot_be_replaced(tmp_path: Path) -> None:
    def body(core: Core) -> None:
        with refused(UsageError, "progress.pth"), core.checkpoint(3) as folder:
            (folder / "progress.pth").write_text("mine")

    assert in_the_block(tmp_path, body).checkpoints == []


def test_an_object_that_is_not_tracked_any_more_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop.begin(tmp_path)
    loop.attempt(StopAt(3))

    class Less(PlainLoop):
        def __init__(self, core: Core) -> None:
            self.core = core
            core.track(
                model=torch.nn.Sequential(
                    torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.ReLU(), torch.nn.Linear(8, 1)
                )
            )

        def run(self) -> None:
            list(self.core.batches([1, 2, 3, 4]))

    loop.program = Less
    loop.attempt()
    assert unnamed(capsys.readouterr().out, "optimizer", "scheduler") == []


def test_metadata_of_a_block_that_failed_are_not_in_the_next_checkpoint(tmp_path: Path) -> None:
    def body(core: Core) -> None:
        core.track(model=torch.nn.Linear(1, 1))
        with pytest.raises(ZeroDivisionError), core.checkpoint(3, metadata={"note": "failed"}):
            1 / 0  # noqa: B018
        core.save()

    assert "note" not in (in_the_block(tmp_path, body).newest / "metadata.json").read_text()


def test_a_loop_with_its_own_state_resumes_from_its_files(tmp_path: Path) -> None:
    class Own:
        def __init__(self, core: Core) -> None:
            self._core = core

        def run(self) -> None:
            core = self._core
            count = int((core.latest_checkpoint / "count").read_text()) if core.latest_checkpoint else 0
            drawn = (core.latest_checkpoint / "drawn").read_text() if core.latest_checkpoint else ""
            core.restore_generators()
            while count < 5:
                count, drawn = count + 1, f"{drawn} {random.random()}"
                core.report(count, {"count": count})
                if core.should_stop() or count == 5:
                    with core.checkpoint(count) as folder:
                        (folder / "count").write_text(str(count))
                        (folder / "drawn").write_text(drawn)
                    return

    loop, whole = Loop.begin(tmp_path / "stopped", Own), Loop.begin(tmp_path / "whole", Own)
    loop.attempt(StopAt(2))
    assert loop.outcome == {"attempt": 1, "kind": "stopped", "steps": 2, "saved": True}
    for each in (loop, whole):
        each.attempt()
    assert (loop.newest / "drawn").read_text() == (whole.newest / "drawn").read_text()
    assert loop.series == whole.series


# --- several ranks


def live(distributed: Distributed, whole: Loop, stopped: Loop) -> None:
    whole.attempt(distributed=distributed)
    stopped.attempt(StopAt(8), distributed)
    stopped.attempt(distributed=distributed)


def test_two_ranks_that_are_stopped_and_resumed_are_the_same(on_ranks: OnRanks, tmp_path: Path) -> None:
    loops = [Loop.begin(tmp_path / name, hparams={"random_items": True}) for name in ("whole", "stopped")]
    on_ranks(2, live, *loops)
    assert_same(*loops)


class InDdp(PlainLoop):
    def __init__(self, core: Core) -> None:
        super().__init__(core)
        deep = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)), torch.nn.Linear(4, 1))
        self.ddp = torch.nn.parallel.DistributedDataParallel(deep)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.05, momentum=0.9)
        core.track(ddp=self.ddp, momentum=self.optimizer)

    def train(self, batch: Any) -> float:
        inputs, targets = batch
        loss = (self.ddp(inputs) - targets).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def test_ddp_adds_the_gradients_of_four_ranks_in_the_same_order_after_a_resume(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    loops = [Loop.begin(tmp_path / name, InDdp) for name in ("whole", "stopped")]
    on_ranks(4, live, *loops)
    assert_same(*loops)
    assert set(loops[0].tracked()["ddp"]) == {f"{number}.{name}" for number in range(4) for name in ("weight", "bias")}


def begun(distributed: Distributed, loop: Loop) -> int:
    return loop.attempt(StopAt(1), distributed).step


def test_fewer_ranks_resume_with_the_state_of_rank_0(on_ranks: OnRanks, tmp_path: Path) -> None:
    loop = Loop.begin(tmp_path)
    assert on_ranks(2, begun, loop) == [1, 1]
    loop.attempts = 1
    loop.attempt(StopAt(1))
    assert loop.checkpoints[-1] == 2


def unequal(distributed: Distributed, loop: Loop, which: str) -> str:
    class Unequal(PlainLoop):
        def run(self) -> None:
            core, first = self.core, self.core.distributed.is_chief
            if which == "calls":
                if first:
                    core.report(1, {"error": 1.0}, group="validation")
                else:
                    core.save()
            elif which == "steps":
                with core.checkpoint(3 if first else 4):
                    pass
            elif which == "ticks":
                if first:
                    core.should_stop()
                core.save()
            else:
                with core.checkpoint(3):
                    if not first:
                        raise ZeroDivisionError

    loop.program = Unequal
    try:
        loop.attempt(distributed=distributed)
    except (HpcDetError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("which", "facts"),
    [
        ("calls", ["rank 0", "report", "rank 1", "save"]),
        ("steps", ["rank 0", "batch 3", "rank 1", "batch 4"]),
        ("ticks", ["rank 0", "1 time", "rank 1", "0 times", "should_stop"]),
    ],
)
def test_unequal_calls_of_ranks_end_with_an_error_that_names_both(
    on_ranks: OnRanks, tmp_path: Path, which: str, facts: list[str]
) -> None:
    for message in on_ranks(2, unequal, Loop.begin(tmp_path), which):
        assert [fact for fact in ("UsageError", *facts) if fact not in message] == []


def test_a_rank_that_fails_in_the_block_of_a_checkpoint_is_named_to_the_others(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    loop = Loop.begin(tmp_path)
    first, second = on_ranks(2, unequal, loop, "failure")
    assert "rank 1" in first
    assert second.startswith("ZeroDivisionError")
    assert loop.checkpoints == []


def test_a_profile_has_the_time_to_load_and_to_train_and_what_the_loop_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "SHORTEST_S", 0.0)

    class Profiled(PlainLoop):
        def train(self, batch: Any) -> float:
            with self.core.profile("forward"):
                return super().train(batch)

    loop = Loop.begin(tmp_path / "on", Profiled, profiling={"enabled": True, "begin_on_batch": 2, "end_after_batch": 9})
    loop.attempt()
    lines = [json.loads(line) for line in loop.folder.timings(0).read_text().splitlines()]
    assert sum(line["count"] for line in lines) == 10 - 2
    assert {"dataloader_next", "train_batch", "forward"} <= {name for line in lines for name in line["seconds"]}
    assert lines[0]["records"] == 8
    off = Loop.begin(tmp_path / "off", Profiled)
    off.attempt()
    assert not off.folder.profile.exists()
    assert_same(loop, off)
