"""Reading logs: the last line after a failure, and the order of lines."""

from __future__ import annotations

import errno
import math
import os
import selectors
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from hpc_det.launch.log_tail import LONGEST_LINE, LONGEST_PAUSE_S, LOOK_S, LogWatch, how_it_ended, last_line
from hpc_det.store.folders import times_of
from hpc_det.store.log_lines import moments_after
from hpc_det.view.logs.merged import TrialLogs
from hpc_det.view.logs.selection import Wanted
from tests.facts import unnamed
from tests.file_calls import file_calls
from tests.launch.gang import Gang


def test_the_last_line_is_that_of_the_part_asked_for_and_a_long_one_keeps_both_ends(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(f"an earlier attempt\nbegin {'x' * 999} end\n")
    assert last_line(log, 0).startswith("begin xxx")
    assert last_line(log, 0).endswith("xxx end")
    assert len(last_line(log, 0)) <= LONGEST_LINE
    assert last_line(log, log.stat().st_size) == ""


@pytest.mark.parametrize(
    ("code", "expected"), [(3, "3"), (-9, "SIGKILL"), (-40, "40"), (137, "137 (signal SIGKILL"), (193, "193")]
)
def test_how_a_program_ended_names_its_exit_code_or_its_signal_and_its_log(
    tmp_path: Path, code: int, expected: str
) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("out of memory\n")
    assert unnamed(how_it_ended(code, log, 0), expected, "out of memory", log) == []


@pytest.mark.parametrize(("code", "is_named"), [(-9, True), (137, True), (-11, False), (1, False)])
def test_who_has_sent_the_signal_is_added_to_a_kill_alone(tmp_path: Path, code: int, is_named: bool) -> None:
    assert ("the OOM killer" in how_it_ended(code, tmp_path / "job.log", 0, "the OOM killer")) is is_named


def test_the_programs_that_ran_are_named_unless_the_launcher_names_the_killed_rank(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    assert unnamed(how_it_ended(137, log, 0, "no OOM", "it ran sh"), "no OOM", "it ran sh") == []
    log.write_text("mpirun noticed that process rank 1 with PID 7 on node vm exited on signal 9 (Killed).\n")
    assert unnamed(how_it_ended(1, log, 0, "no OOM", "it ran sh"), "rank 1", "no OOM", "it ran sh") == ["it ran sh"]


TURNS = """
import os, signal, time
from pathlib import Path

rank, logs = int(os.environ["RANK"]), Path(LOGS)

def is_noted():
    log = logs / f"rank-{rank}.log"
    index = log.with_suffix(".times")
    noted = index.read_text().split() if index.exists() else []
    return noted[-2:-1] == [str(log.stat().st_size)]

for turn in range(6):
    while turn and not Path(f"turn-{turn}").exists():
        time.sleep(0.01)
    if turn % 2 == rank:
        print(f"turn {turn}")
        time.sleep(0.02)  # the time of a file goes by the kernel's ticks
        while not is_noted():
            time.sleep(0.01)
        Path(f"turn-{turn + 1}").touch()
if rank == 0:
    while not Path("turn-6").exists():
        time.sleep(0.01)
    print("last words")
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as selector:
        yield selector


@pytest.fixture
def no_inotify(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folders: Iterable[Path]) -> None:
        raise OSError(errno.EMFILE, "no more watches")

    monkeypatch.setattr("hpc_det.launch.log_tail.FolderWatch", fail)


def append(log: Path, text: str = "a line\n") -> None:
    with log.open("a") as file:
        file.write(text)


def turn(watch: LogWatch, selector: selectors.BaseSelector) -> None:
    """Do what the agent does in a turn of its loop, without waiting."""
    for key, _ in selector.select(0) if selector.get_map() else ():
        key.data()
    watch.poll()


def test_logs_without_a_write_cost_no_file_operation_and_a_written_one_costs_one(
    tmp_path: Path, selector: selectors.BaseSelector, now: list[float]
) -> None:
    logs = [tmp_path / "attempt-1" / f"rank-{rank}.log" for rank in range(8)]
    watch = LogWatch(logs, selector)
    turn(watch, selector)
    with file_calls(tmp_path) as calls:
        for _ in range(100):
            now[0] += 1
            turn(watch, selector)
        assert not calls
    for size in (7, 14):  # its index is created at the first growth
        append(logs[3])
        with file_calls(tmp_path) as calls:
            turn(watch, selector)
        assert [moment.size for moment in moments_after(logs[3], 0)][-1] == size
        now[0] += 1
    assert calls == {"stat": 1}
    with file_calls(tmp_path) as calls:  # not even for a write to the index
        turn(watch, selector)
        now[0] += 1
        turn(watch, selector)
    assert not calls
    watch.close()


def test_a_log_that_grows_all_the_time_is_looked_at_after_pauses_and_wakes_nobody_meanwhile(
    tmp_path: Path, selector: selectors.BaseSelector, now: list[float]
) -> None:
    log = tmp_path / "rank-0.log"
    watch = LogWatch([log], selector)
    turn(watch, selector)
    for size in (7, 14, 21):
        append(log)
        now[0] += LOOK_S
        turn(watch, selector)
        assert [moment.size for moment in moments_after(log, 0)][-1] == size
        assert round(watch.pause_s, 3) == LOOK_S
        assert not selector.get_map()
    now[0] += LOOK_S
    turn(watch, selector)
    assert watch.pause_s == math.inf
    watch.close()


def test_after_more_writes_than_the_kernel_reports_all_logs_are_looked_at(
    tmp_path: Path, selector: selectors.BaseSelector
) -> None:
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(3)]
    watch = LogWatch(logs, selector)
    turn(watch, selector)
    for _ in range(1500):
        for log in logs:
            append(log)
    turn(watch, selector)
    watch.close()
    assert [[moment.size for moment in moments_after(log, 0)] for log in logs] == [[7 * 1500]] * 3


@pytest.mark.usefixtures("no_inotify")
def test_without_inotify_logs_are_looked_at_often_while_they_grow_and_ever_less_otherwise(
    tmp_path: Path, selector: selectors.BaseSelector, now: list[float]
) -> None:
    log = tmp_path / "rank-0.log"
    watch = LogWatch([log, tmp_path / "rank-1.log"], selector)
    assert watch.pause_s == 0
    pauses = []
    for is_quiet in (False, False, True, True, True, True, False):
        append(log, "" if is_quiet else "a line\n")
        watch.poll()
        pauses.append(round(watch.pause_s, 3))
        now[0] += watch.pause_s
    watch.close()
    assert pauses == [LOOK_S, LOOK_S, 0.4, 0.8, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LOOK_S]
    assert [moment.size for moment in moments_after(log, 0)] == [7, 14, 21]


@pytest.mark.parametrize("has_inotify", [True, False])
def test_between_looks_nothing_is_done_but_the_last_words_are_noted(
    tmp_path: Path,
    selector: selectors.BaseSelector,
    now: list[float],
    has_inotify: bool,
    request: pytest.FixtureRequest,
) -> None:
    if not has_inotify:
        request.getfixturevalue("no_inotify")
    log = tmp_path / "rank-0.log"
    watch = LogWatch([log], selector)
    watch.poll()
    log.write_text("last words\n")
    watch.poll()
    assert not times_of(log).exists()
    watch.close()
    assert [moment.size for moment in moments_after(log, 0)] == [11]
    assert not selector.get_map()


@pytest.mark.parametrize("has_inotify", [True, False])
def test_a_look_at_the_logs_of_a_node_costs_its_ranks_nothing(
    tmp_path: Path, selector: selectors.BaseSelector, has_inotify: bool, request: pytest.FixtureRequest
) -> None:
    """Measured: 40 to 80 us of the agent's CPU time, five times a second. The bound is far above that."""
    if not has_inotify:
        request.getfixturevalue("no_inotify")
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(8)]
    spent_s = 0.0
    for _ in range(50):
        watch = LogWatch(logs, selector)
        for log in logs:
            append(log)
        before = time.process_time()
        watch.poll()
        spent_s += time.process_time() - before
        watch.close()
    assert spent_s / 50 < 0.01 * LOOK_S


@pytest.mark.integration
def test_what_ranks_print_in_turns_is_read_in_turns_with_the_last_words_of_a_killed_one(gang: Gang) -> None:
    script = TURNS.replace("LOGS", repr(str(gang.trial.rank_log(1, 0).parent)))
    (gang.code / "train.py").write_text(script)
    gang.plan([sys.executable, "-m", "hpc_det.launch.direct", "train.py"])
    code, _ = gang.run_job()
    assert code == 1
    passages = list(TrialLogs(gang.trial, Wanted()).passages(final=True))
    lines = [(passage.source.rank, line) for passage in passages for line in passage.lines]
    of_ranks = [(rank, line) for rank, line in lines if rank is not None]
    assert of_ranks == [*((turn % 2, f"turn {turn}") for turn in range(6)), (0, "last words")]
    begins, ends = (
        next(i for i, line in enumerate(lines) if word in line[1]) for word in ("begins", "attempt 1 ended")
    )
    assert begins < lines.index((0, "turn 0")) < lines.index((0, "last words")) < ends
    assert all(passage.is_timed for passage in passages)
    assert os.stat(times_of(gang.trial.job_log)).st_mode & 0o777 == 0o600
