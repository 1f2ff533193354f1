"""Files of an experiment whose lines are JSON with other contents than their writer's: each command reports them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life

SHAPES = [
    "{}",
    "[]",
    "7",
    '{"kind": "training"}',
    '{"kind": "validation", "steps": "x", "metrics": 3, "time": null}',
    '{"kind": 7, "event": 7, "steps": null}',
    '{"kind": "training", "steps": 20, "metrics": {}}',
    '{"kind": "validation", "steps": 20, "metrics": {"accuracy": "x", "loss": {}}}',
    '{"kind": "begins"}',
    '{"event": "ended"}',
    '{"event": "ended", "attempt": {}, "cause": "none", "action": 3, "time": "now"}',
    '{"event": "started", "attempt": 1, "time": "now"}',
    '{"host": 7, "time": "x", "attempt": 1, "gpus": 7, "seconds": []}',
    '{"host": "n1", "time": 1, "attempt": 1, "gpus": {}, "cpu_util": "x"}',
    '{"host": "n1", "time": 1, "attempt": 1, "gpus": {"GPU-1": 7}}',
    '{"host": "n1", "time": 1, "attempt": 1, "gpus": {"GPU-1": {"util": "x"}}}',
    '{"host": "n1", "time": 1, "attempt": 1, "batches": 2, "count": 2, "records": 2, "wall_s": 1, '
    '"samples_per_second": 2, "seconds": {"train_batch": "x"}, "exposed_communication_s": null}',
]
COMMANDS = [
    ("experiment", "list"),
    ("experiment", "describe", "1"),
    ("experiment", "list-trials", "1"),
    ("experiment", "list-checkpoints", "1"),
    ("experiment", "logs", "1"),
    ("trial", "describe", "1/1"),
    ("trial", "profile", "1/1"),
    ("trial", "logs", "1/1"),
    ("task", "list"),
    ("report", "1", "--json"),
]
FILES: dict[str, Callable[[Life], Path]] = {
    "metrics": lambda life: life.trial.metrics,
    "journal": lambda life: life.trial.journal,
    "timings": lambda life: life.trial.timings(0),
    "system": lambda life: life.trial.system_metrics(0),
}


@pytest.fixture
def whole(life: Life, scheduler: FakeScheduler) -> Life:
    life.begins()
    life.trains_from(0)
    life.reports("training", 10, {"loss": 1.0}, samples_per_second=4.0)
    life.reports("validation", 10, {"accuracy": 0.5}, seconds=1.0)
    life.saves(10)
    life.rank_prints(0, "hello\n")
    return life


@pytest.mark.integration
@pytest.mark.parametrize("file", FILES)
def test_a_line_of_another_shape_is_a_message(whole: Life, hpc_det: Command, file: str) -> None:
    path = FILES[file](whole)
    path.parent.mkdir(exist_ok=True)
    before = path.read_text() if path.exists() else ""
    failed = []
    for shape in SHAPES:
        path.write_text(f"{before}{shape}\n")
        for command in COMMANDS:
            try:
                shown = hpc_det(*command)
            except Exception as error:
                failed.append((shape, " ".join(command), repr(error)))
                continue
            if shown.code and "damaged" not in shown.err:
                failed.append((shape, " ".join(command), shown.err))
    assert not failed, "\n".join(map(str, failed))


def test_a_copy_of_a_file_of_measurements_is_none_of_the_profile(whole: Life, hpc_det: Command) -> None:
    whole.trial.profile.mkdir()
    for name in (
        "timings-0 (copy).jsonl",
        "timings-.jsonl",
        "timings-x.jsonl",
        "system-0 (copy).jsonl",
        "system-²3.jsonl",
    ):
        (whole.trial.profile / name).write_text("{}\n")
    for command in COMMANDS:
        assert "Traceback" not in hpc_det(*command).err
