"""Truncated, overwritten or edited files: an error that names the file, or the contents of the intact part."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.checkpoint.committed import FORMAT, Committed, parsed
from hpc_det.checkpoint.committed_folder import OddManifest
from hpc_det.checkpoint.seals import FileEntry
from hpc_det.config.plain_yaml import load_yaml
from hpc_det.errors import HpcDetError
from hpc_det.node.json_files import NUMBER, Count, DamagedFile, Moment, append_line, fits, made, read_json, read_map
from hpc_det.node.network import await_rendezvous, publish
from hpc_det.plan.job_plan import JobPlan
from hpc_det.requeue import Action, AttemptEnd, Cause, Decision
from hpc_det.store import metrics
from hpc_det.store.attempt import failure_now, first_failure, note_failure, read_stop, request_stop
from hpc_det.store.folders import TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.store.metrics import each, last_reports, read_reports, validation_metrics, validations
from hpc_det.store.save_times import read_saves, write_save
from hpc_det.store.shared_log import SharedLog
from hpc_det.view.trial_history import final_exit
from tests.checkpoint.saved import save
from tests.facts import refused
from tests.odd import ODD, damages
from tests.plan.plans import job_plan

CHECKPOINT = Committed(path=Path("/c/uuid"), steps=100, time=1.5, files={"a.pth": FileEntry(size=3, crc32=77)})


@dataclass(frozen=True)
class Job:
    host: str
    ports: list[int]
    mode: Literal["on", "off"]
    started: float = 0.0


def test_a_file_that_is_cut_off_anywhere_is_an_error_that_names_it(tmp_path: Path) -> None:
    path, whole = tmp_path / "x.json", b'{"host": "node1", "ports": [1, 2]}'
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with refused(DamagedFile, path):
            read_json(path)


@pytest.mark.parametrize("content", [b"[]", b"7", b'"x"', b"null", b"\xff", b"[" * 99999, b"1" + b"0" * 5000])
def test_what_is_no_map_is_none_of_ours(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with refused(DamagedFile, tmp_path / "x.json"):
        read_map(tmp_path / "x.json")


@given(ODD)
def test_a_value_fits_no_two_kinds_but_whole_numbers(value: Any) -> None:
    kinds = [kind for kind in (bool, int, str, list, dict, type(None)) if fits(value, kind)]
    assert kinds == [type(value)] or isinstance(value, float) or (isinstance(value, int) and not kinds)
    assert not fits(value, int) or fits(value, float)
    assert not fits(value, Moment) or fits(value, float)
    assert not fits(value, Count) or fits(value, int)


def test_a_whole_number_has_64_bits_and_a_metric_may_have_more() -> None:
    assert [fits(value, int) for value in (2**63 - 1, 1 - 2**63, 2**63)] == [True, True, False]
    assert [fits(value, NUMBER) for value in (2**63, -(10**20), 1e308, math.inf, math.nan)] == [True] * 3 + [False] * 2


@pytest.mark.parametrize(("seconds", "is_whole"), [(None, True), (1.5, True), (math.nan, False), ({}, False)])
def test_the_time_of_a_validation_is_a_number_or_unknown(seconds: Any, is_whole: bool) -> None:
    line = {"kind": "validation", "steps": 1, "metrics": {}, "seconds": seconds}
    with nullcontext() if is_whole else refused(DamagedFile, "seconds"):
        assert metrics.checked(line) == line


@given(ODD)
def test_a_dataclass_is_made_of_what_fits_its_fields_alone(value: Any) -> None:
    whole = {"host": "node1", "ports": [1], "mode": "on", "started": 2.0}
    for key, kind in (("host", str), ("ports", list[int]), ("mode", Literal["on", "off"]), ("started", float)):
        data = {**whole, key: value, "newer": value}
        if fits(value, kind):
            assert getattr(made(Job, data, "x"), key) == value
        else:
            with refused(DamagedFile, key):
                made(Job, data, "x")


def test_a_manifest_that_is_damaged_is_no_checkpoint() -> None:
    whole = FORMAT.text(CHECKPOINT.manifest).encode()
    assert parsed(whole, CHECKPOINT.path) == CHECKPOINT
    cut = [whole[:length] for length in range(len(whole))]
    flipped = [whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in range(len(whole))]
    for damage in [*cut, *flipped, *damages(whole)]:
        with suppress(OddManifest):
            assert parsed(damage, CHECKPOINT.path) == CHECKPOINT  # only white space was damaged


def test_a_plan_that_is_damaged_is_refused_or_a_plan() -> None:
    for damage in damages(job_plan().to_json().encode()):
        with suppress(DamagedFile):
            found = JobPlan.from_json(damage.decode(errors="replace"))
            assert JobPlan.from_json(found.to_json()) == found


def _stop(path: Path) -> Callable[[], object]:
    request_stop(path, attempt=1, reason="pause", source="ada")
    return lambda: read_stop(path, 1)


def _rendezvous(path: Path) -> Callable[[], object]:
    publish(path, "node1")
    return lambda: await_rendezvous(path, 0.0)


def _journal(path: Path) -> Callable[[], object]:
    journal = Journal(path)
    journal.started(1, "7")
    journal.ended(1, AttemptEnd(cause=Cause.PREEMPTED, steps=3), Decision(Action.REQUEUE, "why"), None)
    return lambda: (journal.history(), journal.verdict(), journal.open_job())


def _metrics(path: Path) -> Callable[[], object]:
    rest = {"attempt": 1, "time": 1.0}
    append_line(path, {"kind": "begins", "trained": 0, "validated": 0, **rest})
    append_line(path, {"kind": "training", "steps": 1, "metrics": {"loss": 1.0}, "samples_per_second": 1.0, **rest})
    append_line(path, {"kind": "validation", "steps": 1, "total": 2, "metrics": {"loss": 1.0}, **rest})
    return lambda: (
        list(each(path)),
        read_reports(path),
        last_reports(path),
        validations(path, "loss"),
        validation_metrics(path, [1]),
    )


def _failures(path: Path) -> Callable[[], object]:
    trial = TrialFolder(path.parents[2])
    note_failure(trial, 1, failure_now(0, "ValueError", traceback="Traceback", user_error=True))
    return lambda: first_failure(trial, 1)


def _saves(path: Path) -> Callable[[], object]:
    for batch_s in (None, 0.5):
        write_save(path, save(batch_s=batch_s))
    return lambda: read_saves(path)


def _log(path: Path) -> Callable[[], object]:
    path.parent.mkdir()
    SharedLog(path.parent).append({"event": "activated"})
    return lambda: list(SharedLog(path.parent).new())


def _yaml(path: Path) -> Callable[[], object]:
    path.write_text('{"name": "x", "searcher": {"name": "single"}}')
    return lambda: load_yaml(path)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("stop.json", _stop),
        ("rendezvous.json", _rendezvous),
        ("journal.jsonl", _journal),
        ("metrics.jsonl", _metrics),
        ("attempt-1/failures/rank-0.json", _failures),
        ("saves.jsonl", _saves),
        ("search/000000000.json", _log),
        ("x.yaml", _yaml),
    ],
)
def test_a_reader_knows_no_other_errors(
    name: str, written: Callable[[Path], Callable[[], object]], tmp_path: Path
) -> None:
    path = tmp_path / name
    read = written(path)
    read()
    whole = path.read_bytes()
    for damage in [*damages(whole), *(whole[:length] for length in range(0, len(whole), 3))]:
        path.write_bytes(damage)
        with suppress(HpcDetError):
            read()


WHERE = st.floats(0, 1, exclude_max=True)


@st.composite
def with_a_damaged_line(draw: Callable[..., Any], lines: Sequence[bytes]) -> bytes:
    """Draw the file with a flipped bit, overwritten bytes or a repeated line."""
    number = draw(st.integers(0, len(lines) - 1))
    line = lines[number]
    at = int(draw(WHERE) * len(line))
    before, after = [*lines[:number]], [*lines[number + 1 :]]
    match draw(st.sampled_from(["flip", "overwrite", "repeat"])):
        case "flip":
            line = line[:at] + bytes([line[at] ^ 1 << draw(st.integers(0, 7))]) + line[at + 1 :]
        case "overwrite":
            odd = draw(st.sampled_from([b"\0", b"\xff", b"9", b"}"])) * draw(st.integers(1, len(line) - at))
            line = line[:at] + odd + line[at + len(odd) :]
        case "repeat":
            after.insert(draw(st.integers(0, len(after))), line)
    return b"".join([*before, line, *after])


@cache
def lines_of_a_trial(*, is_open: bool) -> Sequence[bytes]:
    """Return the journal of a trial that failed, finished, was continued and preempted, and began a fourth attempt.

    That attempt is open, or was preempted too.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        _live(Journal(path), is_open)
        lines = path.read_bytes().splitlines(keepends=True)
    return [re.sub(rb'"time": [\d.]+', b'"time": %d.5' % (1000 + at), line) for at, line in enumerate(lines)]


def _live(journal: Journal, is_open: bool) -> None:
    preempted = AttemptEnd(cause=Cause.PREEMPTED, steps=9)
    journal.started(1, "7")
    journal.ended(1, AttemptEnd(cause=Cause.FAILED, steps=3), Decision(Action.RESTART, "why"), "ValueError: {1: 2}")
    journal.started(2, "7")
    journal.ended(2, AttemptEnd(cause=Cause.FINISHED, steps=6), Decision(Action.DONE, "finished"), None)
    journal.continued()
    journal.started(3, "8")
    journal.ended(3, preempted, Decision(Action.REQUEUE, "why"), None)
    journal.started(4, "8")
    if not is_open:
        journal.ended(4, preempted, Decision(Action.REQUEUE, "why"), None)


@pytest.mark.parametrize("is_open", [True, False])
@given(data=st.data())
def test_a_journal_with_a_damaged_line_shows_no_end_that_was_none_and_gives_no_number_twice(
    is_open: bool, data: st.DataObject
) -> None:
    with TemporaryDirectory() as folder:
        trial = TrialFolder(Path(folder))
        damaged = data.draw(with_a_damaged_line(lines_of_a_trial(is_open=is_open)))
        trial.journal.write_bytes(damaged)
        was_written = damaged.endswith(b"\n") or not is_open  # else the last line looks like an interrupted write
        with suppress(HpcDetError):
            assert final_exit(trial) is None
            assert Journal(trial.journal).last_attempt() >= 3 + was_written
            causes = [end.cause for end in Journal(trial.journal).history()]
            assert Cause.FINISHED not in causes
            assert len(causes) <= 2 - is_open  # no failure is charged twice


def test_a_journal_that_was_continued_last_has_no_end_with_any_damaged_line(tmp_path: Path) -> None:
    trial = TrialFolder(tmp_path)
    lines = lines_of_a_trial(is_open=True)[:5]
    for at in range(len(lines[4])):
        for bit in range(8):
            line = lines[4][:at] + bytes([lines[4][at] ^ 1 << bit]) + lines[4][at + 1 :]
            trial.journal.write_bytes(b"".join([*lines[:4], line]))
            with suppress(HpcDetError):
                assert final_exit(trial) is None
                assert Journal(trial.journal).last_attempt() >= 2


def test_an_end_in_the_journal_is_none_where_a_part_of_it_is_missing(tmp_path: Path) -> None:
    """Wherever the line is truncated, the attempt is open or has its true end."""
    path = tmp_path / "journal.jsonl"
    _journal(path)
    first, last = path.read_bytes().splitlines(keepends=True)
    for length in range(len(last)):
        path.write_bytes(first + last[:length])
        is_whole = length >= len(last) - 1
        assert Journal(path).open_attempt() == (None if is_whole else 1)
    assert json.loads(last)["cause"] == "preempted"
