from __future__ import annotations

from pathlib import Path

from hpc_det.errors import UsageError
from hpc_det.store.experiments import ExperimentStore
from hpc_det.sweep.files import experiments_of, point_to
from tests.facts import refused


def test_a_sweep_folder_finds_the_experiments_that_are_left(tmp_path: Path) -> None:
    store = ExperimentStore(tmp_path / "root")
    for _ in range(2):
        experiment = store.create()
        experiment.config.touch()
        point_to(experiment, tmp_path)
    assert [found.id for found in experiments_of(tmp_path)] == [1, 2]
    store.folder(1).remove()
    assert [found.id for found in experiments_of(tmp_path)] == [2]
    store.folder(2).remove()
    with refused(UsageError, tmp_path, store.root, "1, 2"):
        experiments_of(tmp_path)
