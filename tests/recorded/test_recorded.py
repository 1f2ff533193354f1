"""State roots of earlier commits: this hpc_det lists, describes and reports them, and continues what they began."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_det.cli.main import main
from hpc_det.cli.top.experiments import Answers, Experiments
from hpc_det.client import get
from hpc_det.node.format_version import KEY
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.metrics import read_reports
from tests.cli.conftest import umask as umask  # which the command line changes
from tests.facts import unnamed
from tests.recorded.record import HERE, SLURM, place
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.integration

ARCHIVES = sorted(path.name.removesuffix(".tar.gz") for path in HERE.glob("*.tar.gz"))
CONTINUED = [
    pytest.param(name, marks=[] if name in (ARCHIVES[0], ARCHIVES[-1]) else pytest.mark.long) for name in ARCHIVES
]
"""Training takes seconds, so `make test` continues the oldest and the newest, and `make test-long` all."""
OTHER_SEALS = ("2026-11-22-0638-5465fdb8",)
"""Archives whose snapshots have seals of an earlier kind: a driver refuses to train their run from the beginning."""
EPOCHS = {2: 5.003897320106626, 3: 2.2242136776447294}
"""The losses of the last two epochs of driver.py in a run without an interruption."""
Command = Callable[..., str]


@pytest.fixture
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a recorded state root, which all commands use, and the commands of a Slurm on paper."""
    folder = tmp_path / "home"
    place(HERE / f"{request.param}.tar.gz", folder)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {**SLURM, "srun": 'while [[ $1 == -* ]]; do shift; done; exec "$@"', "scancel": "exit 0"}.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HPC_DET_ROOT", str(folder / "hpc_det"))
    return folder


@pytest.fixture
def hpc_det(capfd: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs hpc-det in this process, checks that it succeeds, and returns what it prints."""

    def run(*arguments: object) -> str:
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert code == 0, (arguments, out, err)
        return out

    return run


def losses(experiment: int) -> dict[int, float]:
    """Return the loss of each batch of the first trial."""
    trial = ExperimentStore(Path(os.environ["HPC_DET_ROOT"])).folder(experiment).trial()
    training = (each for each in read_reports(trial.metrics) if each["kind"] == "training")
    return {each["steps"]: each["metrics"]["loss"] for each in training}


@pytest.mark.parametrize("home", ARCHIVES, indirect=True)
def test_commands_read_what_an_earlier_commit_has_written(home: Path, hpc_det: Command, tmp_path: Path) -> None:
    found = {each["id"]: each for each in json.loads(hpc_det("experiment", "list", "--json"))}
    states = [each["state"] for each in found.values() if each["name"] == "line"]
    assert states[:6] == ["COMPLETED", "COMPLETED", "PAUSED", "ERROR", "PAUSED", "QUEUED"]
    assert found[1]["batches"] == 20
    assert found[1]["best"]["batches"] == 20
    assert found[2]["trials"]["completed"] == 4

    for number in found:
        described = json.loads(hpc_det("experiment", "describe", number, "--json"))
        assert described["state"] == found[number]["state"]
        assert hpc_det("experiment", "config", number)
    shown = hpc_det("trial", "describe", "4/1") + hpc_det("experiment", "logs", 4)
    assert unnamed(shown, "ValueError: the data of this trial is broken") == []
    assert len(json.loads(hpc_det("experiment", "list-trials", 2, "--json"))) == 4
    (newest, *_) = json.loads(hpc_det("experiment", "list-checkpoints", 1, "--json"))
    assert (newest["batches"], newest["state"]) == (20, "COMPLETED")
    hpc_det("checkpoint", "download", newest["uuid"], "-o", tmp_path / "downloaded")
    assert (tmp_path / "downloaded" / newest["uuid"] / "state_dict.pth").exists()

    assert [*losses(1)] == [*range(1, 21)]
    assert losses(1)[5] == losses(3)[5]
    facts = json.loads(hpc_det("report", 2, "--json"))
    assert (facts["state"], len(facts["trials"])) == ("COMPLETED", 4)
    hpc_det("report", 1, "-o", tmp_path / "report.html")
    assert hpc_det("sweep", "status", home / "sweep").count("COMPLETED") == 2
    root = ExperimentStore(home / "hpc_det")
    rows = {row.summary.id: row for row in Experiments(root, Answers(root.root)).look().rows}
    assert {number: row.summary.state for number, row in rows.items()} == {
        number: each["state"] for number, each in found.items()
    }


def of_slurm(home: Path) -> dict[str, str]:
    """Return the environment of the queued job when Slurm starts it."""
    host = socket.gethostname()
    variables = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": host, "SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "1"}
    return {**os.environ, **variables, "SLURM_SUBMIT_DIR": str(home)}


@pytest.mark.parametrize("home", CONTINUED, indirect=True)
def test_what_an_earlier_commit_began_is_continued(
    home: Path, hpc_det: Command, request: pytest.FixtureRequest
) -> None:
    """A paused experiment, a job that was in the queue during the upgrade, and a driver of a TorchTrainer."""
    root = home / "hpc_det"
    assert unnamed(hpc_det("experiment", "activate", 3)) == []
    script, log = root / "experiments/6/jobs/1.sh", root / "experiments/6/jobs/1.log"
    with log.open("ab") as output:
        job = subprocess.Popen(["bash", str(script)], env=of_slurm(home), stdout=output, stderr=output)
    try:
        if request.node.callspec.params["home"] in OTHER_SEALS:
            assert unnamed(refused(home), root / "sgd/line/snapshots") == []
        else:
            assert driven(home) == pytest.approx(EPOCHS)
    finally:
        code = job.wait(timeout=DEADLINE_S)
    assert code == 0, log.read_text()
    wait_for(lambda: state(3) in ("COMPLETED", "ERROR"), DEADLINE_S, every_s=0.5)
    for number in (3, 6):
        assert state(number) == "COMPLETED", hpc_det("experiment", "logs", number)
        assert losses(number) == pytest.approx(losses(1))


def driver(home: Path) -> subprocess.CompletedProcess[str]:
    """Start the driver of the TorchTrainer again."""
    command = [sys.executable, "driver.py", "line", "4"]
    return subprocess.run(command, cwd=home / "code/driver", capture_output=True, text=True)


def driven(home: Path) -> dict[int, float]:
    """Start the driver, and return the epochs that it trains, with their losses."""
    done = driver(home)
    assert done.returncode == 0, done.stderr
    printed = (line.split() for line in done.stdout.splitlines())
    return {int(epoch): float(loss) for epoch, loss in printed}


def refused(home: Path) -> str:
    """Start the driver, which must end before it trains, and return its last line."""
    done = driver(home)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr.splitlines()[-1]


def state(number: int) -> str:
    return get(number).state.value


def test_every_json_file_of_the_newest_recording_has_its_format(tmp_path: Path) -> None:
    place(HERE / f"{ARCHIVES[-1]}.tar.gz", tmp_path)
    missing = set()
    for path in (tmp_path / "hpc_det").rglob("*.json*"):
        first = path.read_text().splitlines()[0]
        is_list, is_later_entry = first.startswith("["), path.parent.name == "search" and int(path.stem) > 0
        is_in_checkpoint = path.parent.parent.name == "checkpoints" and path.name != "manifest.json"
        if not (is_list or is_later_entry or is_in_checkpoint) and KEY not in path.read_text():
            missing.add(path.relative_to(tmp_path))
    assert not missing


STARTED = {"hpc_det.launch.staged", "hpc_det.launch.direct", "hpc_det.launch.mpi", "hpc_det.launch.srun"}
STARTED |= {"hpc_det.launch.on_nodes"}
STARTED |= {"hpc_det.launch.deepspeed", "hpc_det.launch.horovod", "hpc_det.launch.autohorovod", "hpc_det.compat"}
STARTED |= {"hpc_det.sgd.elastic.node", "hpc_det.submit.submitit_pbs.in_job", "hpc_det.submit.submitit_pbs.on_node"}
"""Modules that queued jobs start besides those in the recordings: other launchers, agents, submitit's jobs on PBS."""
PICKLED = (
    "hpc_det.submit.executor:RunScript",
    "hpc_det.sgd.elastic.agents:AgentTask",
    "hpc_det.sweep.saved:App",
    "hpc_det.sweep.saved:Point",
)
"""Classes in the pickles of queued jobs."""


def test_the_names_in_queued_jobs_stay(tmp_path: Path) -> None:
    """A job script is not written again by an upgrade, so a module that it starts must keep its name."""
    started = {*STARTED}
    for number, name in enumerate(ARCHIVES):
        place(HERE / f"{name}.tar.gz", tmp_path / str(number))
        for pattern in ("experiments/*/jobs/*.sh", "experiments/*/plan.json"):
            for path in (tmp_path / str(number) / "hpc_det").glob(pattern):
                started |= {*re.findall(r"\bhpc_det(?:\.[a-z_]+)+", path.read_text())}
    assert {"hpc_det.launch.job", "hpc_det.launch.agent", "hpc_det.launch.torch_distributed"} < started
    assert [module for module in sorted(started) if importlib.util.find_spec(module) is None] == []
    for name in PICKLED:
        module, _, of_it = name.partition(":")
        assert hasattr(importlib.import_module(module), of_it)
