"""Metric reports from Python: dictionaries and a DataFrame."""

from __future__ import annotations

import math
import sys

import pytest

from hpc_det import client
from hpc_det.errors import UsageError
from tests.cli.life import Life
from tests.facts import refused


def test_a_group_has_only_its_reports_and_none_means_all(searched: Life) -> None:
    trial = client.get_trial(1, 1)
    assert [report["metrics"] for report in trial.metrics("training")] == [{"loss": 1.0}, {"loss": 4.0}]
    assert [report["group"] for report in trial.metrics(None)] == ["training", "validation"] * 2
    assert {report["attempt"] for report in trial.metrics(None)} == {1}


def test_an_unknown_group_is_refused_with_the_known_ones(searched: Life) -> None:
    for found in (client.get(1), client.get_trial(1, 1)):
        with refused(UsageError, "val", "validation", "training"):
            found.metrics("val")


def test_numbers_that_json_lacks_are_numbers_again(life: Life) -> None:
    life.begins()
    life.reports("validation", 100, {"accuracy": "NaN", "loss": "Infinity", "note": "fine", "count": 3})
    (report,) = client.get_trial(1, 1).metrics()
    assert math.isnan(report["metrics"].pop("accuracy"))
    assert report["metrics"] == {"loss": math.inf, "note": "fine", "count": 3}


def test_lost_work_is_left_out_and_new_reports_are_seen(life: Life) -> None:
    life.begins()
    life.trains_from(0)
    for steps in (10, 20):
        life.reports("validation", steps, {"accuracy": 0.5})
    metrics = client.get_trial(1, 1).metrics()
    assert [report["batches"] for report in metrics] == [10, 20]
    life.trains_from(10)
    life.reports("validation", 30, {"accuracy": 0.6})
    assert [report["batches"] for report in metrics] == [10, 30]


@pytest.mark.integration  # loads pandas
def test_a_frame_has_a_row_for_each_report(searched: Life) -> None:
    pytest.importorskip("pandas")
    frame = client.get(1).metrics().to_frame()
    assert [*frame.columns] == ["trial", "group", "batches", "time", "attempt", "accuracy", "error"]
    assert frame[frame["trial"] == 2]["accuracy"].tolist() == [0.7, 0.95]


@pytest.mark.integration  # loads pandas
def test_a_frame_without_reports_has_columns(life: Life) -> None:
    pytest.importorskip("pandas")
    frame = client.get(1).metrics().to_frame()
    assert (len(frame), "batches" in frame.columns) == (0, True)


def test_without_pandas_the_message_names_it(searched: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with refused(UsageError, "pandas", sys.executable):
        client.get(1).metrics().to_frame()
