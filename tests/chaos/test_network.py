"""A gang whose listening ports are attacked continues to train, stops on request, and ends bit-equal."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.attacks import HELD_CONNECTIONS, KINDS, REPLAYED_FRAMES, frames_of
from tests.chaos.paced_gangs import ON_TWO_SLOTS, TRIAL, Gang, PacedDriver, PacedStory, pace_in, terminate
from tests.chaos.table import SAMPLED_IN_LONG, Amount, Tally
from tests.chaos.under_attack import REPOSITORY, Attack, Recordings, Usage, allow_few_files, attack
from tests.e2e.conftest import _fork_server, run_undisturbed, warm
from tests.e2e.story import WARM, Story, warm_ranks_of
from tests.labs.pbs_lab import PbsLab
from tests.labs.slurm import SlurmLab
from tests.wait import DEADLINE_S, wait_for

__all__ = ["_fork_server", "warm"]

FEW, MANY = 30, 300
"""Number of connections or packets of each kind before the gang trains on. The attack continues meanwhile."""
THOUSANDS = 2000
"""More than a process may have open files."""
OTHERWISE = {
    REPLAYED_FRAMES: 60,  # each one waits for an answer
    "slow readers and writers": 200,
    HELD_CONNECTIONS: THOUSANDS,
    "connections opened and closed": THOUSANDS,
}
"""Replaces `MANY` for these kinds."""
SAMPLE = 5
"""Number of kinds in a sample."""
FLOOD = [HELD_CONNECTIONS, "connections opened and closed", "random bytes", REPLAYED_FRAMES]
EVERYTHING = Amount(is_all=True)
ON_TWO_NODES = ("rank 0", "store", "agent of node 0")


@pytest.fixture(scope="module")
def undisturbed(warm: None, tmp_path_factory: pytest.TempPathFactory) -> Story:
    return run_undisturbed(tmp_path_factory, *ON_TWO_SLOTS, WARM)


@pytest.fixture
def recordings(tmp_path: Path) -> Recordings:
    return Recordings(tmp_path / "recordings")


@dataclass(frozen=True)
class AttackSequence:
    """All kinds of attacks, a stop during a flood of them, and all kinds again, with frames of the attempt before."""

    gang: Gang
    listeners: tuple[str, ...]
    """Listeners of the gang that must be attacked."""
    recordings: Recordings
    amount: Amount
    tally: Tally

    def survive(self) -> None:
        kinds = list(self.amount.of([*KINDS], SAMPLE))
        self._train_on(kinds)
        first = self.recordings.files()
        self._stop_in_a_flood()
        assert any(frames_of(file.read_bytes()) for file in first)
        assert self.recordings.files()[: len(first)] == first, "the second attempt replays the frames of the first one"
        self._train_on(kinds if self.amount.is_all else [REPLAYED_FRAMES])
        with self.tally.trying("network: the same to the last bit"):
            self.gang.finish()

    def _train_on(self, kinds: list[str]) -> None:
        """Train during these attacks, one after the other."""
        allow_few_files({*self.gang.pids} - {*self.gang.with_a_store})
        before, life = Usage.by(self.gang.pids), self.gang.life
        for kind in kinds:
            with self.tally.trying(f"network: {kind}"):
                with self._attack([kind]) as attacked:
                    attacked.until(OTHERWISE.get(kind, MANY) if self.amount.is_all else FEW)
                    self.gang.train(1)
                    before.check(self.gang.with_a_store)
                wait_for(before.is_back, DEADLINE_S)
                assert self.gang.life == life, self.gang.log()

    def _attack(self, kinds: list[str]) -> AbstractContextManager[Attack]:
        listeners = {listener: self.gang.ports(listener) for listener in self.listeners}
        return attack(kinds, self.gang.pids, listeners, self.recordings)

    def _stop_in_a_flood(self) -> None:
        what = "network: stop, save and requeue in a flood"
        with self.tally.trying(what), self._attack(FLOOD) as flood:
            flood.until(FEW)
            self.gang.stop()


@SAMPLED_IN_LONG
def test_a_gang_on_one_node_survives_all_attacks(
    undisturbed: Story, tmp_path: Path, recordings: Recordings, amount: Amount, tally: Tally
) -> None:
    variables = {**recordings.variables, **pace_in(tmp_path)}
    gang = PacedStory.begin(
        warm_ranks_of(TRIAL), folder=tmp_path, variables=variables, stop=terminate, undisturbed=undisturbed
    )
    AttackSequence(gang, ("rank 0",), recordings, amount, tally).survive()


@pytest.mark.chaos
def test_a_gang_under_torchrun_survives_all_attacks(
    undisturbed: Story, tmp_path: Path, recordings: Recordings, tally: Tally
) -> None:
    variables = {**recordings.variables, **pace_in(tmp_path)}
    torchrun = f"entrypoint=python3 -m hpc_det.launch.torch_distributed --trial {TRIAL}"
    gang = PacedStory.begin(torchrun, folder=tmp_path, variables=variables, stop=terminate, undisturbed=undisturbed)
    AttackSequence(gang, ("rank 0", "torchrun"), recordings, EVERYTHING, tally).survive()


PROFILE = """
name: lab
scheduler: {scheduler}
slots_per_node: 1
max_nodes: 3
slot_type: cpu
resource_pool: low
setup: {setup}
"""


def write_profile(root: Path, **values: str) -> None:
    path = root / "conf" / "cluster" / "lab.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(PROFILE.format(**values))


def exports(variables: dict[str, str]) -> str:
    return str([f"export {name}={value}" for name, value in variables.items()])


DIRECT = f"entrypoint=python3 -m hpc_det.launch.direct --trial {TRIAL}"


@pytest.mark.chaos
@pytest.mark.parametrize("pbs_lab", [{"has_networks": True}], indirect=True)
def test_a_gang_on_two_nodes_of_pbs_survives_all_attacks(
    undisturbed: Story, pbs_lab: PbsLab, state_folder: Path, tmp_path: Path, recordings: Recordings, tally: Tally
) -> None:
    variables = {**recordings.variables, **pace_in(tmp_path)}
    write_profile(state_folder, scheduler="pbs", setup=exports(variables))
    pbs_lab.set_kill_delay("low", 60)
    gang = PacedStory.begin(
        DIRECT,
        folder=tmp_path,
        variables=variables,
        stop=lambda _: pbs_lab.preempt(3),
        undisturbed=undisturbed,
        cluster="lab",
    )
    AttackSequence(gang, ON_TWO_NODES, recordings, EVERYTHING, tally).survive()


@pytest.mark.chaos
@pytest.mark.slurm
def test_a_gang_on_two_nodes_of_slurm_survives_all_attacks(
    undisturbed: Story, slurm_lab: SlurmLab, state_folder: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    folder = slurm_lab.folder()
    recordings = Recordings(folder / "recordings")
    variables = {**recordings.variables, **pace_in(folder)}
    write_profile(state_folder, scheduler="slurm", setup=exports(variables))
    slurm_lab.use(monkeypatch)
    gang = PacedStory.begin(
        DIRECT,
        folder=folder,
        variables=variables,
        stop=lambda _: slurm_lab.preempt(3, seconds=2),
        undisturbed=undisturbed,
        cluster="lab",
    )
    AttackSequence(gang, ON_TWO_NODES, recordings, EVERYTHING, tally).survive()


@pytest.mark.chaos
def test_a_driver_with_two_nodes_survives_all_attacks(tmp_path: Path, recordings: Recordings, tally: Tally) -> None:
    (undisturbed := tmp_path / "undisturbed").mkdir()
    PacedDriver(undisturbed, {"PYTHONPATH": str(REPOSITORY)}, undisturbed).let_run()
    gang = PacedDriver(tmp_path, recordings.variables, undisturbed)
    gang.train(1)
    AttackSequence(gang, ("driver",), recordings, EVERYTHING, tally).survive()
