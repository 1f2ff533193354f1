"""Bits of files are flipped, and ends cut off: a reader takes an intact one, or says what is damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpc_det.checkpoint.committed import CODE, committed, newest_good
from hpc_det.core.checkpoint import CheckpointContext
from hpc_det.core.content import load
from hpc_det.core.distributed import Distributed
from hpc_det.requeue import Action, Cause
from tests.chaos.damage import Damage, damages, files_in
from tests.chaos.scenarios import saves_of_engines, write_code
from tests.chaos.table import Amount, Tally
from tests.cli.conftest import Command
from tests.cli.conftest import hpc_det as hpc_det
from tests.cli.conftest import root as root
from tests.cli.conftest import scheduler as scheduler
from tests.cli.conftest import umask as umask
from tests.cli.life import FakeScheduler, Life
from tests.cli.test_damaged import COMMANDS
from tests.pytorch import trials
from tests.pytorch.conftest import _torch_ready as _torch_ready
from tests.pytorch.trials import StopAt, assert_same

SAMPLE = 6


def of_each_file(folder: Path) -> list[tuple[Path, Damage]]:
    return [(path.relative_to(folder), damage) for path in files_in(folder) for damage in damages(path.stat().st_size)]


# --- checkpoints


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Two checkpoints, at 30 and 60 batches."""
    folder = tmp_path / "whole"
    (folder / "checkpoints").mkdir(parents=True, mode=0o700)
    write_code(folder)
    saves_of_engines(folder, lambda _: None)
    (older,) = committed(folder / "checkpoints")
    shutil.copytree(older.path, tmp_path / "older")
    saves_of_engines(folder, lambda _: None)
    shutil.copytree(tmp_path / "older", older.path)
    return folder


def test_a_damaged_checkpoint_is_named_and_an_intact_one_is_taken(
    whole: Path, tmp_path: Path, amount: Amount, tally: Tally, capfd: pytest.CaptureFixture[str]
) -> None:
    newest, older = committed(whole / "checkpoints")
    for name, damage in amount.of(of_each_file(newest.path), SAMPLE):
        folder = tmp_path / "damaged"
        shutil.copytree(whole, folder)
        damage.to(folder / "checkpoints" / newest.uuid / name)
        with tally.trying("damaged checkpoints"):
            found = CheckpointContext(folder / "checkpoints", Distributed()).newest()
            told = capfd.readouterr()
            assert found is not None
            path, steps = found
            assert steps == (newest if name.parts[0] == CODE else older).steps, (str(name), damage.what)
            assert steps == newest.steps or newest.uuid in told.out + told.err
            for file in ("state.pth", "engine/weights.pth", "engine/optimizer.pth"):
                assert load(path / file)["weights"].eq(steps).all()
        shutil.rmtree(folder)


# --- damage, then prune, then preempt


class DamagesAt(StopAt):
    """Before one tick the newest checkpoint is damaged; at a later one the trial is preempted."""

    def __init__(self, checkpoints: Path, damage_at: int, stop_at: int, name: str) -> None:
        super().__init__(stop_at)
        self._checkpoints, self._at, self._name = checkpoints, damage_at, name
        self.damaged: str | None = None

    def should_stop(self) -> bool:
        if self.ticks + 1 == self._at and (found := committed(self._checkpoints)):
            path = found[0].path / self._name
            Damage("half", lambda content: content[: len(content) // 2]).to(path)
            self.damaged = found[0].uuid
        return super().should_stop()


TICKS = 20
DAMAGED = ("state_dict.pth", "manifest.json", "progress.pth")


def test_a_trial_whose_newest_checkpoint_is_damaged_prunes_and_is_preempted_and_resumes_to_the_bit(
    tmp_path: Path, amount: Amount, tally: Tally
) -> None:
    undisturbed = trials.Life.begin(tmp_path / "undisturbed")
    undisturbed.attempt()
    pairs = [(at, stop) for at in range(5, TICKS) for stop in range(at, TICKS)]
    for number, (at, stop) in enumerate(amount.of(pairs, 2)):
        life = trials.Life.begin(tmp_path / f"{at}-{stop}")
        agreement = DamagesAt(life.folder.checkpoints, at, stop, DAMAGED[number % len(DAMAGED)])
        life.attempt(agreement)
        if agreement.damaged is None:
            continue
        with tally.trying("damage, then prune, then preempt"):
            intact, _ = newest_good(life.folder.checkpoints)
            assert intact is not None
            assert intact.uuid != agreement.damaged
            life.attempt()
            assert_same(life, undisturbed)
        shutil.rmtree(life.folder.path)


# --- folders of experiments


@pytest.fixture
def lived(root: Path, scheduler: FakeScheduler) -> Life:
    """An experiment that was preempted once, and trains again."""
    life = Life.submitted(root)
    life.begins()
    life.trains_from(0)
    life.reports("training", 10, {"loss": 1.0}, samples_per_second=4.0)
    life.reports("validation", 10, {"accuracy": 0.5}, seconds=1.0)
    life.saves(10)
    life.rank_prints(0, "hello\n")
    life.ends(Cause.PREEMPTED, Action.REQUEUE, steps=10)
    life.begins()
    life.trains_from(10)
    life.reports("training", 20, {"loss": 0.5}, samples_per_second=4.0)
    return life


def test_every_command_reads_a_damaged_experiment_or_says_what_is_damaged(
    lived: Life, hpc_det: Command, tmp_path: Path, amount: Amount, tally: Tally
) -> None:
    folder, saved = lived.folder.path, tmp_path / "saved"
    shutil.copytree(folder, saved)
    for name, damage in amount.of(of_each_file(saved), SAMPLE):
        damage.to(folder / name)
        with tally.trying("damaged experiments"):
            failed = list(filter(None, (failure(hpc_det, command) for command in COMMANDS)))
            assert not failed, (str(name), damage.what, failed)
        shutil.rmtree(folder)
        shutil.copytree(saved, folder)


def failure(hpc_det: Command, command: tuple[str, ...]) -> str | None:
    try:
        told = hpc_det(*command)
    except Exception as error:
        return f"{' '.join(command)}: {error!r}"
    return None if told.code == 0 or "damaged" in told.err else f"{' '.join(command)}: {told}"
