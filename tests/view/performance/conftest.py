from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.store.folders import ExperimentFolder, TrialFolder


@pytest.fixture
def trial(tmp_path: Path) -> TrialFolder:
    """Return a trial's folder without files."""
    folder = ExperimentFolder(tmp_path / "12").trial(7)
    folder.path.mkdir(parents=True)
    return folder
