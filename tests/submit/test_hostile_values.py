"""Values stay data whatever they contain: rendered scripts really run, with a Python that records its arguments."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from hpc_det.plan.job_plan import JobArray
from hpc_det.schedulers.scheduler import scheduler
from hpc_det.store.folders import ExperimentFolder
from hpc_det.submit.render import render
from tests.labs.slurm import SlurmLab
from tests.plan.plans import job_plan
from tests.schedulers.one_job import submission
from tests.stub import Stub
from tests.submit.hostile import ALL, VALUES, arguments, telltale_python

ONE_JOB = JobArray(first=0, count=1)


def submitted(home: Path) -> ExperimentFolder:
    """Return experiment 12 below `home`, with a folder for its scripts."""
    experiment = ExperimentFolder(home / "experiments" / "12")
    experiment.jobs.mkdir(parents=True)
    return experiment


@pytest.mark.integration
@pytest.mark.parametrize("value", [*VALUES, ALL[:200]])
def test_a_local_job_gets_every_value_byte_for_byte_and_runs_nothing_else(
    value: str, tmp_path: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / value
    experiment = submitted(home)
    python, records = telltale_python(home)
    stub("module", f"printf '%s\\0' \"$@\" >>'{tmp_path}/modules'")
    plan = job_plan(
        scheduler="local",
        name=value,
        folder=str(experiment.path),
        python=str(python),
        modules=(value, "gcc"),
        setup=("true",),
    )
    nowhere = tmp_path / "nowhere"
    nowhere.mkdir()
    script = experiment.script()
    script.write_text(render(plan, ONE_JOB, script))
    subprocess.run(["bash", script], cwd=nowhere, check=True)

    agent = [str(python), "-m", "hpc_det.launch.agent"]
    assert arguments(records) == ["-m", "hpc_det.launch.job", str(experiment.path), "1", "--", *agent]
    assert (tmp_path / "modules").read_bytes().decode().split("\0")[:-1] == ["load", value, "load", "gcc"]
    assert (records / "path").read_text() == f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    assert (experiment.jobs / "1.log").read_text() == ""
    assert list(nowhere.iterdir()) == []


@pytest.mark.integration
def test_a_sites_own_setup_lines_are_shell(tmp_path: Path) -> None:
    experiment = submitted(tmp_path)
    python, records = telltale_python(tmp_path / "venv")
    setup = ("export PATH=/site/$((40 + 2)):$PATH",)
    plan = job_plan(scheduler="local", folder=str(experiment.path), python=str(python), setup=setup)
    subprocess.run(["bash"], input=render(plan, ONE_JOB, experiment.script()), text=True, check=True)
    assert (records / "path").read_text().split(os.pathsep)[:2] == [str(python.parent), "/site/42"]


@pytest.mark.slurm
def test_slurm_takes_every_value_byte_for_byte_and_runs_nothing_else(slurm_lab: SlurmLab) -> None:
    base = slurm_lab.folder()
    home = base / ALL[:200]
    experiment = submitted(home)
    python, records = telltale_python(home)
    plan = job_plan(
        name=ALL,
        folder=str(experiment.path),
        python=str(python),
        nodes=1,
        ranks_per_node=1,
        job_nodes=1,
        job_slots_per_node=1,
        account=ALL,  # unknown: the lab takes the default one instead
        submit_args=(f"--comment={ALL}", "--hold"),
        srun_args=(ALL,),
    )
    script = base / "job.sh"
    script.write_text(render(plan, ONE_JOB, experiment.script()))
    chosen = scheduler("slurm")
    job_id = chosen.parse_submit(slurm_lab.run(*chosen.submit_command(submission(script)), cwd=base))
    shown = slurm_lab.run("scontrol", "show", "job", job_id)
    assert re.findall(r"^ *(?:JobId=\d+ JobName|Comment|WorkDir)=(.*?) ?$", shown, re.MULTILINE) == [
        ALL,
        str(experiment.path),
        ALL,
    ]

    slurm_lab.run("scontrol", "release", job_id)
    slurm_lab.wait_for_state(job_id, "COMPLETED")
    words = arguments(records)
    assert words[: words.index("srun")] == ["-m", "hpc_det.launch.job", str(experiment.path), "1", "--"]
    assert words[-4:] == [ALL, str(python), "-m", "hpc_det.launch.agent"]
    assert (records / "cwd").read_text() == f"{experiment.path}\n"
    assert (experiment.jobs / "1.log").read_text() == ""
    assert not list(base.rglob("X"))


@pytest.mark.slurm
@pytest.mark.parametrize("name", ["100%j", "back\\slash", "100%j back\\slash"])
def test_slurm_writes_the_log_where_the_path_says(name: str, slurm_lab: SlurmLab) -> None:
    experiment = submitted(slurm_lab.folder() / name)
    shape = {"nodes": 1, "ranks_per_node": 1, "job_nodes": 1, "job_slots_per_node": 1}
    plan = job_plan(folder=str(experiment.path), python="/bin/echo", **shape)
    experiment.script().write_text(render(plan, ONE_JOB, experiment.script()))
    job_id = slurm_lab.run("sbatch", "--parsable", experiment.script(), cwd=experiment.path).strip()
    slurm_lab.wait_for_state(job_id, "COMPLETED")
    assert (experiment.jobs / "1.log").read_text().startswith("-m hpc_det.launch.job ")
