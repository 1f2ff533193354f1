"""Files say in which format they are: older ones are read, and a newer one is refused with a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint.committed import committed, newest_good
from hpc_det.checkpoint.committed_folder import FolderFormat
from hpc_det.checkpoint.seals import HmacSeal
from hpc_det.node import format_version
from hpc_det.node.format_version import KEY
from hpc_det.node.json_files import (
    DamagedFile,
    NewerFormat,
    append_line,
    append_lines,
    read_json,
    read_lines,
    write_json,
)
from hpc_det.plan.job_plan import JobPlan
from hpc_det.store.journal import Journal
from hpc_det.store.metrics import last_reports, read_reports, validation_metrics, validations
from hpc_det.store.shared_log import SharedLog
from tests.checkpoint.saved import saved
from tests.facts import refused
from tests.plan.plans import job_plan


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], object]], None]:
    """Return a function that calls another one in a newer hpc_det, which writes version 2 of files with this name."""

    def in_newer(name: str, write: Callable[[], object]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(format_version, "_RAISED", {name: 2})
            write()

    return in_newer


def test_a_file_says_its_format_and_a_reader_does_not_see_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_json(path, {"nodes": 2})
    assert [*json.loads(path.read_text()).items()] == [(KEY, 1), ("nodes", 2)]
    assert read_json(path) == {"nodes": 2}


def test_the_first_line_says_it_for_all_lines(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    append_lines(path, [{"n": 1}, {"n": 2}])
    append_line(path, {"n": 3})
    assert [KEY in line for line in path.read_text().splitlines()] == [True, False, False]
    assert read_lines(path) == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_a_file_without_a_format_is_read_as_version_1(tmp_path: Path, newer: Any) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"nodes": 2}')
    newer("plan.json", lambda: None)
    assert read_json(path) == {"nodes": 2}


def test_a_newer_file_is_refused_by_name_with_both_versions_and_others_are_read(tmp_path: Path, newer: Any) -> None:
    for name in ("plan.json", "trial.json"):
        newer("plan.json", partial(write_json, tmp_path / name, {"nodes": 2}))
    assert read_json(tmp_path / "trial.json") == {"nodes": 2}
    with refused(NewerFormat, tmp_path / "plan.json", 2, 1, "upgrade hpc_det"):
        read_json(tmp_path / "plan.json")


def test_a_newer_hpc_det_reads_both(tmp_path: Path, newer: Any) -> None:
    old, new = tmp_path / "old" / "plan.json", tmp_path / "plan.json"
    old.parent.mkdir()
    write_json(old, {"nodes": 1})

    def both() -> None:
        write_json(new, {"nodes": 2})
        assert [read_json(old), read_json(new)] == [{"nodes": 1}, {"nodes": 2}]

    newer("plan.json", both)


@pytest.mark.parametrize("version", [0, -1, 1.5, "1", None, True, [], {}])
def test_what_is_no_version_is_damage(tmp_path: Path, version: object) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({KEY: version, "nodes": 2}))
    with refused(DamagedFile, path, KEY) as info:
        read_json(path)
    assert info.type is DamagedFile


def test_a_newer_plan_is_refused_by_its_path(tmp_path: Path, newer: Any) -> None:
    path, texts = tmp_path / "plan.json", list[str]()
    newer("plan.json", lambda: texts.append(job_plan().to_json()))
    with refused(NewerFormat, path, 2):
        JobPlan.from_json(texts[0], path)


def test_a_journal_to_which_a_newer_version_has_appended_is_refused(tmp_path: Path, newer: Any) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.started(1, "7")
    newer("journal.jsonl", lambda: journal.started(2, "8"))
    with refused(NewerFormat, journal.path, 2):
        journal.last_attempt()


@pytest.mark.parametrize(
    "read",
    [
        read_reports,
        last_reports,
        lambda path: validations(path, "loss"),
        lambda path: validation_metrics(path, [1]),
    ],
)
def test_each_reader_of_metrics_refuses_newer_lines(read: Callable[[Path], object], tmp_path: Path, newer: Any) -> None:
    path = tmp_path / "metrics.jsonl"
    line = {"kind": "validation", "steps": 1, "total": 2, "metrics": {"loss": 1.0}, "attempt": 1, "time": 1.0}
    append_line(path, line)
    assert read(path)
    newer("metrics.jsonl", lambda: append_line(path, {**line, "steps": 2}))
    with refused(NewerFormat, path, 2):
        read(path)


def test_the_first_entry_of_a_search_says_the_format_of_all(tmp_path: Path, newer: Any) -> None:
    log = SharedLog(tmp_path / "search")
    (tmp_path / "search").mkdir()
    for number in range(2):
        log.append({"n": number})
    assert [KEY in path.read_text() for path in sorted((tmp_path / "search").iterdir())] == [True, False]
    assert list(SharedLog(tmp_path / "search").new()) == [{"n": 0}, {"n": 1}]
    newer("search", lambda: log.append({"n": 2}))
    with refused(NewerFormat, tmp_path / "search", 2):
        list(SharedLog(tmp_path / "search").new())


def test_a_newer_checkpoint_is_neither_loaded_nor_set_aside_nor_passed_over(tmp_path: Path, newer: Any) -> None:
    """To resume from the one before would train again what the newer hpc_det has trained."""
    saved(tmp_path, 10)
    newer("manifest.json", lambda: saved(tmp_path, 20))
    before = sorted(tmp_path.iterdir())
    for read in (committed, newest_good):
        with refused(NewerFormat, "manifest.json", 2):
            read(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_a_newer_manifest_without_its_seal_is_damage(tmp_path: Path, newer: Any) -> None:
    texts = list[str]()
    newer("snapshot.json", lambda: texts.append(FolderFormat("snapshot.json", HmacSeal(b"1" * 32)).text({"n": 1})))
    for key, error in ((b"1" * 32, "NewerFormat"), (b"2" * 32, "OddManifest")):
        with pytest.raises(Exception) as info:  # noqa: PT011
            FolderFormat("snapshot.json", HmacSeal(key)).parsed(texts[0].encode(), tmp_path)
        assert info.type.__name__ == error
