from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hpc_det.sgd.driver import nodes
from hpc_det.sgd.driver.nodes import InProcess
from hpc_det.store.run_folder import RunFolder


def test_a_process_group_outlives_its_gang_until_there_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it could be destroyed while gloo handles a lost connection, and both would wait for each other."""
    monkeypatch.setattr(nodes, "RankWorker", lambda start: None)
    monkeypatch.setattr(RunFolder, "key", lambda run: b"key")
    sent: list[dict[str, Any]] = []
    own = InProcess(RunFolder(tmp_path), ("127.0.0.1", 1), sent.append)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    group = weakref.ref(dist.group.WORLD)
    own.worker = SimpleNamespace(close=dist.destroy_process_group)  # type: ignore[assignment]
    own.send({"do": "end", "generation": 1})
    assert (sent, dist.is_initialized(), group() is None) == ([{"ended": 1}], False, False)
    own.send({"do": "fork", "generation": 2, "size": 1})
    assert group() is None
    own.close()
