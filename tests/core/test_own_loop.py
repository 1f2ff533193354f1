from __future__ import annotations

from pathlib import Path

import pytest

import hpc_det.core

pytestmark = pytest.mark.integration


def test_a_loop_that_counts_its_passes_itself_reaches_a_length_in_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPC_DET_ROOT", str(tmp_path))
    with hpc_det.core.init(config={"searcher": {"max_length": {"epochs": 2}}}, name="own") as core:
        operation = next(iter(core.search))
        core.epoch = 1
        assert not operation.is_reached
        core.epoch = 2
        assert operation.is_reached
