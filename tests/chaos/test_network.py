"""Whatever comes to the listening ports of a running gang, it trains on, stops when it should, and ends bit-equal."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.attacks import KINDS
from tests.chaos.paced_story import ON_TWO_SLOTS, TRIAL, PacedStory
from tests.chaos.table import Amount, Tally
from tests.chaos.under_attack import Recordings, Used, allow_few_files, attack
from tests.core.ranks import _fork_server
from tests.e2e.story import WARM, Story, warm_ranks_of
from tests.e2e.warm.server import warm_ranks
from tests.wait import DEADLINE_S, wait_for

__all__ = ["_fork_server"]

FEW, MANY = 30, 1500
"""Connections or packets of each kind before the gang trains on; some kinds wait for an answer each time."""
SLOW = {"frames replayed": 60, "slow readers and writers": 300}
SAMPLE = 5
"""Kinds, of each attempt, in `make test`."""
FLOOD = ["thousands of connections held", "connections opened and closed", "random bytes", "frames replayed"]


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


@dataclass(frozen=True)
class Ordeal:
    """All kinds of attacks, a stop in a flood of them, and all kinds again, with frames of the attempt before."""

    gang: PacedStory
    recordings: Recordings
    stop: Callable[[PacedStory], None]

    def survive(self, undisturbed: Story, amount: Amount, tally: Tally) -> None:
        kinds, tries = list(amount.of([*KINDS], SAMPLE)), MANY if amount.is_all else FEW
        self._train_on(kinds, tries, tally)
        self._stop_in_a_flood(tally)
        self.gang.train(1)
        self._train_on(kinds if amount.is_all else ["frames replayed"], tries, tally)
        with tally.trying("network: the same to the last bit"):
            self.gang.finish()
            assert self.gang.story.causes == ["preempted", "finished"]
            assert self.gang.story.same_as(undisturbed)

    def _train_on(self, kinds: list[str], tries: int, tally: Tally) -> None:
        """Through these attacks, one after the other."""
        allow_few_files(self.gang.pids)
        assert len(self.recordings) > 0
        before = Used.by(self.gang.pids)
        now = (self.gang.attempt, self.gang.ranks)
        for kind in kinds:
            with tally.trying(f"network: {kind}"):
                with attack([kind], self.gang.pids, self.recordings) as attacked:
                    attacked.until(min(tries, SLOW.get(kind, tries)))
                    self.gang.train(1)
                    before.check(Used.by([*before.files]), self.gang.with_a_store)
                wait_for(lambda: before.is_back(Used.by([*before.files])), DEADLINE_S)
                assert (self.gang.attempt, self.gang.ranks) == now

    def _stop_in_a_flood(self, tally: Tally) -> None:
        with (
            tally.trying("network: stop, save and requeue in a flood"),
            attack(FLOOD, self.gang.pids, self.recordings) as flood,
        ):
            flood.until(FEW)
            self.stop(self.gang)
            self.gang.story.until_ended(1)
            assert self.gang.story.causes == ["preempted"]


def terminate(gang: PacedStory) -> None:
    """As a scheduler does."""
    os.kill(gang.agents[0], signal.SIGTERM)


def test_a_gang_on_one_node_survives_all_attacks(
    undisturbed: Story, tmp_path: Path, amount: Amount, tally: Tally
) -> None:
    recordings = Recordings(tmp_path / "recordings")
    gang = PacedStory.begin(warm_ranks_of(TRIAL), folder=tmp_path, variables=recordings.variables)
    Ordeal(gang, recordings, terminate).survive(undisturbed, amount, tally)
