"""Kill a save before each of its lines. This program imports little, so that a fork is fast."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

from hpc_det.checkpoint import committed_folder as committed_folder_module
from hpc_det.checkpoint import staging as staging_module
from hpc_det.checkpoint.committed import Committed, newest_good
from hpc_det.checkpoint.staging import new_staging
from hpc_det.node import disk as disk_module
from hpc_det.node import files as files_module

SAVING = {staging_module.__file__, committed_folder_module.__file__, files_module.__file__, disk_module.__file__}
PARTS = {"state_dict.pth": b"weights" * 5000, "progress.pth": b"steps", "rank-0.pth": b""}


def save(folder: Path, steps: int) -> Committed:
    """Commit a checkpoint in which every file records its number of batches."""
    staging = new_staging(folder)
    entries: dict[str, Any] = {}
    for name, content in PARTS.items():
        with staging.file(name, entries) as file:
            for piece in (content, b" at ", str(steps).encode()):
                file.write(piece)
    (staging.partial / "callback").mkdir()
    (staging.partial / "callback" / "note").write_text(f"at {steps}")
    staging.add_others(entries)
    return staging.commit(steps, entries)


def assert_whole(checkpoint: Committed, steps: int) -> None:
    assert checkpoint.steps == steps
    assert checkpoint.damage() == []
    for name, content in PARTS.items():
        assert (checkpoint.path / name).read_bytes() == content + f" at {steps}".encode()
    assert (checkpoint.path / "callback" / "note").read_text() == f"at {steps}"


def kill_before_line(number: int) -> None:
    """End this process by SIGKILL before the n-th line of the modules that write."""
    lines = count(1)

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and next(lines) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return on_line

    sys.settrace(lambda frame, event, argument: on_line if frame.f_code.co_filename in SAVING else None)


def kill_everywhere(folder: Path) -> list[int]:
    """Return the newest good steps after a kill before each line of a save; the last save was not killed."""
    found = []
    for number in count(1):
        shutil.rmtree(folder)
        folder.mkdir()
        save(folder, 10)
        child = os.fork()
        if not child:
            kill_before_line(number)
            save(folder, 20)
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        newest, skipped = newest_good(folder)
        assert newest is not None
        assert skipped == [], "a torn checkpoint was taken for a committed one"
        assert_whole(newest, newest.steps)
        found.append(newest.steps)
        save(folder, 30)
        assert not list(folder.glob(".*")), "the next save clears leftovers away"
        if not killed:
            return found
    raise AssertionError


if __name__ == "__main__":
    print(json.dumps(kill_everywhere(Path(sys.argv[1]))))
