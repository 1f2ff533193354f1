"""hpc-det experiment delete-tb-files."""

from __future__ import annotations

from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life


def test_files_go_once_the_experiment_has_ended(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    life.begins()
    life.trial.tensorboard.mkdir()
    (life.trial.tensorboard / "events").write_bytes(b"12345")
    code, _, err = hpc_det("e", "delete-tb-files", 1, "--yes")
    assert (code, err.split(",")[0]) == (2, "hpc-det: experiment 1 is RUNNING")
    assert life.trial.tensorboard.exists()
    life.finishes()
    said = hpc_det("e", "delete-tb-files", 1, "--yes")
    assert said == (0, "Deleted 1 TensorBoard file of experiment 1\n", "")
    assert not life.trial.tensorboard.exists()
    assert hpc_det("e", "delete-tb-files", 1, "--yes").out == "Deleted 0 TensorBoard files of experiment 1\n"
