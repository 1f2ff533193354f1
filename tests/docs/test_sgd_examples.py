"""Every example of TorchTrainer does its task: losses fall, values fit, searches find the best value."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.labs.pbs_lab import PbsLab, can_have_hosts
from tests.sgd.conftest import _fork_server, _torch_ready
from tests.sgd.forked_agents import Forked, start_agent
from tests.wait import DEADLINE_S, wait_for

__all__ = ["_fork_server", "_torch_ready"]

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "docs" / "examples" / "sgd"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture(autouse=True)
def _agents_are_forked(_fork_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the agents that the drivers of README.md and docs/how-to/use-torch-trainer.md start."""

    def start(command: list[str], log: Path) -> Forked:
        return start_agent(command[3:], log)  # command[3:] follows `python -m hpc_det.sgd.elastic.node`

    monkeypatch.setattr("hpc_det.sgd.capacity.allocation.start", start)


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the example as `python3 NAME ARGUMENTS` would, in this process, where torch is already loaded."""
    monkeypatch.setattr("sys.argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def numbers(text: str, pattern: str) -> list[float]:
    """Return every number that the group of the pattern matches; fail if there is none."""
    found = [float(number) for number in re.findall(pattern, text)]
    assert found, text
    return found


def test_a_line_is_found(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    run("linear.py", monkeypatch=monkeypatch)
    output = capsys.readouterr().out
    assert numbers(output, r"weight (\S+),") == [pytest.approx(2, abs=0.05)]
    assert numbers(output, r"bias (\S+)") == [pytest.approx(5, abs=0.05)]
    losses = numbers(output, r"train (\S+),")
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 1000


def test_images_are_told_apart_in_mixed_precision_and_a_bar_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    run("cifar.py", "--fp16", "--tqdm", monkeypatch=monkeypatch)
    output = capsys.readouterr()
    losses = numbers(output.out, r"loss (\S+),")
    assert losses == sorted(losses, reverse=True)
    assert numbers(output.out, r"accuracy (\S+)")[-1] > 0.8
    assert "1/4e" in output.err


def test_a_gan_comes_nearer_to_its_images(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    run("gan.py", "--epochs", "5", monkeypatch=monkeypatch)
    output = capsys.readouterr().out
    distances = numbers(output, r"(\S+) away")
    assert distances[-1] < distances[0] / 2
    assert "4 images of (1, 16, 16)" in output


def test_an_epoch_of_the_users_own_trains_two_models(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    run("autoencoder.py", "--epochs", "6", monkeypatch=monkeypatch)
    errors = numbers(capsys.readouterr().out, r"validation (\S+)")
    assert len(errors) == 6
    assert errors[-1] < errors[0] / 4


def test_a_function_of_the_users_is_fitted(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    run("fit.py", monkeypatch=monkeypatch)
    output = capsys.readouterr().out
    losses = numbers(output, r"loss (\S+)")
    assert len(losses) == 5
    assert losses[-1] < 0.001
    (checkpoint,) = re.findall(r"checkpoint: (.+)", output)
    assert Path(checkpoint, "state.pt").exists()


@pytest.mark.long
def test_a_grid_of_trials_finds_the_best_rate(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    run("tune.py", "grid", monkeypatch=monkeypatch)
    output = capsys.readouterr().out
    assert output.count("completed after 3 epochs") == 4
    assert "best: lr 0.1000" in output


@pytest.mark.long
def test_asha_ends_worse_trials_early(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    run("tune.py", "asha", "--trials", "4", monkeypatch=monkeypatch)
    output = capsys.readouterr().out
    assert "stopped after 2 epochs" in output
    assert "completed after 6 epochs" in output


@pytest.mark.long
def test_a_population_outlives_random_kills(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    run("pbt.py", "--kills", "3", "--epochs", "6", monkeypatch=monkeypatch)
    output = capsys.readouterr().out
    assert output.count("completed after 6 epochs") == 3
    assert min(numbers(output, r"loss (\S+)")) < 0.01
    assert "3 processes were killed" in output


@pytest.mark.long
@pytest.mark.skipif(not can_have_hosts(), reason="separate host names need root")
def test_a_batch_script_comes_back_after_a_preemption(pbs_lab: PbsLab, tmp_path: Path, state_folder: Path) -> None:
    variables = {"PYTHON": sys.executable, "EXAMPLES": EXAMPLES, "PYTHONPATH": REPOSITORY, "HPC_DET_ROOT": state_folder}
    given = ",".join([*(f"{name}={value}" for name, value in variables.items()), "CUDA_VISIBLE_DEVICES="])
    log = tmp_path / "log"
    pbs_lab.set_kill_delay("low", 60)  # the machine may be slow
    job = pbs_lab.submit("-q", "low", "-v", given, "-j", "oe", "-k", "oed", "-o", log, EXAMPLES / "train.pbs")
    wait_for(lambda: log.exists() and "epoch 2:" in log.read_text(), DEADLINE_S)
    pbs_lab.preempt(seconds=0)
    assert pbs_lab.wait_for(job, "F", DEADLINE_S)["Exit_status"] == 0
    output = log.read_text()
    epochs = [int(number) for number in numbers(output, r"epoch (\d+):")]
    assert pbs_lab.job(job)["run_count"] == 2
    assert sorted(set(epochs)) == list(range(1, 11))
    assert len(epochs) <= 11  # one epoch may have been reported twice; none was trained twice
