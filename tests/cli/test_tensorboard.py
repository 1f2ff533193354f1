from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from hpc_det.store.folders import TrialFolder
from tests.cli.conftest import Command
from tests.cli.life import Life, random_search
from tests.facts import each_names, unnamed
from tests.wait import wait_for

WRITES = """
import sys
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

writer = EventFileWriter(sys.argv[1])
value = Summary.Value(tag="Determined/loss", simple_value=0.5)
writer.add_event(Event(step=1, wall_time=1.0, summary=Summary(value=[value])))
writer.close()
"""
MAIN = "import sys; from hpc_det.cli.main import main; sys.exit(main(sys.argv[1:]))"


def writes_events(trial: TrialFolder) -> None:
    """Write a scalar with the writer below torch's, in a separate process, since that writer has a thread."""
    subprocess.run([sys.executable, "-c", WRITES, str(trial.tensorboard)], check=True)


@pytest.mark.integration
def test_tensorboard_shows_trials_by_name_and_leaves_nothing_behind(life: Life, tmp_path: Path) -> None:
    life.begins()
    writes_events(life.trial)
    temporary, log = tmp_path / "temporary", tmp_path / "log"
    temporary.mkdir()
    command = [sys.executable, "-c", MAIN, "tensorboard", "1", "--port", "0"]
    env = {**os.environ, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"}
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=env) as board:
        try:
            said = r"^1-digits/trial-1: (http://127\.0\.0\.1:\d+/) \(Ctrl-C ends it\)$"
            wait_for(lambda: re.search(said, log.read_text(), re.M) or board.poll() is not None, 120, log.read_text)
            (url,) = re.findall(said, log.read_text(), re.M)
            wait_for(lambda: runs(url) == ["1-digits/trial-1"], 60, log.read_text)
        finally:
            board.send_signal(signal.SIGINT)
        assert board.wait(60) == 0
    assert list(temporary.glob("hpc-det-tensorboard-*")) == []


def runs(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}data/runs", timeout=60) as answer:
        found: list[str] = json.load(answer)
    return found


def test_trials_that_have_written_nothing_are_told(life: Life, hpc_det: Command) -> None:
    found = hpc_det("tensorboard", "1")
    assert (found.code, found.out) == (2, "")
    assert not unnamed(found.err, "TensorBoard", "report")


def test_everything_that_is_not_there_is_told_at_once(root: Path, hpc_det: Command) -> None:
    Life.submitted(root, **random_search(2)).begins()
    found = hpc_det("tensorboard", "1/7,5,1")
    assert found.code == 2
    each_names(found.err.splitlines(), ["experiment 1", "trial 7"], ["experiment 5"])
