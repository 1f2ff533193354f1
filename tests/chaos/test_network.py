"""Whatever comes to the listening ports of a running gang, it trains on, stops when it should, and ends bit-equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.attacks import HELD_CONNECTIONS, KINDS
from tests.chaos.paced_gangs import ON_TWO_SLOTS, TRIAL, Gang, PacedDriver, PacedStory, pace_in, terminate
from tests.chaos.table import Amount, Tally
from tests.chaos.under_attack import Attack, Recordings, Used, allow_few_files, attack
from tests.core.ranks import _fork_server
from tests.e2e.story import WARM, Story, warm_ranks_of
from tests.e2e.warm.server import warm_ranks
from tests.lab.pbs_lab import PbsLab
from tests.wait import DEADLINE_S, wait_for

__all__ = ["_fork_server"]

FEW, MANY = 30, 300
"""Connections or packets of each kind before the gang trains on, while they go on."""
THOUSANDS = 2000
"""More than the files that a process may have open."""
OTHERWISE = {
    "frames replayed": 60,  # an answer is waited for each time
    "slow readers and writers": 200,
    HELD_CONNECTIONS: THOUSANDS,
    "connections opened and closed": THOUSANDS,
}
"""In place of `MANY`."""
SAMPLE = 5
"""Kinds in `make test`."""
FLOOD = [HELD_CONNECTIONS, "connections opened and closed", "random bytes", "frames replayed"]
EVERYTHING = Amount(is_all=True)


@pytest.fixture(scope="module")
def warm(_fork_server: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with warm_ranks(tmp_path_factory.mktemp("warm")):
        yield


@pytest.fixture(scope="module")
def undisturbed(warm: None, tmp_path_factory: pytest.TempPathFactory) -> Story:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPC_DET_ROOT", str(tmp_path_factory.mktemp("undisturbed")))
        story = Story.begin(*ON_TWO_SLOTS, WARM)
        story.wait()
    return story


@pytest.fixture
def recordings(tmp_path: Path) -> Recordings:
    return Recordings(tmp_path / "recordings")


@dataclass(frozen=True)
class Ordeal:
    """All kinds of attacks, a stop in a flood of them, and all kinds again, with frames of the attempt before."""

    gang: Gang
    recordings: Recordings
    amount: Amount
    tally: Tally

    def survive(self) -> None:
        kinds = list(self.amount.of([*KINDS], SAMPLE))
        self._train_on(kinds)
        self._stop_in_a_flood()
        self._train_on(kinds if self.amount.is_all else ["frames replayed"])
        with self.tally.trying("network: the same to the last bit"):
            self.gang.finish()

    def _train_on(self, kinds: list[str]) -> None:
        """Through these attacks, one after the other."""
        allow_few_files({*self.gang.pids} - {*self.gang.with_a_store})
        assert len(self.recordings) > 0
        before, life = Used.by(self.gang.pids), self.gang.life
        for kind in kinds:
            with self.tally.trying(f"network: {kind}"):
                with self._attack([kind]) as attacked:
                    attacked.until(OTHERWISE.get(kind, MANY) if self.amount.is_all else FEW)
                    self.gang.train(1)
                    before.check(self.gang.with_a_store)
                wait_for(before.is_back, DEADLINE_S)
                assert self.gang.life == life, self.gang.log()

    def _attack(self, kinds: list[str]) -> AbstractContextManager[Attack]:
        return attack(kinds, self.gang.pids, self.recordings)

    def _stop_in_a_flood(self) -> None:
        what = "network: stop, save and requeue in a flood"
        with self.tally.trying(what), self._attack(FLOOD) as flood:
            flood.until(FEW)
            self.gang.stop()


def test_a_gang_on_one_node_survives_all_attacks(
    undisturbed: Story, tmp_path: Path, recordings: Recordings, amount: Amount, tally: Tally
) -> None:
    variables = {**recordings.variables, **pace_in(tmp_path)}
    gang = PacedStory.begin(
        warm_ranks_of(TRIAL), folder=tmp_path, variables=variables, stop=terminate, undisturbed=undisturbed
    )
    Ordeal(gang, recordings, amount, tally).survive()


@pytest.mark.chaos
def test_a_gang_under_torchrun_survives_all_attacks(
    undisturbed: Story, tmp_path: Path, recordings: Recordings, tally: Tally
) -> None:
    variables = {**recordings.variables, **pace_in(tmp_path)}
    torchrun = f"entrypoint=python3 -m hpc_det.launch.torch_distributed --trial {TRIAL}"
    gang = PacedStory.begin(torchrun, folder=tmp_path, variables=variables, stop=terminate, undisturbed=undisturbed)
    Ordeal(gang, recordings, EVERYTHING, tally).survive()


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
    Ordeal(gang, recordings, EVERYTHING, tally).survive()


@pytest.mark.chaos
def test_a_driver_with_two_nodes_survives_all_attacks(tmp_path: Path, recordings: Recordings, tally: Tally) -> None:
    (undisturbed := tmp_path / "undisturbed").mkdir()
    PacedDriver(undisturbed, recordings.variables, undisturbed).let_run()
    gang = PacedDriver(tmp_path, recordings.variables, undisturbed)
    gang.train(1)
    Ordeal(gang, recordings, EVERYTHING, tally).survive()
