from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from hpc_det.errors import UsageError
from hpc_det.node import json_files
from hpc_det.node.json_files import append_line
from hpc_det.sgd.tune import files
from hpc_det.sgd.tune.files import ITERATION, TuneFolder, TuneTrial
from tests.facts import each_names, refused


@pytest.fixture
def trial(tmp_path: Path) -> TuneTrial:
    (tmp_path / "1").mkdir()
    return TuneTrial(tmp_path / "1")


def test_the_newest_result_is_the_last_whole_line(trial: TuneTrial) -> None:
    assert trial.newest() is None
    for iteration in (1, 2):
        append_line(trial.metrics, {ITERATION: iteration})
    with trial.metrics.open("a") as torn:
        torn.write('{"training_iter')
    assert trial.newest() == {ITERATION: 2}


def test_the_newest_result_of_a_long_training_costs_as_much_as_that_of_a_short_one(
    trial: TuneTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver reads it many times a second."""
    trial.metrics.write_text("".join(f'{{"{ITERATION}": {iteration}}}\n' for iteration in range(1000)))
    parsed: list[str | bytes] = []
    parse_line = json_files.parse_line

    def noted(line: str | bytes, file: object) -> dict[str, Any] | None:
        parsed.append(line)
        return parse_line(line, file)

    for module in (json_files, files):
        monkeypatch.setattr(module, "parse_line", noted)
    assert trial.newest() == {ITERATION: 999}
    assert len(parsed) <= 2


def test_the_values_that_differ_from_those_of_the_search_are_named(tmp_path: Path) -> None:
    run, searcher = TuneFolder(tmp_path / "run"), {"name": "random", "max_trials": 2, "metric": "loss"}
    run.prepare({"searcher": searcher})
    with pytest.raises(UsageError) as raised:
        run.prepare({"searcher": {"name": "random", "max_trials": 3}})
    each_names(raised.value.problems, ["searcher.max_trials", 3, 2], ["searcher.metric", "'loss'"])


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused(UsageError, tmp_path / "file", os.strerror(errno.ENOTDIR)):
        TuneFolder(tmp_path / "file" / "run").prepare({})


def test_a_search_has_one_driver_at_a_time(tmp_path: Path) -> None:
    run = TuneFolder(tmp_path)
    for _ in range(2):
        with run.claimed(), refused(UsageError, tmp_path, f"process {os.getpid()}"), run.claimed():
            pass
