"""Whole lives of experiments on this machine's GPU: mixed precision, a stop by signal, and errors of the device."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.e2e.story import Story
from tests.facts import unnamed

pytestmark = pytest.mark.gpu

MODEL_DEF = "from tests.pytorch.gpu_trial import Images"
PROFILE = """
name: gpu
scheduler: local
slots_per_node: {slots}  # one more than there are GPUs
max_nodes: 1
slot_type: gpu
"""
CONFIG = """
name: images
entrypoint: python3 -m hpc_det.launch.torch_distributed --trial model_def:Images
environment: {environment_variables: ["CUBLAS_WORKSPACE_CONFIG=:4096:8"]}
hyperparameters: {global_batch_size: 8, workers: 2, amp: none, batch_s: 0, too_large_at: -1}
searcher: {name: single, metric: loss, max_length: {batches: 40}}
scheduling_unit: 1
min_validation_period: {batches: 10}
min_checkpoint_period: {batches: 8}
max_restarts: 0
reproducibility: {experiment_seed: 5}
"""


@pytest.fixture(autouse=True)
def _profile(state_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (state_folder / "conf" / "cluster").mkdir(parents=True)
    (state_folder / "conf" / "cluster" / "gpu.yaml").write_text(PROFILE.format(slots=torch.cuda.device_count() + 1))
    repository = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [repository, os.environ.get("PYTHONPATH")])))


def begin(folder: Path, *overrides: str) -> Story:
    code = folder / "code"
    code.mkdir(exist_ok=True)
    (code / "model_def.py").write_text(MODEL_DEF)
    (folder / "images.yaml").write_text(CONFIG)
    return Story.begin(*overrides, cluster="gpu", config=folder / "images.yaml", context=code)


def test_a_signal_saves_at_once_and_the_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Each start takes about 15 seconds; tests/pytorch/test_gpu.py covers the other types and stops."""
    undisturbed = begin(tmp_path, "hyperparameters.amp=float16")
    undisturbed.wait()
    stopped = begin(tmp_path, "hyperparameters.amp=float16", "hyperparameters.batch_s=0.03")
    stopped.until_batch(13)
    (agent,) = stopped.pids("hpc_det.launch.agent")
    os.kill(agent, signal.SIGTERM)
    stopped.wait()
    assert stopped.causes == ["preempted", "finished"]
    assert stopped.same_as(undisturbed)
    assert {weight.device.type for weight in stopped.weights.values()} == {"cuda"}
    assert list((stopped.trial.path / "tensorboard").glob("events.*"))


def test_too_many_ranks_for_the_gpus_are_one_clear_sentence(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    ended = begin(tmp_path, f"resources.slots_per_trial={count + 1}").wait(check=False)
    assert ended.returncode == 1
    assert not unnamed(ended.stderr, f"rank {count}", count, count + 1, "torch")


def test_slots_that_are_gpus_need_one_that_torch_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ended = begin(tmp_path).wait(check=False)
    assert ended.returncode == 1
    assert not unnamed(ended.stderr, "GPUs", "CUDA_VISIBLE_DEVICES", "''")


def test_memory_that_is_not_there_is_named_with_the_line_that_wanted_it(tmp_path: Path) -> None:
    story = begin(tmp_path, "hyperparameters.too_large_at=3")
    ended = story.wait(check=False)
    assert ended.returncode == 1
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 1048576.00 GiB" in ended.stderr
    assert "torch.empty(2**50" in story.logged.partition("first failure: ")[2]
