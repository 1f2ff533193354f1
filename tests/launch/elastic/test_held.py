"""What a node agent says of a snapshot that it makes durable."""

from __future__ import annotations

import os
from pathlib import Path

from hpc_det.launch.elastic.held import Held, keep
from hpc_det.store.run_folder import RunFolder


def test_the_driver_hears_why_a_snapshot_is_not_durable(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.make()
    run.key()
    (run.path / "key").chmod(0o644)
    memory = os.memfd_create("state")
    try:
        said = keep(Held(1, memory, {"epochs_done": 0, "calls": 0}, []), run)
    finally:
        os.close(memory)
    assert said["kept"] == 1
    assert "mode 0644" in said["error"]
