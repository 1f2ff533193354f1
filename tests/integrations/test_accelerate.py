"""A plain loop with Accelerate: a run that is stopped and resumed ends with the same bits as one that is not."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.facts import unnamed
from tests.integrations.forked_runs import Cell, Results, results_of

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="no accelerate")
SEEDABLE = {"use_seedable_sampler": True, "data_seed": 4}
CELLS: dict[str, Cell] = {
    "in the middle and at the end of a pass": {"stops": [8, 12]},
    "seedable sampler": {"stops": [8], "loader": SEEDABLE},
    "two workers": {"stops": [8], "workers": 2},
    "two ranks": {"stops": [8], "ranks": 2},
    "save_state": {"stops": [8], "saves_state": True},
}
FORGETFUL: Cell = {"stops": [7], "accumulate": 2, "forgets": True}
"""A loop that calls `core.batches` without `accumulate`."""
MORE: dict[str, Cell] = {
    "accumulation": {"stops": [7, 12], "accumulate": 2},
    "seedable sampler, two ranks, two workers": {"stops": [3, 12, 17], "ranks": 2, "workers": 2, "loader": SEEDABLE},
    "save_state, two ranks": {"stops": [6, 10], "ranks": 2, "saves_state": True},
    "rank 0 reads for all": {"stops": [8], "ranks": 2, "loader": {"dispatch_batches": True}},
}
TRAINING = "tests.integrations.accelerate_training"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    return results_of(TRAINING, tmp_path_factory.mktemp("runs"), {**CELLS, "forgetful": FORGETFUL})


@pytest.mark.integration
@pytest.mark.parametrize("name", CELLS)
def test_a_stopped_and_resumed_run_is_the_whole_run_to_the_bit(results: dict[str, Results], name: str) -> None:
    assert results[name].resumed == results[name].whole


@pytest.mark.integration
def test_gradients_that_a_resume_loses_are_noted(results: dict[str, Results]) -> None:
    logs = {name: (found.root / "resumed-0.log").read_text() for name, found in results.items()}
    assert unnamed(logs.pop("forgetful"), "batch 7", "first 1 batch ", "accumulate=") == []
    assert [name for name, log in logs.items() if "accumulate=" in log] == []


@pytest.mark.long
def test_so_is_it_in_more_cases(tmp_path: Path) -> None:
    for name, found in results_of(TRAINING, tmp_path, MORE).items():
        assert found.resumed == found.whole, name
