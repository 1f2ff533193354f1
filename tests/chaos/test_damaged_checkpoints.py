"""Files of checkpoints are damaged: an intact checkpoint is loaded, and the damaged one is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpc_det.checkpoint.checkpoints import CheckpointContext
from hpc_det.checkpoint.committed import CODE, committed, newest_good
from hpc_det.checkpoint.content import load
from hpc_det.distributed.collectives import Distributed
from tests.chaos.scenarios import saves_of_engines, write_code
from tests.chaos.table import Amount, Tally
from tests.odd import flips_and_cuts, overwrite
from tests.pytorch import trials
from tests.pytorch.conftest import _torch_ready as _torch_ready
from tests.pytorch.trials import StopAt, assert_same

SAMPLE = 6


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Return a folder with two checkpoints, at 30 and 60 batches."""
    folder = tmp_path / "whole"
    (folder / "checkpoints").mkdir(parents=True, mode=0o700)
    write_code(folder)
    saves_of_engines(folder, lambda _: None)
    (older,) = committed(folder / "checkpoints")
    shutil.copytree(older.path, tmp_path / "older")
    saves_of_engines(folder, lambda _: None)
    shutil.copytree(tmp_path / "older", older.path)
    return folder


def damages_below(folder: Path) -> list[tuple[Path, bytes]]:
    """Return each file with each content that it may have after a failure of the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(path.relative_to(folder), damage) for path in files for damage in flips_and_cuts(path.read_bytes())]


def test_a_damaged_checkpoint_is_named_and_an_intact_one_is_taken(
    whole: Path, tmp_path: Path, amount: Amount, tally: Tally, capfd: pytest.CaptureFixture[str]
) -> None:
    newest, older = committed(whole / "checkpoints")
    for name, content in amount.of(damages_below(newest.path), SAMPLE):
        folder = tmp_path / "damaged"
        shutil.copytree(whole, folder)
        overwrite(folder / "checkpoints" / newest.uuid / name, content)
        with tally.trying("damaged checkpoints"):
            found = CheckpointContext(folder / "checkpoints", Distributed()).newest()
            captured = capfd.readouterr()
            assert found is not None
            path, steps = found
            assert steps == (newest if name.parts[0] == CODE else older).steps, (str(name), content[:200])
            assert steps == newest.steps or newest.uuid in captured.out + captured.err
            for file in ("state.pth", "engine/weights.pth", "engine/optimizer.pth"):
                assert load(path / file)["weights"].eq(steps).all()
        shutil.rmtree(folder)


# --- damage, then prune, then preempt


class DamagesAt(StopAt):
    """Damages the newest checkpoint before one tick, and preempts the trial at a later one."""

    def __init__(self, checkpoints: Path, damage_at: int, stop_at: int, name: str) -> None:
        super().__init__(stop_at)
        self._checkpoints, self._at, self._name = checkpoints, damage_at, name
        self.damaged: str | None = None
        self.others: set[str] = set()
        """The other checkpoints at the moment of the damage."""
        self.pruned: set[str] = set()
        """The checkpoints of `others` that no longer existed at the preemption."""

    def should_stop(self) -> bool:
        if self.ticks + 1 == self._at and (found := committed(self._checkpoints)):
            path = found[0].path / self._name
            overwrite(path, path.read_bytes()[: path.stat().st_size // 2])
            self.damaged, self.others = found[0].uuid, {each.uuid for each in found[1:]}
        if stops := super().should_stop():
            self.pruned = self.others - {each.uuid for each in committed(self._checkpoints)}
        return stops


TICKS = 20
FIRST = 5
"""The first tick with two checkpoints."""
DAMAGED = ("state_dict.pth", "manifest.json", "progress.pth")
PRUNED = "damage, then prune, then preempt"


def life_in(folder: Path) -> trials.Life:
    """Return a trial that saves and prunes often, and at the same ticks in each run."""
    life = trials.Life.begin(folder, min_checkpoint_period={"batches": 2})
    life.asynchronous = False
    return life


@pytest.mark.integration
def test_a_trial_whose_newest_checkpoint_is_damaged_prunes_and_is_preempted_and_resumes_to_the_bit(
    tmp_path: Path, amount: Amount, tally: Tally
) -> None:
    undisturbed = life_in(tmp_path / "undisturbed")
    undisturbed.attempt()
    pairs = [(at, stop) for at in range(FIRST, TICKS) for stop in range(at, TICKS)]
    for number, (at, stop) in enumerate(amount.of(pairs, 4)):
        life = life_in(tmp_path / f"{at}-{stop}")
        agreement = DamagesAt(life.folder.checkpoints, at, stop, DAMAGED[number % len(DAMAGED)])
        life.attempt(agreement)
        with tally.trying(PRUNED if agreement.pruned else "damage, then preempt"):
            assert agreement.damaged
            intact, _ = newest_good(life.folder.checkpoints)
            assert intact is not None
            assert intact.uuid != agreement.damaged
            life.attempt()
            assert_same(life, undisturbed)
        shutil.rmtree(life.folder.path)
    assert tally.tried[PRUNED]
