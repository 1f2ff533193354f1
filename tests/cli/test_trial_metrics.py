"""hpc-det trial describe --metrics."""

from __future__ import annotations

import csv
import io
import json

from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life


def test_every_report_that_stands_is_a_row(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    life.begins()
    life.reports("training", 100, {"loss": 0.5})
    life.reports("training", 200, {"loss": 0.25})
    life.trains_from(100)
    life.reports("validation", 150, {"accuracy": 0.75})
    rows = [line.split()[1:] for line in hpc_det("t", "describe", "1/1", "--metrics").out.splitlines()]
    assert rows == [
        ["ATTEMPT", "KIND", "BATCHES", "METRICS"],
        ["1", "training", "100", "loss", "0.5"],
        ["1", "validation", "150", "accuracy", "0.75"],
    ]
    records = json.loads(hpc_det("t", "describe", "1/1", "--metrics", "--json").out)
    assert [record["metrics"] for record in records] == [{"loss": 0.5}, {"accuracy": 0.75}]
    (first, second) = csv.DictReader(io.StringIO(hpc_det("t", "describe", "1/1", "--metrics", "--csv").out))
    assert (first["metrics.loss"], second["metrics.accuracy"]) == ("0.5", "0.75")
