"""A world in which the examples of the command line are true: experiments, a stub Slurm that accepts every job, and
files.

    12   digits, a search of eight trials that has ended; trial 7 was profiled
    13   digits, running
    14   digits, paused
    15   digits, waiting for its job

The stub `sbatch` returns job IDs from 4711 on; the stub `squeue` shows 4712 as running and all other jobs as waiting.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hpc_det.cli.main import main
from hpc_det.node.json_files import write_json
from hpc_det.requeue import Action, Cause
from hpc_det.schedulers.queue import this_user
from hpc_det.store.experiments import ExperimentStore
from hpc_det.sweep.files import SweepFiles, point_to
from tests.cli.life import Life
from tests.cli.slurm_on_paper import SlurmOnPaper
from tests.schedulers.recorded_sites import HERE
from tests.view.performance.profiles import profiled

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "digits"
SEARCH = """
name: digits
entrypoint: python3 -m hpc_det.launch.torch_distributed --trial model_def:DigitsTrial
hyperparameters: {global_batch_size: 32, dropout: 0.25, lr: {type: log, base: 10, minval: -4, maxval: -1}}
labels: [digits]
searcher: {name: random, metric: accuracy, smaller_is_better: false, max_length: {epochs: 20}, max_trials: 8}
"""
SINGLE = "searcher={name: single, metric: accuracy, smaller_is_better: false, max_length: {epochs: 20}}"
UUID = "1f0c2d3e-0000-4000-8000-000000000007"
"""UUID of the checkpoint of trial 12/7."""
RECORDED = HERE / "slurm-22.05"
STUBS = {
    "sbatch": "echo $(($(wc -l < {queue}) + 4711)) | tee -a {queue}",
    "squeue": """sed 's/$/|PENDING|Priority/; s/4712|.*/4712|RUNNING|None/' {queue}
for word; do case $word in --jobs=*) jobs=${{word#*=}}; esac; done
grep -qxF "${{jobs//,/$'\\n'}}" {queue} || {{ echo "Invalid job id specified" >&2; exit 1; }}""",
    "scancel": 'sed -i "/^${{!#}}$/d" {queue}',
    "sinfo": f"cat {RECORDED}/sinfo.txt",
    "scontrol": f"[ $2 = config ] && cat {RECORDED}/config.txt || cat {RECORDED}/partitions.txt",
    "srun": "true",
}


def environment(folder: Path) -> dict[str, str]:
    """Return the environment variables with which commands use the world in `folder`."""
    return {"HPC_DET_ROOT": str(folder / "hpc_det"), "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def make(folder: Path) -> None:
    """Create the folders and the stub Slurm."""
    tools = folder / "bin"
    for needed in (folder / "hpc_det" / "experiments" / "11", folder / "work", tools):
        needed.mkdir(parents=True)
    queue = tools / "queue"
    queue.touch()
    for name, text in STUBS.items():
        (tools / name).write_text(f"#!/bin/bash\n{text.format(queue=queue)}\n")
        (tools / name).chmod(0o755)


def populate(folder: Path) -> None:
    """Create the experiments. The environment and the folder `work` must be the current ones."""
    root = folder / "hpc_det"
    shutil.copytree(EXAMPLE, folder / "work", dirs_exist_ok=True)
    Path("digits.yaml").write_text(SEARCH)
    Path("stored.yaml").write_text(f"{SEARCH}\ndebug: false\n")
    Path("a100.yaml").write_text("max_restarts: 2\n")
    _commit()
    for arguments in ([], ["--config", SINGLE], ["--paused"], ["--config", SINGLE]):
        assert main(["experiment", "create", "digits.yaml", ".", "--cluster", "slurm", *arguments]) == 0
    assert main(["template", "set", "a100", "a100.yaml"]) == 0
    assert main(["cluster", "detect", "--name", "atlas", "--write"]) == 0
    _train(Life(ExperimentStore(root).folder(12), "4711", 8))
    profiled(ExperimentStore(root).folder(12).trial(7))
    _begin(Life(ExperimentStore(root).folder(13), "4712", 1))


def _commit() -> None:
    """Commit the code, so that experiments record its commit."""
    identity = ["-c", "user.name=ada", "-c", "user.email=ada@example.org"]
    for command in (["init", "--quiet"], ["add", "."], [*identity, "commit", "--quiet", "--message", "digits"]):
        subprocess.run(["git", *command], check=True)


def _train(life: Life) -> None:
    for worker in range(8):
        life.begins(worker)
        trial = worker + 1
        life.trains_from(0, trial=trial)
        for steps in (100, 200, 400):
            life.reports("training", steps, {"loss": 1 / (steps * trial)}, trial=trial)
        life.reports("validation", 400, {"accuracy": 0.9 + 0.01 * trial}, trial=trial)
        life.saves(400, trial=trial, uuid=UUID if trial == 7 else None)
        life.rank_prints(0, "epoch 1\n", trial=trial)
        life.reaches(0.9 + 0.01 * trial, worker=worker)


def _begin(life: Life) -> None:
    life.begins()
    life.reports("training", 100, {"loss": 0.7})
    life.rank_prints(0, "epoch 1\n")


def point_to_a_sweep(folder: Path) -> None:
    """Create the files that a Hydra app's sweep of a single point leaves in this hydra.sweep.dir."""
    folder.mkdir(parents=True)
    life = Life.submitted(Path(os.environ["HPC_DET_ROOT"]), job_id="4713")
    life.begins()
    life.ends(Cause.FINISHED, Action.DONE)
    files = SweepFiles(life.folder)
    files.create()
    write_json(files.points, [{"num": 0, "overrides": ["lr=0.01"]}])
    write_json(files.shown(1), {"value": 0.9, "text": "0.9", "folder": str(folder / "0")})
    point_to(life.folder, folder)


def queue_on_paper(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Let `hpc-det job` see jobs that wait: those of experiments 12 and 15."""
    paper = SlurmOnPaper(this_user())
    for job_id, number in (("4711", 12), ("4712", 15), ("4713", 15)):
        paper.queue(job_id, folder=str(ExperimentStore(root).folder(number).path))
    paper.take_over(patch)
