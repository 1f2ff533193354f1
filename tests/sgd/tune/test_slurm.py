"""Trials as jobs of a real Slurm, which preempts one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpc_det.sgd.tune.files import TuneFolder
from hpc_det.sgd.tune.run import Analysis
from tests.labs.slurm import SlurmLab
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.slurm
REPOSITORY = Path(__file__).parents[3]
WARNED = "SIGTERM received"

DRIVER = """
import sys
from pathlib import Path
import submitit
from hpc_det.sgd.tune import grid_search, tune_run
from tests.sgd.tune.trainables import Slow

folder = Path(sys.argv[1])
executor = submitit.AutoExecutor(folder / "jobs")
executor.update_parameters(slurm_partition="low", cpus_per_task=8, timeout_min=5)
rates = grid_search([1.0, 3.0, 2.0])
tune_run(Slow, config={"rate": rates}, stop={"training_iteration": 5}, metric="loss", executor=executor,
         run=folder / "run")
"""


@contextmanager
def driver(lab: SlurmLab, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    env = os.environ | lab.env | {"PYTHONPATH": str(REPOSITORY)}
    with open(folder / "driver.log", "ab") as log:
        process = subprocess.Popen([sys.executable, "-c", DRIVER, str(folder)], env=env, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
def test_a_search_outlives_ctrl_c_and_the_preemption_of_a_job(slurm_lab: SlurmLab) -> None:
    folder = slurm_lab.folder()
    run = TuneFolder(folder / "run")

    begun = [run.trial(number).path / "began-2" for number in (1, 2, 3)]

    def logs() -> str:
        of_trials = run.path.glob("trials/*/logs/*/*.log")
        return "".join(p.read_text() for p in [folder / "driver.log", *(folder / "jobs").glob("*_log.*"), *of_trials])

    def nothing_is_queued() -> bool:
        return not slurm_lab.run("squeue", "--noheader").split()

    with driver(slurm_lab, folder) as process:
        wait_for(lambda: all(mark.exists() for mark in begun), DEADLINE_S, logs)
        process.send_signal(signal.SIGINT)
        process.wait(DEADLINE_S)
        wait_for(nothing_is_queued, DEADLINE_S, logs)
    warned = logs().count(WARNED)
    for mark in begun:
        mark.unlink()
    with driver(slurm_lab, folder) as process:
        wait_for(lambda: all(mark.exists() for mark in begun), DEADLINE_S, logs)
        slurm_lab.preempt(nodes=1, seconds=1)
        wait_for(lambda: logs().count(WARNED) > warned, DEADLINE_S, logs)
        (run.path / "go").touch()
        assert process.wait(DEADLINE_S) == 0, logs()
    analysis = Analysis(run.path, "loss", "min")
    assert analysis.best_config == {"rate": 3.0}
    assert [trial.error for trial in analysis.trials] == [None] * 3
    for trial in analysis.trials:
        assert [result["training_iteration"] for result in trial.results] == [1, 2, 3, 4, 5]
    after = [{result["pid"] for result in trial.results[2:]} for trial in analysis.trials]
    assert sorted(map(len, after)) == [1, 1, 2]
    wait_for(nothing_is_queued, DEADLINE_S, logs)
