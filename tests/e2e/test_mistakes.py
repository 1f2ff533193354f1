"""Typical mistakes of users that only running the trial shows, and the facts that hpc-det names about each.

The others are in tests/cli/test_mistakes.py.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError
from tests.cli.mistake import Explained
from tests.e2e.forked import WithTorch, _fork_server, hpc_det_with_torch
from tests.e2e.story import hpc_det
from tests.e2e.test_modes import CONFIG, TRIAL, local_folders
from tests.facts import refused
from tests.small_disk import disk as disk
from tests.small_disk import fill

__all__ = ["_fork_server", "hpc_det_with_torch"]

EVALUATES = 'return {"error": self.model(batch[0]).abs().mean()}'
TRAINING_LOADER = "return DataLoader(self.data, batch_size=self.context"
READS_DEEPSPEED_CONFIG = """
from hpc_det.pytorch.deepspeed import get_ds_config_from_hparams
get_ds_config_from_hparams({"deepspeed_config": "ds_config.json"})
"""
FILE = "HERE/code/model_def.py"


@dataclass(frozen=True, kw_only=True)
class Mistake(Explained):
    """A mistake in the trial or its config."""

    instead: tuple[str, str] = ("", "")
    """A part of the trial, and what is in its place."""
    overrides: tuple[str, ...] = ()
    without: str = ""
    """A part that the config lacks."""
    files: Mapping[str, str] = field(default_factory=dict)

    def write(self, here: Path) -> list[str]:
        """Write the files; return the command that trains here."""
        old, new = self.instead
        assert old in TRIAL
        assert self.without in CONFIG
        files = {
            "code/model_def.py": TRIAL.replace(old, new) if old else TRIAL,
            "code/library/nearby.py": "NAME = 'nearby'\n",
            "tiny.yaml": CONFIG.replace(self.without, "") if self.without else CONFIG,
            **self.files,
        }
        for name, text in files.items():
            path = here / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        command = ["experiment", "create", str(here / "tiny.yaml"), str(here / "code")]
        return command + [word for override in self.overrides for word in ("--config", override)]


TRIALS = [
    Mistake(
        name="A package of the trial is not installed",
        instead=("import nearby", "import no_such_package"),
        what=["cannot import model_def", "No module named 'no_such_package'"],
        where=[FILE, "line 8"],
        remedy=["install its package"],
    ),
    Mistake(
        name="A package of a module of the trial is not installed",
        instead=("import nearby", "import helper"),
        files={"code/helper.py": "\nimport no_such_package\n"},
        what=["No module named 'no_such_package'"],
        where=["HERE/code/helper.py", "line 2"],
        remedy=["install its package"],
    ),
    Mistake(
        name="A name is imported that a module lacks",
        instead=("import nearby", "from nearby import NAM"),
        what=["cannot import name 'NAM' from 'nearby'"],
        where=[FILE, "line 8", "HERE/code/library/nearby.py"],
    ),
    Mistake(
        name="The metric is not one that the validation returns",
        overrides=("searcher.metric=eror",),
        what=["searcher.metric"],
        where=["validation metrics"],
        values=["'eror'", "['error']"],
        remedy=["did you mean 'error'?"],
    ),
    Mistake(
        name="The validation returns a number",
        instead=(EVALUATES, "return 3"),
        what=["evaluate_batch"],
        where=["evaluate_batch"],
        values=["int"],
        remedy=["a dict of metrics"],
    ),
    Mistake(
        name="A hyperparameter is read that is not given",
        instead=('get_hparam("raise_at")', 'get_hparam("raises_at")'),
        what=["hyperparameters.raises_at"],
        where=["the experiment config"],
        values=["['batch_s', 'global_batch_size', 'raise_at', 'workers']"],
        remedy=["did you mean 'raise_at'?", "add it"],
    ),
    Mistake(
        name="The batch size is not given",
        without="global_batch_size: 4, ",
        what=["hyperparameters.global_batch_size"],
        where=["the experiment config"],
        values=["['batch_s', 'raise_at', 'workers']"],
        remedy=["add it"],
    ),
    Mistake(
        name="The batch size is null",
        overrides=("hyperparameters.global_batch_size=null",),
        what=["hyperparameters.global_batch_size"],
        where=["hyperparameters.global_batch_size"],
        values=["None", "a whole number >= 1"],
    ),
    Mistake(
        name="The loader is torch's",
        instead=(TRAINING_LOADER, TRAINING_LOADER.replace("DataLoader", "torch.utils.data.DataLoader")),
        what=["build_training_data_loader"],
        where=["build_training_data_loader"],
        values=["DataLoader"],
        remedy=["hpc_det.pytorch.DataLoader"],
    ),
    Mistake(
        name="There is no loader",
        instead=("return DataLoader(self.data, batch_size=2)", "return None"),
        what=["build_validation_data_loader"],
        where=["build_validation_data_loader"],
        values=["None"],
        remedy=["return a loader"],
    ),
    Mistake(
        name="The data are empty",
        instead=("(12, ", "(0, "),
        what=["no records"],
        where=["build_training_data_loader"],
        remedy=["at least one per slot"],
    ),
    Mistake(
        name="The model is not wrapped",
        instead=("context.wrap_model(torch.nn.Linear(2, 1))", "torch.nn.Linear(2, 1)"),
        what=["wraps no model"],
        where=["TinyTrial: __init__"],
        remedy=["context.wrap_model"],
    ),
    Mistake(
        name="The training returns nothing",
        instead=('return {"loss": loss}', "return None"),
        what=["train_batch"],
        where=["train_batch"],
        values=["NoneType"],
        remedy=["return the loss or a dict of metrics"],
    ),
    Mistake(
        name="The configuration of DeepSpeed does not exist",
        instead=("import nearby", f"import nearby\n{READS_DEEPSPEED_CONFIG}"),
        what=["No such file"],
        where=["HERE/code", "ds_config.json"],
        remedy=["put it beside the code of the trial"],
    ),
]


def rows(mistakes: list[Mistake]) -> list[object]:
    return [pytest.param(mistake, id=mistake.name) for mistake in mistakes]


@pytest.mark.parametrize("mistake", rows(TRIALS))
def test_a_training_here_is_refused_and_leaves_nothing(
    hpc_det_with_torch: WithTorch, tmp_path: Path, state_folder: Path, mistake: Mistake
) -> None:
    if mistake.instead[1].endswith(READS_DEEPSPEED_CONFIG) and find_spec("deepspeed") is None:
        pytest.skip("needs the extra `deepspeed`")
    done = hpc_det_with_torch(*mistake.write(tmp_path), "--local", "--test")
    assert done.returncode == mistake.code, done.stderr
    assert "Traceback" not in done.stderr
    mistake.is_explained(done.stderr, tmp_path)
    assert local_folders(state_folder) == []


def test_an_exception_in_init_names_the_line(hpc_det_with_torch: WithTorch, tmp_path: Path, state_folder: Path) -> None:
    wrong = Mistake(
        name="__init__ raises an exception",
        instead=("self.context = context\n", "self.context = context\n        raise ValueError('width 3 is odd')\n"),
        what=["hpc-det: the trial failed: ValueError: width 3 is odd"],
        where=[f'File "{FILE}", line 20, in __init__'],
    )
    done = hpc_det_with_torch(*wrong.write(tmp_path), "--local", "--test")
    assert done.returncode == 1
    wrong.is_explained(done.stderr, tmp_path)
    assert local_folders(state_folder) == []


# --- jobs


JOBS = [
    Mistake(
        name="The interpreter does not exist",
        overrides=("entrypoint=python3.99 train.py",),
        files={"code/train.py": ""},
        what=["python3.99: not found", "exit code 127"],
        where=["logs/job.log", "entrypoint"],
        remedy=["correct the entrypoint"],
        code=1,
    ),
    Mistake(
        name="A script's package is not installed",
        overrides=("entrypoint=python3 train.py",),
        files={"code/train.py": "import no_such_package\n"},
        what=["No module named 'no_such_package'"],
        where=["logs/job.log"],
        remedy=["install the package of no_such_package"],
        code=1,
    ),
    Mistake(
        name="An argument of a launcher does not exist",
        overrides=("entrypoint=python3 -m hpc_det.launch.direct --nodes 3 train.py",),
        files={"code/train.py": ""},
        what=["hpc_det.launch.direct", "--nodes"],
        where=["entrypoint"],
        remedy=["usage: python3 -m hpc_det.launch.direct"],
        code=1,
    ),
]


@pytest.mark.integration
@pytest.mark.parametrize("mistake", rows(JOBS))
def test_a_job_that_cannot_start_its_program_says_why(tmp_path: Path, state_folder: Path, mistake: Mistake) -> None:
    once = ("--config", "max_restarts=0", "--config", "resources.slots_per_trial=1", "--config", "searcher.max_length=")
    done = hpc_det(*mistake.write(tmp_path), *once, "--follow", check=False)
    assert done.returncode == mistake.code, done.stderr
    assert "Traceback" not in done.stderr
    mistake.is_explained(done.stderr, tmp_path)


@pytest.mark.integration
def test_a_full_disk_is_named_and_nothing_is_left(tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mistake(
        name="The disk of the state folder is full",
        what=["No space left on device"],
        where=[disk],
        remedy=["free space", "HPC_DET_ROOT"],
    )
    monkeypatch.setenv("HPC_DET_ROOT", str(disk / "root"))
    command = full.write(tmp_path)
    (disk / "root/experiments").mkdir(parents=True)
    fill(disk)
    done = hpc_det(*command, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    full.is_explained(done.stderr, tmp_path)
    assert list((disk / "root/experiments").iterdir()) == []


def test_slots_are_gpus_and_the_machine_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    with refused(UsageError, "slots are GPUs", socket.gethostname(), "no GPUs", "nvidia-smi", "slot_type: cpu"):
        Distributed(env={"HPC_DET_SLOT_TYPE": "gpu"}).start()
