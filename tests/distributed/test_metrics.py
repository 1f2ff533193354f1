from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_det.checkpoint.content import load
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.metrics import MetricsLog, MetricWindow, Reducer, scalar, spelled
from hpc_det.errors import UsageError
from hpc_det.node.format_version import KEY
from hpc_det.store.folders import TrialFolder
from hpc_det.store.journal import Journal, Overtaken
from hpc_det.store.metrics import read_reports
from tests.distributed.ranks import OnRanks
from tests.facts import refused, unnamed

ALONE = Distributed()


class OnDevice(torch.Tensor):
    """A tensor that claims to be on another device, where reading it would wait for the computation of its value."""

    reads = 0
    is_cpu = property(lambda self: False)

    def item(self) -> Any:
        OnDevice.reads += 1
        return self.as_subclass(torch.Tensor).item()

    def __float__(self) -> float:
        return float(self.item())


def on_device(value: Any, dtype: torch.dtype = torch.float32) -> OnDevice:
    return torch.tensor(value, dtype=dtype).as_subclass(OnDevice)


PLACES: list[Callable[[float], Any]] = [float, torch.tensor, on_device]
"""The places in which the value of a metric may be."""


def batch_metrics(window: MetricWindow, distributed: Distributed) -> list[dict[str, float | None]]:
    return window.reduced_batches(distributed.gather_json(window.kept_sums()))


def window_of(*batches: dict[str, Any], **options: Any) -> MetricWindow:
    window = MetricWindow(**options)
    for batch in batches:
        window.add(batch)
    return window


def reduced(*batches: dict[str, Any], **options: Any) -> dict[str, float | None]:
    return window_of(*batches, **options).reduce(ALONE)


# --- what a metric may be


@pytest.mark.parametrize(
    ("first", "second", "mean"),
    [
        (0.25, 0.75, 0.5),
        (3, 4, 3.5),
        (True, False, 0.5),
        (np.float32(1.5), np.float64(2.5), 2.0),
        (np.int64(1), np.bool_(True), 1.0),
        (np.array(1.0), np.array([[3]]), 2.0),
        (torch.tensor(1.0), torch.tensor([[2]]), 1.5),
        (torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(True), 1.25),
        (torch.tensor(1.0), 2.0, 1.5),
        (2.0, torch.tensor(1.0), 1.5),
        (on_device(1.0), 2.0, 1.5),
        (2.0, on_device(1.0), 1.5),
        (on_device([1.0]), on_device([[2]], torch.int64), 1.5),
    ],
)
def test_numbers_and_tensors_of_one_element_become_means(first: Any, second: Any, mean: float) -> None:
    assert reduced({"metric": first}, {"metric": second}) == {"metric": mean}
    assert type(reduced({"metric": first})["metric"]) is float


NO_SCALARS: list[Any] = [
    torch.ones(2),
    np.ones(3),
    torch.tensor(1j),
    "0.5",
    None,
    [1.0],
    1j,
    Fraction(1, 2),
    np.array("a"),
]


@pytest.mark.parametrize("value", NO_SCALARS, ids=repr)
def test_anything_else_makes_a_training_metric_none_for_the_whole_window(value: Any) -> None:
    assert reduced({"loss": 1.0, "odd": value}) == {"loss": 1.0, "odd": None}
    assert reduced({"odd": 1.0}, {"odd": value}, {"odd": 1.0}) == {"odd": None}
    assert scalar(value) is None


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([0.5, 0.5], "list"),
        ("0.5", "str"),
        (None, "None"),
    ],
)
def test_anything_else_as_a_validation_metric_is_an_error_that_says_what_to_return(value: Any, kind: str) -> None:
    with refused(UsageError, "evaluate_batch", "'accuracy'", kind, "context.wrap_reducer"):
        window_of({"accuracy": value}, is_validation=True)


@pytest.mark.parametrize("value", [torch.ones(2), np.ones((2, 3)), torch.ones(0)])
def test_a_tensor_of_several_elements_beside_validation_metrics_is_none(value: Any) -> None:
    window = window_of({"accuracy": 0.5, "predictions": value}, is_validation=True)
    assert window.reduce(ALONE) == {"accuracy": 0.5, "predictions": None}


def test_a_metric_keeps_no_graph_and_does_not_change_the_users_tensor() -> None:
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    for place in (weight * 2, (weight * 2).as_subclass(OnDevice)):
        window = window_of({"loss": place}, {"loss": weight * 3})
        assert place.item() == 2
        assert not any(isinstance(total, torch.Tensor) and total.requires_grad for total in window._totals.values())
        assert window.reduce(ALONE) == {"loss": 2.5}


@pytest.mark.parametrize("place", PLACES)
def test_small_values_do_not_vanish_in_the_sum(place: Callable[[float], Any]) -> None:
    value = float(torch.tensor(0.1))
    assert reduced(*[{"loss": place(value)}] * 10_000)["loss"] == pytest.approx(value, rel=1e-13)


def test_a_device_without_float64_sums_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    def to(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if dtype is torch.float64:
            raise TypeError("as Apple's")
        return torch.Tensor.to(tensor, dtype)

    monkeypatch.setattr(OnDevice, "to", to)
    assert reduced({"loss": on_device(1, torch.int32)}, {"loss": on_device(0.5)}) == {"loss": 0.75}


# --- what a batch costs


def test_nothing_waits_for_a_device_before_the_window_is_reduced() -> None:
    OnDevice.reads = 0
    window = window_of(*[{"loss": on_device(1.0), "hits": on_device(3)}] * 50, keep_batches=True)
    assert OnDevice.reads == 0
    window.reduce(ALONE)
    assert OnDevice.reads > 0


def test_later_batches_allocate_nothing() -> None:
    window = window_of({"loss": on_device(1.0)})
    total = window._totals["loss"]
    assert isinstance(total, torch.Tensor)
    address = total.data_ptr()
    for _ in range(10):
        window.add({"loss": on_device(1.0)})
    assert window._totals["loss"] is total
    assert total.data_ptr() == address


# --- names


def test_changed_names_are_named() -> None:
    window = window_of({"loss": 1.0})
    with refused(UsageError, ["loss"], ["accuracy", "loss"]):
        window.add({"loss": 1.0, "accuracy": 1.0})


def test_a_name_is_a_text() -> None:
    with refused(UsageError, "metric 7", "int"):
        window_of({7: 1.0})  # type: ignore[dict-item]


def test_batches_without_metrics_are_well() -> None:
    window = window_of({}, {}, keep_batches=True)
    assert (window.batches, window.reduce(ALONE), batch_metrics(window, ALONE)) == (2, {}, [{}, {}])


def test_no_batches_have_no_metrics() -> None:
    assert reduced() == {}
    assert reduced(reducer={"loss": Reducer.MAX}) == {}


def test_after_a_reset_a_window_is_new() -> None:
    window = window_of({"loss": 1.0}, keep_batches=True)
    window.reset()
    assert (window.batches, window.reduce(ALONE), batch_metrics(window, ALONE)) == (0, {}, [])
    window.add({"other": 2.0})
    assert window.reduce(ALONE) == {"other": 2.0}


# --- reducers


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("reducer", "expected"), [(Reducer.AVG, 1.0), (Reducer.SUM, 3.0), (Reducer.MAX, 4.0), (Reducer.MIN, -3.0)]
)
def test_reducers(place: Callable[[float], Any], reducer: Reducer, expected: float) -> None:
    batches = [{"metric": place(value)} for value in (4.0, -3.0, 2.0)]
    assert reduced(*batches, reducer=reducer) == {"metric": expected}


def test_each_metric_may_have_a_reducer_of_its_own() -> None:
    reducer = {"mean": Reducer.AVG, "sum": Reducer.SUM, "max": Reducer.MAX, "min": Reducer.MIN}
    batches = [dict.fromkeys(reducer, value) for value in (4.0, -3.0, 2.0)]
    assert reduced(*batches, reducer=reducer) == {"mean": 1.0, "sum": 3.0, "max": 4.0, "min": -3.0}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("reducer", Reducer)
@pytest.mark.parametrize("values", [(math.nan, 1.0, 2.0), (1.0, math.nan, 2.0), (1.0, 2.0, math.nan)])
def test_nan_survives(place: Callable[[float], Any], reducer: Reducer, values: tuple[float, ...]) -> None:
    metric = reduced(*({"metric": place(value)} for value in values), reducer=reducer)["metric"]
    assert metric is not None
    assert math.isnan(metric)


@pytest.mark.parametrize(("reducer", "expected"), [(Reducer.MAX, 3.0), (Reducer.MIN, 1.0)])
def test_values_of_several_places_are_compared(reducer: Reducer, expected: float) -> None:
    values: list[Any] = [2.0, on_device(1, torch.uint8), on_device(3, torch.int64), 2.5, on_device(True, torch.bool)]
    assert reduced(*({"metric": value} for value in values), reducer=reducer) == {"metric": expected}


@pytest.mark.parametrize("names", [["loss"], ["loss", "accuracy", "other"]])
def test_a_dict_of_reducers_names_exactly_the_metrics(names: list[str]) -> None:
    window = window_of({"loss": 1.0, "accuracy": 1.0}, reducer=dict.fromkeys(names, Reducer.AVG))
    with refused(
        UsageError, f"evaluation_reducer names {sorted(names)}", "evaluate_batch returns ['accuracy', 'loss']"
    ):
        window.reduce(ALONE)


@pytest.mark.parametrize(("reducer", "wrong"), [("mean", "mean"), ({"loss": max}, max)])
def test_what_is_no_reducer_is_told_so(reducer: Any, wrong: object) -> None:
    with refused(UsageError, "evaluation_reducer", repr(wrong), *Reducer):
        MetricWindow(reducer)


# --- single batches


@pytest.mark.parametrize("place", PLACES)
def test_batches_are_kept_as_they_were(place: Callable[[float], Any]) -> None:
    value = place(1.0)
    window = window_of({"loss": value, "text": "a"}, {"loss": place(2.0), "text": "b"}, keep_batches=True)
    if isinstance(value, torch.Tensor):
        value.add_(10)
    assert batch_metrics(window, ALONE) == [{"loss": 1.0, "text": None}, {"loss": 2.0, "text": None}]


# --- resumes


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("cut", range(8))
def test_a_window_that_was_cut_by_a_checkpoint_ends_with_the_same_bits(
    tmp_path: Path, place: Callable[[float], Any], cut: int
) -> None:
    values = (torch.rand(7, generator=torch.Generator().manual_seed(1)) * 1e3).tolist()
    batches = [{"loss": place(value), "rate": value / 3, "odd": None} for value in values]
    torch.save(window_of(*batches[:cut], keep_batches=True).state(), tmp_path / "window.pth")
    resumed = MetricWindow(keep_batches=True)
    resumed.restore(load(tmp_path / "window.pth"))
    for batch in batches[cut:]:
        resumed.add(batch)
    undisturbed = window_of(*batches, keep_batches=True)
    assert resumed.reduce(ALONE) == undisturbed.reduce(ALONE)
    assert batch_metrics(resumed, ALONE) == batch_metrics(undisturbed, ALONE)


def test_the_windows_of_a_larger_gang_add_up() -> None:
    first, second, without = window_of({"loss": 1.0}, {"loss": 2.0}), window_of({"loss": 6.0}), window_of()
    merged = MetricWindow()
    merged.restore(*(window.state() for window in (without, first, second)))
    assert (merged.batches, merged.reduce(ALONE)) == (3, {"loss": 3.0})
    merged.add({"loss": 7.0})
    assert merged.reduce(ALONE) == {"loss": 4.0}


def batch_by_batch(distributed: Distributed, *states: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Reduce, on two ranks, a window that a gang of four began: rank 0 restores all of its states."""
    window = MetricWindow(keep_batches=True)
    if distributed.is_chief:
        window.restore(*states)
    window.add({"loss": 10.0 + distributed.rank})
    return window.reduce(distributed), batch_metrics(window, distributed)


def test_kept_batches_of_a_larger_gang_are_averaged_batch_by_batch(on_ranks: OnRanks) -> None:
    states = [window_of({"loss": rank}, {"loss": rank * 2}, keep_batches=True).state() for rank in range(4)]
    metrics, batches = {"loss": (6 + 12 + 21) / 10}, [{"loss": 1.5}, {"loss": 3.0}, {"loss": 10.5}]
    assert on_ranks(2, batch_by_batch, *states) == [(metrics, batches)] * 2


# --- ranks


def uneven(distributed: Distributed, batches: list[int]) -> dict[str, float | None]:
    window = MetricWindow({"rank": Reducer.AVG, "batch": Reducer.AVG, "last": Reducer.MAX, "odd": Reducer.SUM})
    for batch in range(batches[distributed.rank]):
        odd = None if distributed.rank else 1.0
        window.add({"rank": distributed.rank, "batch": torch.tensor(float(batch)), "last": batch, "odd": odd})
    return window.reduce(distributed)


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([1, 3], {"rank": 0.75, "batch": 0.75, "last": 2.0, "odd": None}),
        ([2, 0], {"rank": 0.0, "batch": 0.5, "last": 1.0, "odd": 2.0}),
        ([0, 2], {"rank": 1.0, "batch": 0.5, "last": 1.0, "odd": None}),
        ([0, 0], {}),
    ],
)
def test_every_batch_of_every_rank_weighs_the_same(
    on_ranks: OnRanks, batches: list[int], expected: dict[str, float]
) -> None:
    assert on_ranks(2, uneven, batches) == [expected] * 2


def exact(distributed: Distributed) -> list[str]:
    values = [0.1, 1e308, -1e-320] if distributed.rank == 0 else [math.nan, math.inf, 0.0]
    window = MetricWindow(Reducer.SUM)
    window.add(dict(zip("abc", values, strict=True)))
    return [float(value).hex() for value in window.reduce(distributed).values() if value is not None]


def test_values_pass_between_ranks_unchanged(on_ranks: OnRanks) -> None:
    expected = [math.nan.hex(), math.inf.hex(), (-1e-320).hex()]
    assert on_ranks(2, exact) == [expected] * 2


def complaint(distributed: Distributed, names: list[list[str]]) -> str:
    """Return the error on this rank when the ranks report metrics with these names, listed by rank."""
    window = MetricWindow({"loss": Reducer.AVG})
    if names[distributed.rank]:
        window.add(dict.fromkeys(names[distributed.rank], 1.0))
    with pytest.raises(UsageError) as error:
        window.reduce(distributed)
    return str(error.value)


@pytest.mark.parametrize(
    ("names", "facts"),
    [
        ([["loss"], [], ["loss", "x"]], ["rank 0 has ['loss']", "rank 2 ['loss', 'x']"]),
        ([[], ["a"], ["loss"]], ["rank 1 has ['a']", "rank 2 ['loss']"]),
        ([[], ["b", "a"], ["a", "b"]], ["evaluation_reducer names ['loss']", "evaluate_batch returns ['a', 'b']"]),
    ],
)
def test_a_broken_rule_is_the_same_error_on_every_rank(
    on_ranks: OnRanks, names: list[list[str]], facts: list[str]
) -> None:
    complaints = on_ranks(3, complaint, names)
    assert len({*complaints}) == 1
    assert unnamed(complaints[0], *facts) == []


# --- the file


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.5, 0.5),
        (-0.0, -0.0),
        (math.nan, "NaN"),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
        (None, None),
        (True, True),
        (np.float64(math.nan), "NaN"),
        (np.int64(3), 3),
        (torch.tensor([1.0, math.inf]), [1.0, "Infinity"]),
        (np.eye(2), [[1.0, 0.0], [0.0, 1.0]]),
        ({"a": (1, math.nan), 2: "b"}, {"a": [1, "NaN"], "2": "b"}),
        (b"bytes", None),
        (object(), None),
    ],
)
def test_what_json_lacks_is_spelled(value: Any, words: Any) -> None:
    assert spelled(value) == words
    assert json.loads(json.dumps(spelled(value), allow_nan=False)) == words


@pytest.fixture
def trial(tmp_path: Path) -> TrialFolder:
    return TrialFolder(tmp_path)


def reported(trial: TrialFolder) -> list[tuple[str, int]]:
    return [(record["kind"], record["steps"]) for record in read_reports(trial.metrics)]


def test_a_report_is_one_json_line(trial: TrialFolder) -> None:
    metrics = {"loss": 0.5, "bad": math.nan, "odd": None, "confusion": torch.ones(1, 2)}
    MetricsLog(trial, attempt=2).report("training", 10, 100, metrics, samples_per_second=7.5)
    (line,) = trial.metrics.read_text().splitlines()
    record = json.loads(line, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    del record["time"]
    assert record == {
        KEY: 1,
        "kind": "training",
        "steps": 10,
        "total": 100,
        "metrics": {"loss": 0.5, "bad": "NaN", "odd": None, "confusion": [[1.0, 1.0]]},
        "samples_per_second": 7.5,
        "attempt": 2,
    }


def test_exactly_the_lost_stretch_is_void_from_the_next_attempt_on(trial: TrialFolder) -> None:
    log = MetricsLog(trial, attempt=1)
    for steps in (10, 20, 30):
        log.report("training", steps, 100, {"loss": 0.0})
        log.report("validation", steps, 100, {"accuracy": 0.0})
    written = trial.metrics.read_text()
    MetricsLog(trial, attempt=2).begin_at(trained=20, validated=10)
    assert reported(trial) == [("training", 10), ("validation", 10), ("training", 20)]
    assert trial.metrics.read_text().startswith(written)


@pytest.mark.parametrize("torn", ['{"kind": "train', ""])
def test_a_torn_line_does_not_hinder_a_new_start(trial: TrialFolder, torn: str) -> None:
    trial.metrics.write_text(torn)
    log = MetricsLog(trial, attempt=2)
    log.begin_at(trained=0, validated=-1)
    log.report("training", 10, 100, {"loss": 0.0})
    assert reported(trial) == [("training", 10)]


def test_without_a_checkpoint_everything_is_void(trial: TrialFolder) -> None:
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


def test_a_gang_that_was_believed_gone_reports_no_more_when_another_one_goes_on(tmp_path: Path) -> None:
    trial = TrialFolder(tmp_path)
    journal, log = Journal(trial.journal), MetricsLog(trial, attempt=1)
    journal.started(1, "7")
    log.report("training", 10, 100, {"loss": 2.0})
    journal.started(2, "8")
    MetricsLog(trial, attempt=2).begin_at(trained=0, validated=0)
    with refused(Overtaken, "attempt 2", 1):
        log.report("training", 20, 100, {"loss": 1.0})
    MetricsLog(trial, attempt=2).report("training", 10, 100, {"loss": 2.0})
    assert [record["steps"] for record in read_reports(trial.metrics)] == [10]
