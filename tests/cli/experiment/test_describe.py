"""hpc-det experiment list and describe."""

from __future__ import annotations

import json
import re
import sys

import pytest

from hpc_det.cli.output import show_description, styled
from hpc_det.requeue import Action, Cause
from hpc_det.schedulers.scheduler import JobState
from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life, tear
from tests.facts import unnamed


@pytest.mark.integration
def test_metrics_that_are_no_numbers_are_described_too(hpc_det: Command, life: Life) -> None:
    life.begins()
    life.reports("validation", 10, {"matrix": [[1, 2], [3, 4]], "by_class": {"a": 1.0}, "long": [7] * 99, "none": None})
    said = hpc_det("e", "describe", "1").out
    assert "matrix [[1, 2], [3, 4]], by_class {a: 1}, long [7, 7, 7" in said
    assert "7,..., none null" in said


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\x00", None])
def test_a_torn_file_is_told(hpc_det: Command, life: Life, scheduler: FakeScheduler, content: bytes | None) -> None:
    tear(life.folder.effective, content)
    (record,) = json.loads(hpc_det("e", "list", "--json").out)
    assert (record["name"], record["state"], record["trials"]) == ("(files damaged)", "ERROR", None)
    assert record.keys() >= {"batches", "total_batches", "best", "progress", "submitted"}


def test_what_is_damaged_is_no_traceback(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    life.folder.effective.write_text("{")
    for command in ("describe", "logs", "wait", "kill"):
        code, _, err = hpc_det("e", command, "1")
        assert code == 1
        assert re.match(r"hpc-det: experiment 1: \S+\.json: damaged: not valid JSON", err)


def test_a_damaged_plan_is_no_traceback(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    life.folder.plan.write_text("{}")
    assert not unnamed(hpc_det("e", "describe", "1").err, "plan.json", "container")
    assert hpc_det("e", "logs", "1").code == 0


def test_describe_tells_the_whole_story(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    life.begins()
    life.reports("training", 120, {"loss": 0.5})
    life.reports("validation", 120, {"accuracy": 0.9, "loss": "Infinity"})
    checkpoint = life.saves(120)
    life.ends(Cause.PREEMPTED, Action.REQUEUE, steps=120)
    life.begins()
    shown = hpc_det("e", "describe", "1").out
    assert "State:      RUNNING\n" in shown
    assert "Progress:   120 of 400 batches\n" in shown
    assert "Slots:      4 on 2 nodes, 2 each\n" in shown
    assert not unnamed(shown, "preempted at batch 120")
    assert "  attempt 2 on " in shown
    assert "last training: loss 0.5\n" in shown
    assert "last validation: accuracy 0.9, loss Infinity\n" in shown
    assert "best validation: accuracy 0.9 at batch 120\n" in shown
    assert f"{checkpoint.uuid} at batch 120" in shown
    assert f"Checkpoint: {checkpoint.path} (batch 120)\n" in shown
    assert f"Checkpoint: {checkpoint.path} (batch 120)\n" in hpc_det("trial", "describe", "1/1").out


def test_an_attempt_without_a_checkpoint_is_not_said_to_have_one_at_batch_0(
    hpc_det: Command, life: Life, scheduler: FakeScheduler
) -> None:
    life.begins()
    life.ends(Cause.FAILED, Action.GIVE_UP, why="too often", failure="rank 1 on node1: ValueError: x")
    shown = hpc_det("e", "describe", "1").out
    assert "failed; no checkpoint, given up" in shown
    assert "Checkpoint" not in shown


def test_each_cause_is_written_once(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    life.begins()
    life.journal.problem(1, "no space in /scratch")
    life.ends(Cause.FAILED, Action.RESTART, why="failure 1 of 1", failure="rank 0 on node1: ValueError: bad")
    life.begins()
    life.journal.problem(2, "no space in /scratch")
    life.ends(Cause.FAILED, Action.GIVE_UP, why="failure 2 of 1", failure="rank 1 on node2: ValueError: bad")
    shown = hpc_det("e", "describe", "1").out
    assert [shown.count(text) for text in ("ValueError: bad", "failure 2 of 1", "no space")] == [1, 1, 1]
    assert shown.index("ValueError: bad") < shown.index("attempt 1")
    assert not unnamed(shown, "attempt 1", "attempt 2", "started again", "given up")


def test_the_remedy_of_similar_causes_is_written_once(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    for free in (45, 12):
        life.begins()
        failure = f"rank 0 on node1: /disk/x: no space, {free} kB free; delete files (`df -h` shows them; all) there"
        life.ends(Cause.DISK_FULL, Action.RESTART, why="disk full", failure=failure)
    shown = hpc_det("e", "describe", "1").out
    assert unnamed(shown, "45 kB free; delete files", "12 kB free; disk full") == []
    assert shown.count("delete files") == 1


@pytest.mark.parametrize(
    ("variables", "is_coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colours_are_for_terminals_that_may_show_them(
    life: Life,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    is_coloured: bool,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm", **variables}.items():
        monkeypatch.setenv(name, value)
    show_description("  State:      ERROR: it failed")
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show_description("  State:      ERROR: \x1b[2Jit failed")
    shown = capsys.readouterr().out
    assert ("\x1b[31m" in shown) == is_coloured
    assert r"\x1b[2Jit failed" in shown


def test_states_headings_and_labels_have_their_styles(life: Life) -> None:
    found = styled("Experiment 1: RUNNING-shoes\n  State:      ERROR: it failed\n\nTrials:\n  1   RUNNING  0/?")
    spans = {found.plain[span.start : span.end]: span.style for span in found.spans}
    assert spans == {
        "Experiment 1: RUNNING-shoes": "bold",
        "Trials:": "bold",
        "  State:": "dim",
        "ERROR": "red",
        "RUNNING": "green",
    }


def test_describe_as_json(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    life.begins()
    cut = life.saves(100)
    (cut.path / "state_dict.pth").write_bytes(b"")
    life.ends(Cause.FAILED, Action.GIVE_UP, why="too often", failure="rank 1 on node1: ValueError: x")
    record = json.loads(hpc_det("e", "describe", "1", "--json").out)
    assert record["state"] == "ERROR"
    assert not unnamed(record["why"], "rank 1 on node1: ValueError: x", "too often")
    assert (record["job_id"], record["scheduler"], record["slots"]) == ("4711", "slurm", 4)
    assert (record["nodes"], record["ranks_per_node"]) == (2, 2)
    assert (record["training"], record["validation"], record["best"]) == (None, None, None)
    assert [(item["uuid"], item["batches"], item["complete"]) for item in record["checkpoints"]] == [
        (cut.uuid, 100, False)
    ]
    (attempt,) = record["attempts"]
    assert (attempt["number"], attempt["cause"], attempt["action"]) == (1, "failed", "give up")
    assert scheduler.asked == []
    (trial,) = record["trials"]
    assert (trial["id"], trial["state"], trial["attempts"]) == (1, "ERROR", record["attempts"])


def test_a_lost_experiment_is_described_as_such(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    scheduler.states = [JobState.ENDED]
    assert not unnamed(hpc_det("e", "describe", "1").out, "ERROR", "first attempt")
