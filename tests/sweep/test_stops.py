"""A preempted app saves by its checkpoint() method and resumes from the files in its output folder."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest

from hpc_det.checkpoint.committed import committed
from hpc_det.distributed.rank_process import RankProcess
from hpc_det.errors import UsageError
from hpc_det.node.json_files import read_json
from hpc_det.store.attempt import request_stop
from hpc_det.store.folders import TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.store.metrics import read_reports
from hpc_det.sweep import may_stop, stops
from tests import processes
from tests.facts import unnamed
from tests.sweep.conftest import App
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.integration

COUNTS = """
import os, time
from pathlib import Path
import hydra
from hydra.core.hydra_config import HydraConfig

step = 0

def saved():
    return Path(HydraConfig.get().runtime.output_dir, "step-" + os.environ["RANK"])

{hook}

@hydra.main(version_base="1.3", config_path=None)
def app(cfg):
    global step
    begin = step = int(saved().read_text()) if saved().exists() else 0
    while step < 3 or not Path("go").exists():
        step += 1
        if step == begin + 1:
            print("has begun", flush=True)
        time.sleep(0.01)
    return begin

if __name__ == "__main__":
    app()
"""
HOOK = """
def checkpoint():
    saved().write_text(str(step))
"""


def preempt(trial: TrialFolder, attempt: int, ranks: int = 1) -> None:
    """Send the agent a SIGTERM, as a scheduler does, once the app of every rank has something to save."""
    logs = [trial.rank_log(attempt, rank) for rank in range(ranks)]
    wait_for(lambda: all(log.exists() and "has begun" in log.read_text() for log in logs), DEADLINE_S)
    (agent,) = processes.agents(trial.path)
    os.kill(agent, signal.SIGTERM)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_preempted_app_goes_on_where_its_checkpoint_was(app: App, ranks: int) -> None:
    app.write("app.py", COUNTS.replace("{hook}", HOOK))
    trial = app.experiment().trial()
    sweep = app.start("+x=1", f"hydra.launcher.slots={ranks}")
    preempt(trial, 1, ranks)
    wait_for(trial.rank_log(2, 0).exists, DEADLINE_S)
    assert all((app.folder / "out" / "0" / f"step-{rank}").exists() for rank in range(ranks))
    app.write("go", "")
    output, _ = sweep.communicate(timeout=DEADLINE_S)
    assert sweep.returncode == 0, output
    assert app.points()[0]["returned"] > 0
    assert [event["cause"] for event in Journal(trial.journal).events() if event["event"] == "ended"] == [
        "preempted",
        "finished",
    ]


def test_an_app_that_waits_for_a_program_saves_all_the_same(app: App) -> None:
    """Its main thread is in a system call, which only a signal handler can interrupt."""
    waits = COUNTS.replace("import os, time", "import os, subprocess, time").replace("{hook}", HOOK)
    app.write("app.py", waits.replace("time.sleep(0.01)", 'begin or subprocess.run(["sleep", "600"])'))
    trial = app.experiment().trial()
    sweep = app.start("+x=1")
    preempt(trial, 1)
    wait_for(trial.rank_log(2, 0).exists, DEADLINE_S)
    app.write("go", "")
    output, _ = sweep.communicate(timeout=DEADLINE_S)
    assert sweep.returncode == 0, output
    assert app.points()[0]["returned"] == 1


IN_STEP = """
import os, time
from pathlib import Path
import hydra
from hydra.core.hydra_config import HydraConfig
from hpc_det.store.metrics import read_reports
from hpc_det.sweep import may_stop

begun = done = 0

def saved():
    return Path(HydraConfig.get().runtime.output_dir, "step-" + os.environ["RANK"])

def checkpoint():
    assert begun == done, "in the middle of a step"
    {collective}
    saved().write_text(str(done))

@hydra.main(version_base="1.3", config_path=None)
def app(cfg):
    global begun, done
    {group}
    begin = begun = done = int(saved().read_text()) if saved().exists() else 0
    while done < 3 or not (begin or cfg.at_once):
        may_stop()
        begun += 1
        time.sleep(0.02 * (os.environ["RANK"] == "0"))
        {collective}
        done += 1
        if done == begin + 1:
            print("has begun", flush=True)
    return begin

if __name__ == "__main__":
    app()
"""


def test_an_app_that_says_where_is_stopped_nowhere_else(app: App) -> None:
    app.write("app.py", IN_STEP.replace("{group}", "pass").replace("{collective}", "pass"))
    sweep = app.start("+at_once=false")
    preempt(app.experiment().trial(), 1)
    output, _ = sweep.communicate(timeout=DEADLINE_S)
    assert sweep.returncode == 0, output
    assert app.points()[0]["returned"] > 0


def test_all_ranks_of_a_gang_stop_at_the_same_step_and_may_speak_with_each_other_there(app: App) -> None:
    text = IN_STEP.replace("{group}", "import torch.distributed as dist; dist.init_process_group('gloo')")
    app.write("app.py", text.replace("{collective}", "import torch; torch.distributed.all_reduce(torch.ones(1))"))
    sweep = app.start("+at_once=false", "hydra.launcher.slots=2")
    preempt(app.experiment().trial(), 1, ranks=2)
    output, _ = sweep.communicate(timeout=DEADLINE_S)
    assert sweep.returncode == 0, output
    first, second = ((app.folder / "out" / "0" / f"step-{rank}").read_text() for rank in range(2))
    assert first == second == str(app.points()[0]["returned"])


@pytest.mark.long
def test_ranks_that_cannot_agree_are_told_what_is_missing(app: App) -> None:
    app.write("app.py", IN_STEP.replace("{group}", "pass").replace("{collective}", "pass"))
    output = app.fail("+at_once=true", "hydra.launcher.slots=2")
    assert not unnamed(output, "torch.distributed.init_process_group")


@pytest.mark.parametrize("is_asked_before", [True, False])
def test_an_app_that_goes_on_after_that_is_stopped_as_one_that_never_says_where(
    is_asked_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(stops, "leave", left)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(stops.Stops, "_listen", lambda self: None)
    handler = signal.getsignal(stops.INTERRUPT)
    saved: list[bool] = []
    try:
        app = stops.Stops(create_autospec(RankProcess, instance=True), saved.append)
        app.set_checkpoint(lambda: None)
        if is_asked_before:
            app._told.set()
        with pytest.raises(SystemExit if is_asked_before else UsageError):
            app.may_stop()
        if not is_asked_before:
            with pytest.raises(SystemExit):
                app._interrupt()
    finally:
        signal.signal(stops.INTERRUPT, handler)
    assert saved == [True]


ON_CORE = """
import time
from pathlib import Path
import hydra, torch
from torch.utils.data import DataLoader
import hpc_det.core

def checkpoint():
    raise AssertionError("the run saves by itself")

@hydra.main(version_base="1.3", config_path=None)
def app(cfg):
    with hpc_det.core.init(hparams={"rate": float(cfg.rate)}) as core:
        assert core.hparams == {"rate": 0.5}
        begin, seen = core.step, {"sum": 0.0}
        core.track(seen=seen)
        for batch in core.batches(DataLoader(torch.arange(4.0), batch_size=1), until=24):
            seen["sum"] += core.hparams["rate"] * float(batch)
            core.report(core.step, {"sum": seen["sum"]})
            if core.step == 10:
                print("has begun", flush=True)
            while core.step == 10 and not core.latest_checkpoint and not core._run.stop.noticed:
                time.sleep(0.02)
    if core.should_stop():
        print("left at batch", core.step, flush=True)
        raise ValueError("this error after the stop changes nothing")
    return [seen["sum"], begin, core.step]

if __name__ == "__main__":
    app()
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_app_that_trains_inside_the_core_api_is_resumed_from_its_checkpoint(app: App, ranks: int) -> None:
    """The loop waits at batch 10 for its stop, at the same call on all ranks."""
    app.write("app.py", ON_CORE)
    trial = app.experiment().trial()
    sweep = app.start("+rate=0.5", f"hydra.launcher.slots={ranks}")
    preempt(trial, 1, ranks)
    output, _ = sweep.communicate(timeout=DEADLINE_S)
    assert sweep.returncode == 0, output
    (point,) = app.points()
    assert point["returned"] == [18.0, 10, 24]
    assert [event["cause"] for event in Journal(trial.journal).events() if event["event"] == "ended"] == [
        "preempted",
        "finished",
    ]
    assert [report["steps"] for report in read_reports(trial.metrics)] == [*range(1, 25)]
    outcome = read_json(trial.outcome)
    assert outcome is not None
    assert (outcome["kind"], outcome["steps"], outcome["saved"]) == ("finished", 24, True)
    assert all("left at batch 10" in trial.rank_log(1, rank).read_text() for rank in range(ranks))
    for checkpoint in committed(trial.checkpoints):
        assert not checkpoint.code, "the app runs where it is: its folder may be the home folder, and contain this one"
    assert not trial.experiment().code_kept.exists()


def test_a_stop_that_a_run_received_and_did_not_answer_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run may have finished just before."""

    def left(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(stops, "leave", left)
    handler = signal.getsignal(stops.INTERRUPT)
    ours, theirs = socket.socketpair()
    process: Any = SimpleNamespace(
        line=SimpleNamespace(connection=ours),
        signals=SimpleNamespace(fd=theirs.fileno()),
        attempt=SimpleNamespace(trial=TrialFolder(tmp_path), number=1),
        report_exit=lambda code: None,
    )
    saved: list[bool] = []
    app = stops.Stops(process, saved.append)
    try:
        with app.handed_over() as is_stopping:
            assert not is_stopping
            app.may_stop()
            request_stop(tmp_path / "stop.json", attempt=1, reason="signal", source="a test")
        with pytest.raises(SystemExit):
            app.catch_up()
        with app.handed_over() as is_stopping:
            assert is_stopping
    finally:
        signal.signal(stops.INTERRUPT, handler)
        os.write(app._end_by, b"end")
        app._thread.join()
        ours.close()
        theirs.close()
    assert saved == [False]


def test_outside_a_job_a_place_to_stop_is_none() -> None:
    may_stop()


@pytest.mark.long
@pytest.mark.parametrize(("hook", "decision"), [pytest.param(HOOK, "requeue", marks=pytest.mark.long), ("", "give up")])
def test_five_preemptions_in_a_row_end_an_app_that_saves_nothing(app: App, hook: str, decision: str) -> None:
    app.write("app.py", COUNTS.replace("{hook}", hook))
    trial = app.experiment().trial()
    sweep = app.start("+x=1")
    for attempt in range(1, 6):
        preempt(trial, attempt)
    wait_for(lambda: len(Journal(trial.journal).history()) == 5, DEADLINE_S)
    assert Journal(trial.journal).events()[9]["action"] == decision
    app.write("go", "")
    output, _ = sweep.communicate(timeout=DEADLINE_S)
    assert sweep.returncode == (0 if hook else 1), output


def test_a_checkpoint_that_fails_is_told_and_the_app_starts_again(app: App) -> None:
    app.write("app.py", COUNTS.replace("{hook}", "def checkpoint():\n    raise OSError('the disk is full')"))
    trial = app.experiment().trial()
    sweep = app.start("+x=1")
    preempt(trial, 1)
    wait_for(trial.rank_log(2, 0).exists, DEADLINE_S)
    app.write("go", "")
    assert sweep.wait(timeout=DEADLINE_S) == 0
    assert sweep.stdout is not None
    sweep.stdout.close()
    assert "the disk is full" in trial.rank_log(1, 0).read_text()
    assert app.points()[0]["returned"] == 0
