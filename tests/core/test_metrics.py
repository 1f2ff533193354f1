from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_det.core.distributed import Distributed
from hpc_det.core.metrics import MetricsLog, MetricSums, spelled
from hpc_det.store.files import read_lines
from hpc_det.store.folders import TrialFolder
from tests.core.ranks import OnRanks

ALONE = Distributed()


def sums_of(*batches: dict[str, Any]) -> MetricSums:
    sums = MetricSums()
    for batch in batches:
        sums.add(batch)
    return sums


def test_tensors_and_numbers_become_means() -> None:
    sums = sums_of(
        {"loss": torch.tensor(1.0), "hits": 3, "rate": 0.25, "one": torch.tensor([[2]])},
        {"loss": torch.tensor(2.0), "hits": 4, "rate": 0.75, "one": torch.tensor([[4]])},
    )
    assert sums.mean_over_ranks(ALONE) == {"loss": 1.5, "hits": 3.5, "rate": 0.5, "one": 3.0}


def test_a_metric_keeps_no_graph_and_does_not_change_the_users_tensor() -> None:
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    first = weight * 2
    sums = sums_of({"loss": first}, {"loss": weight * 3})
    assert first.item() == 2
    assert sums.mean_over_ranks(ALONE) == {"loss": 2.5}


def test_small_values_do_not_vanish_in_the_sum() -> None:
    sums = sums_of(*({"loss": torch.tensor(0.1)} for _ in range(10_000)))
    assert sums.mean_over_ranks(ALONE)["loss"] == pytest.approx(float(torch.tensor(0.1)), rel=1e-13)


@pytest.mark.parametrize("cut", range(8))
def test_a_window_that_was_cut_by_a_checkpoint_ends_with_the_same_bits(cut: int) -> None:
    values = torch.rand(7, generator=torch.Generator().manual_seed(1)) * 1e3
    batches = [{"loss": value, "rate": float(value) / 3} for value in values]
    before = sums_of(*batches[:cut])
    resumed = MetricSums()
    resumed.restore(json.loads(json.dumps(before.state())))
    for batch in batches[cut:]:
        resumed.add(batch)
    assert resumed.mean_over_ranks(ALONE) == sums_of(*batches).mean_over_ranks(ALONE)


def test_changed_names_are_named() -> None:
    sums = sums_of({"loss": 1.0})
    with pytest.raises(ValueError, match=r"\['loss'\] before, \['accuracy', 'loss'\] now"):
        sums.add({"loss": 1.0, "accuracy": 1.0})


@pytest.mark.parametrize("value", [torch.ones(2), "0.5", None, [1.0], 1j])
def test_what_is_no_scalar_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match=f"metric 'loss': {type(value).__name__} is no scalar"):
        MetricSums().add({"loss": value})


def test_no_batches_have_no_means() -> None:
    assert MetricSums().mean_over_ranks(ALONE) == {}


def uneven(distributed: Distributed, batches: list[int]) -> dict[str, float]:
    sums = MetricSums()
    for batch in range(batches[distributed.rank]):
        sums.add({"rank": distributed.rank, "batch": torch.tensor(float(batch))})
    return sums.mean_over_ranks(distributed)


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([1, 3], {"rank": 0.75, "batch": 0.75}),
        ([2, 0], {"rank": 0.0, "batch": 0.5}),
        ([0, 2], {"rank": 1.0, "batch": 0.5}),
        ([0, 0], {}),
    ],
)
def test_every_batch_of_every_rank_weighs_the_same(
    on_ranks: OnRanks, batches: list[int], expected: dict[str, float]
) -> None:
    assert on_ranks(2, uneven, batches) == [expected] * 2


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.5, 0.5), (-0.0, -0.0), (math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")],
)
def test_what_json_lacks_is_spelled(value: float, words: float | str) -> None:
    assert spelled(value) == words
    assert float(spelled(value)) == pytest.approx(value, nan_ok=True)


@pytest.fixture
def trial(tmp_path: Path) -> TrialFolder:
    return TrialFolder(tmp_path)


def reported(trial: TrialFolder) -> list[tuple[str, int]]:
    return [(record["kind"], record["steps"]) for record in read_lines(trial.metrics)]


def test_a_report_is_one_json_line(trial: TrialFolder) -> None:
    MetricsLog(trial, attempt=2).report("training", 10, 100, {"loss": 0.5, "bad": math.nan})
    (line,) = trial.metrics.read_text().splitlines()
    record = json.loads(line, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    del record["time"]
    metrics = {"loss": 0.5, "bad": "NaN"}
    assert record == {"kind": "training", "steps": 10, "total": 100, "metrics": metrics, "attempt": 2}


def test_exactly_the_lost_stretch_is_forgotten(trial: TrialFolder) -> None:
    log = MetricsLog(trial, attempt=1)
    for steps in (10, 20, 30):
        log.report("training", steps, 100, {"loss": 0.0})
        log.report("validation", steps, 100, {"accuracy": 0.0})
    kept = trial.metrics.read_text().splitlines(keepends=True)
    MetricsLog(trial, attempt=2).begin_at(trained=20, validated=10)
    assert reported(trial) == [("training", 10), ("validation", 10), ("training", 20)]
    assert trial.metrics.read_text() == "".join(kept[:3])


@pytest.mark.parametrize("torn", ['{"kind": "train', ""])
def test_a_torn_line_does_not_hinder_a_new_start(trial: TrialFolder, torn: str) -> None:
    trial.metrics.write_text(torn)
    log = MetricsLog(trial, attempt=2)
    log.begin_at(trained=0, validated=-1)
    log.report("training", 10, 100, {"loss": 0.0})
    assert reported(trial) == [("training", 10)]


def test_without_a_checkpoint_everything_is_forgotten(trial: TrialFolder) -> None:
    log = MetricsLog(trial, attempt=1)
    log.begin_at(trained=0, validated=-1)
    log.report("validation", 0, 100, {"accuracy": 0.1})
    log.report("training", 10, 100, {"loss": 0.0})
    log.begin_at(trained=0, validated=-1)
    assert reported(trial) == []


def test_validations_come_back_as_numbers(trial: TrialFolder) -> None:
    log = MetricsLog(trial, attempt=1)
    log.report("training", 10, 100, {"accuracy": 0.1})
    log.report("validation", 10, 100, {"accuracy": 0.5})
    log.report("validation", 20, 100, {"accuracy": math.nan})
    log.report("validation", 30, 100, {"accuracy": -math.inf})
    log.report("validation", 40, 100, {"other": 1.0})
    assert log.validations("accuracy") == pytest.approx({10: 0.5, 20: math.nan, 30: -math.inf}, nan_ok=True)
