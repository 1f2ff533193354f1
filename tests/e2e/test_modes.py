"""--local, --test and --pdb through the real command line: what a user sees in the terminal, and which files remain."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpc_det.checkpoint.committed import committed
from hpc_det.node.process import descendants
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import read_reports
from tests.e2e.forked import WithTorch, _fork_server, hpc_det_with_torch
from tests.e2e.story import COMMAND, Story, hpc_det
from tests.facts import unnamed
from tests.wait import DEADLINE_S, wait_for

__all__ = ["_fork_server", "hpc_det_with_torch"]

PROJECT = Path(__file__).parents[2]
DIGITS = (PROJECT / "conf/experiment/digits.yaml", PROJECT / "docs/examples/digits")
ONE_BATCH = "One batch was trained, validated and saved."

TRIAL = """
import os
import time

import torch
from torch.utils.data import TensorDataset

import nearby
from hpc_det.pytorch import DataLoader, PyTorchCallback, PyTorchTrial


class Telling(PyTorchCallback):
    def on_checkpoint_write_end(self, checkpoint_dir):
        print("saved", flush=True)


class TinyTrial(PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(2, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.data = TensorDataset(torch.ones(12, 2), torch.zeros(12, 1))
        print(f"{context.distributed.get_size()} slot, color {os.environ['COLOR']}, {nearby.NAME}", flush=True)

    def build_callbacks(self):
        return {"telling": Telling()}

    def build_training_data_loader(self):
        workers = self.context.get_hparam("workers")
        return DataLoader(self.data, batch_size=self.context.get_per_slot_batch_size(), num_workers=workers)

    def build_validation_data_loader(self):
        return DataLoader(self.data, batch_size=2)

    def train_batch(self, batch, epoch_idx, batch_idx):
        records, targets = batch
        answer = 40 + len(records) // 2
        print(f"trained on {len(records)}", flush=True)
        if batch_idx == self.context.get_hparam("raise_at"):
            raise RuntimeError("the sky has fallen")
        time.sleep(self.context.get_hparam("batch_s"))
        loss = (self.model(records) - targets).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        print("evaluated", flush=True)
        return {"error": self.model(batch[0]).abs().mean()}
"""
CONFIG = """
name: tiny
entrypoint: python3 -m hpc_det.launch.torch_distributed --trial model_def:TinyTrial
hyperparameters: {global_batch_size: 4, workers: 0, raise_at: -1, batch_s: 0}
searcher: {name: single, metric: error, max_length: {batches: 6}}
scheduling_unit: 2
resources: {slots_per_trial: 2}
environment: {environment_variables: [COLOR=blue, PYTHONPATH=library]}
"""
RAISES = "hyperparameters.raise_at=1"
ENDLESS = ("hyperparameters.batch_s=0.05", "searcher.max_length=100000", "hyperparameters.workers=1")


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Return the arguments of `experiment create` for the trial above."""
    code = tmp_path / "code"
    (code / "library").mkdir(parents=True)
    (code / "model_def.py").write_text(TRIAL)
    (code / "library" / "nearby.py").write_text("NAME = 'a module of PYTHONPATH'\n")
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    return ["experiment", "create", str(tmp_path / "tiny.yaml"), str(code)]


def overridden(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--config", override)]


def local_folders(root: Path) -> list[Path]:
    return list((root / "local").glob("*"))


@contextmanager
def endless(tiny: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Yield a local run in the middle of its training, with a DataLoader worker, in a separate process group."""
    command = [str(COMMAND), *tiny, "--local", *overridden(*ENDLESS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert any(line.startswith("hpc-det: training at batch 2 ") for line in process.stdout)
            wait_for(lambda: descendants(process.pid))  # one epoch's worker ends before the next one starts
            yield process
        finally:
            process.kill()


# --- --test


@pytest.mark.long
@pytest.mark.integration
def test_the_digits_are_tried_in_this_process_and_leave_nothing(state_folder: Path) -> None:
    assert_digits_are_tried(hpc_det("experiment", "create", *DIGITS, "--local", "--test"))
    assert local_folders(state_folder) == []


def test_so_are_those_of_a_hydra_command_line(hpc_det_with_torch: WithTorch, state_folder: Path) -> None:
    assert_digits_are_tried(hpc_det_with_torch("run", "experiment=digits", "--local", "--test"))
    assert local_folders(state_folder) == []


def assert_digits_are_tried(done: subprocess.CompletedProcess[str]) -> None:
    training, validation, *output = done.stdout.splitlines()
    assert training.startswith("hpc-det: training at batch 1 of 1: loss ")
    assert validation.startswith("hpc-det: validation at batch 1 of 1: validation_loss ")
    assert output == [ONE_BATCH]
    assert done.stderr == ""


def test_a_test_is_one_batch_of_everything(hpc_det_with_torch: WithTorch, tiny: list[str], state_folder: Path) -> None:
    output = hpc_det_with_torch(*tiny, "--local", "--test").stdout
    assert [output.count(word) for word in ("trained on", "evaluated", "saved\n")] == [1, 1, 2]
    assert output.splitlines()[-1] == ONE_BATCH
    assert local_folders(state_folder) == []


def test_a_test_that_fails_leaves_nothing_either(
    hpc_det_with_torch: WithTorch, tiny: list[str], state_folder: Path
) -> None:
    done = hpc_det_with_torch(*tiny, "--local", "--test", *overridden("hyperparameters.raise_at=0"))
    assert done.returncode == 1
    assert "RuntimeError: the sky has fallen" in done.stderr
    assert ONE_BATCH not in done.stdout
    assert local_folders(state_folder) == []


@pytest.mark.integration
def test_a_test_as_a_job_completes_after_one_batch(tiny: list[str], state_folder: Path) -> None:
    created = hpc_det(*tiny, "--test", *overridden("resources.slots_per_trial=1")).stdout
    assert created == "Created experiment 1\n"
    story = Story.of(1)
    story.wait()
    assert story.causes == ["finished"]
    assert [(kind, steps) for kind, steps, _ in story.series] == [("training", 1), ("validation", 1)]
    output = story.trial.rank_log(1, 0).read_text()
    assert [output.count(word) for word in ("trained on", "evaluated", "saved\n")] == [1, 1, 2]
    assert committed(story.trial.checkpoints) == []


# --- --local


def test_a_local_run_shows_its_metrics_and_names_its_folder(
    hpc_det_with_torch: WithTorch, tiny: list[str], state_folder: Path
) -> None:
    done = hpc_det_with_torch(*tiny, "--local", *overridden("hyperparameters.global_batch_size=6"))
    (folder,) = local_folders(state_folder)
    first, *metrics = [line for line in done.stdout.splitlines() if line.startswith("hpc-det: ")]
    assert not unnamed(first, folder)
    assert [line.rpartition(" of 6: ")[0].removeprefix("hpc-det: ") for line in metrics] == [
        *(f"training at batch {batch}" for batch in (2, 4, 6)),
        "validation at batch 6",
    ]
    assert not unnamed(done.stdout.splitlines()[-1], "batch 6")
    assert done.stderr == ""
    assert "1 slot, color blue, a module of PYTHONPATH" in done.stdout
    assert done.stdout.count("trained on 6") == 6
    trial = TrialFolder(folder)
    assert [checkpoint.steps for checkpoint in committed(trial.checkpoints)] == [6]
    assert [record["steps"] for record in read_reports(trial.metrics)] == [2, 4, 6, 6]
    assert not (state_folder / "experiments").exists()


def test_an_error_of_the_trial_shows_its_traceback(
    hpc_det_with_torch: WithTorch, tiny: list[str], state_folder: Path
) -> None:
    done = hpc_det_with_torch(*tiny, "--local", *overridden(RAISES))
    assert done.returncode == 1
    *shown, last = done.stderr.splitlines()
    assert shown[0] == "Traceback (most recent call last):"
    assert '    raise RuntimeError("the sky has fallen")' in shown
    assert shown[-1] == "RuntimeError: the sky has fallen"
    assert not unnamed(last, "hpc-det", "RuntimeError: the sky has fallen")
    assert len(local_folders(state_folder)) == 1


@pytest.mark.parametrize(
    ("old", "new", "facts"),
    [
        ("import nearby", "import no_such_package", ["--trial model_def:TinyTrial", "no_such_package"]),
        ('get_hparam("raise_at")', 'get_hparam("raise_on")', ["hyperparameters.raise_on"]),
        ("(12, ", "(0, ", ["build_training_data_loader"]),
    ],
)
def test_a_mistake_is_told_in_one_line(
    hpc_det_with_torch: WithTorch, tiny: list[str], old: str, new: str, facts: list[str]
) -> None:
    model_def = Path(tiny[-1]) / "model_def.py"
    model_def.write_text(model_def.read_text().replace(old, new))
    done = hpc_det_with_torch(*tiny, "--local", "--test")
    assert done.returncode == 2
    assert not unnamed(done.stderr, "hpc-det", *facts)
    assert done.stderr.count("\n") == 1


@pytest.mark.integration
def test_the_debugger_opens_where_the_trial_raised(tiny: list[str]) -> None:
    command = [str(COMMAND), *tiny, "--local", "--pdb", *overridden(RAISES)]
    done = subprocess.run(command, input="p answer\nq\n", capture_output=True, text=True)
    assert done.returncode == 1
    stopped = done.stdout.index("model_def.py")
    assert "train_batch()\n-> raise RuntimeError" in done.stdout[stopped:]
    assert "(Pdb) 42\n" in done.stdout[stopped:]
    assert not unnamed(done.stderr.splitlines()[-1], "hpc-det", "RuntimeError: the sky has fallen")


def test_without_an_error_the_debugger_stays_away(hpc_det_with_torch: WithTorch, tiny: list[str]) -> None:
    output = hpc_det_with_torch(*tiny, "--local", "--pdb", "--test").stdout
    assert "(Pdb)" not in output
    assert output.splitlines()[-1] == ONE_BATCH


@pytest.mark.integration
def test_control_c_ends_a_local_run_at_once(tiny: list[str]) -> None:
    with endless(tiny) as process:
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends the signal to the whole group
        assert process.wait(timeout=DEADLINE_S) == 130


@pytest.mark.integration
def test_a_term_saves_at_the_next_batch(tiny: list[str], state_folder: Path) -> None:
    with endless(tiny) as process:
        process.terminate()
        output, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
    (folder,) = map(TrialFolder, local_folders(state_folder))
    outcome = json.loads(folder.outcome.read_text())
    assert outcome["kind"] == "stopped"
    assert not unnamed(output.splitlines()[-1], f"batch {outcome['steps']}")
    assert [checkpoint.steps for checkpoint in committed(folder.checkpoints)] == [outcome["steps"]]
