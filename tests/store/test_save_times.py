from __future__ import annotations

import statistics
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.node.json_files import DamagedFile, append_line
from hpc_det.store.save_times import SaveTimes, after_save, read_each_save, read_saves, write_save
from tests.checkpoint.saved import save
from tests.facts import refused

SECONDS = st.floats(0, 1e4)


def after(saves: list[tuple[float, float]]) -> SaveTimes | None:
    times: SaveTimes | None = None
    for committed_s, stall_s in saves:
        times = after_save(times, save(committed_s, stall_s))
    return times


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=20))
def test_one_save_after_another_gives_the_statistics_of_all(saves: list[tuple[float, float]]) -> None:
    times = after(saves)
    assert times is not None
    committed, stalls = zip(*saves, strict=True)
    assert (times.count, times.longest_s) == (len(saves), max(committed))
    assert times.mean_s == pytest.approx(statistics.mean(committed), abs=1e-6)
    assert times.stall_s == pytest.approx(statistics.mean(stalls), abs=1e-6)


def test_the_time_of_a_batch_is_known_although_the_last_attempt_trained_none() -> None:
    first = after_save(None, save(batch_s=0.5))
    assert after_save(first, save(batch_s=None)).batch_s == 0.5
    assert after_save(first, save(batch_s=0.25)).batch_s == 0.25


def test_the_next_attempt_reads_what_was_measured(tmp_path: Path) -> None:
    path, measured = tmp_path / "saves.jsonl", [(1.5, 2.0), (2.5, 3.0)]
    assert read_saves(path) is None
    for committed_s, stall_s in measured:
        write_save(path, save(committed_s, stall_s))
    assert read_saves(path) == after(measured)
    assert read_each_save(path) == [save(1.5, 2.0), save(2.5, 3.0)]


def test_a_save_of_another_shape_is_damage_and_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "saves.jsonl"
    append_line(path, {**asdict(save()), "added_by_a_newer_version": 1})
    assert read_each_save(path) == [save()]
    append_line(path, {"batches": 7})
    with refused(DamagedFile, path, "began"):
        read_saves(path)
