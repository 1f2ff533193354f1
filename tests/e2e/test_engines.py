"""Whole lives of trials with engines on this machine: stopped, killed during a save, resumed on another number of
ranks, run by hand.
"""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_det.checkpoint.committed import Committed, committed
from hpc_det.store.folders import TrialFolder
from tests.e2e import test_trainer
from tests.e2e.engine_story import EngineStory, UndisturbedEngines, four_slots
from tests.e2e.forked import WithTorch, _fork_server, hpc_det_with_torch
from tests.e2e.story import HERE, hpc_det
from tests.facts import unnamed
from tests.stub import Stub, stub
from tests.wait import DEADLINE_S

__all__ = ["_fork_server", "hpc_det_with_torch", "stub"]

TWO_SLOTS = "resources.slots_per_trial=2"
ALL = ["direct", "deepspeed", "torch_distributed"]
ONE_IN_A_HURRY = [ALL[0], *(pytest.param(launcher, marks=pytest.mark.long) for launcher in ALL[1:])]
RECORDS = 240


@pytest.fixture(autouse=True)
def here(state_folder: Path) -> None:
    four_slots(state_folder)


# --- stopped


@pytest.mark.parametrize("launcher", ONE_IN_A_HURRY)
def test_a_stop_between_two_micro_batches_saves_at_the_end_of_the_batch_and_nothing_is_compiled(
    undisturbed_engines: UndisturbedEngines,
    tmp_path: Path,
    stub: Stub,
    monkeypatch: pytest.MonkeyPatch,
    launcher: str,
) -> None:
    undisturbed = undisturbed_engines("zero2", 4, 2)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    for compiler in ("ninja", "cc", "gcc", "ld", "c++", "g++", "nvcc"):
        stub(compiler, f"echo {compiler} >>{tmp_path / 'compiled'}")
    story = EngineStory.with_engine("zero2", 4, TWO_SLOTS, "hyperparameters.waits_at=[13]", launcher=launcher)
    story.until_waiting(13)
    (agent,) = story.pids("hpc_det.launch.agent")
    os.kill(agent, signal.SIGTERM)
    story.wait()
    assert story.causes == ["preempted", "finished"]
    assert story.same_as(undisturbed)
    stopped_at = story.describe()["attempts"][0]["batches"]
    for rank in (0, 1):
        assert len(story.micro_batches(rank, 1)) == 4 * stopped_at
        assert story.micro_batches(rank) == undisturbed.micro_batches(rank)
        assert len([line for line in story.lines(rank, 1) if "micro batch" not in line]) < 10
    assert not (tmp_path / "extensions").exists()
    assert not (tmp_path / "compiled").exists()


@pytest.mark.long
@pytest.mark.parametrize("engine", ["zero3", "pipeline"])
def test_a_rank_that_hangs_while_its_peers_wait_in_an_engine_is_named_and_the_gang_goes_on(
    undisturbed_engines: UndisturbedEngines, engine: str
) -> None:
    story = EngineStory.with_engine(
        engine, 4, "hyperparameters.waits_at=[20]", "hang_timeout_s=15", "max_restarts=0", launcher="deepspeed"
    )
    story.wait()
    assert story.causes == ["hung", "finished"]
    assert "first failure: rank 3 on " in story.logged
    assert "; rank 3: training, batch 20, _wait (model_def.py:" in story.logged
    assert story.same_as(undisturbed_engines(engine, 4))


# --- failed


def without_a_shard(checkpoint: Committed) -> str:
    (checkpoint.path / "model0" / "mp_rank_00_model_states.pt").unlink()
    return "mp_rank_00_model_states.pt: No such file"


def with_a_wrong_bit(checkpoint: Committed) -> str:
    shard = checkpoint.path / "model0" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    return f"{shard.name}: crc32 "


@pytest.mark.long
@pytest.mark.parametrize("damaged", [without_a_shard, with_a_wrong_bit])
def test_a_checkpoint_half_written_or_damaged_is_never_chosen(
    undisturbed_engines: UndisturbedEngines, damaged: Callable[[Committed], str]
) -> None:
    story = EngineStory.with_engine(
        "zero2",
        4,
        TWO_SLOTS,
        "hyperparameters.dies_in_save=true",
        "hyperparameters.waits_at=[-1,20]",
        "max_restarts=2",
        launcher="direct",
    )
    story.until_ended(1)
    (partial,) = story.trial.checkpoints.iterdir()
    assert partial.name.startswith(".partial-")
    story.until_waiting(20)
    assert not partial.exists()
    story.until(lambda: len(committed(story.trial.checkpoints)) == 2)
    newest, _ = committed(story.trial.checkpoints)
    problem = damaged(newest)
    os.kill(story.rank_pid(0), signal.SIGKILL)
    story.wait()
    assert story.causes == ["failed", "failed", "finished"]
    assert [attempt["batches"] for attempt in story.describe()["attempts"]] == [0, 16, 40]
    (skipped,) = [line for line in story.lines(0, 3) if line.startswith("hpc-det: skipped: ")]
    assert not unnamed(skipped, f"checkpoint {newest.uuid}", "16 batches", problem)
    assert story.same_as(undisturbed_engines("zero2", 4, 2))


@pytest.mark.long
@pytest.mark.parametrize("launcher", ALL)
def test_a_rank_that_raises_is_named_though_its_peers_wait_for_it_in_an_engine(launcher: str) -> None:
    story = EngineStory.with_engine("zero3", 4, "hyperparameters.raise_at=3", "max_restarts=0", launcher=launcher)
    assert story.wait(check=False).returncode == 1
    assert story.causes == ["failed"]
    first = story.logged.partition("first failure: ")[2]
    assert first.startswith("rank 3 on ")
    assert 'raise RuntimeError("the sky has fallen")' in first


@pytest.mark.long
def test_a_killed_launcher_of_deepspeeds_takes_its_ranks_along(undisturbed_engines: UndisturbedEngines) -> None:
    story = EngineStory.with_engine("pipeline", 1, "hyperparameters.waits_at=[20]", "max_restarts=1")
    story.until_waiting(20)
    (launcher,) = story.pids("deepspeed.launcher.launch")
    os.kill(launcher, signal.SIGKILL)
    story.wait()
    assert story.causes == ["failed", "finished"]
    assert story.same_as(undisturbed_engines("pipeline", 1))


# --- another number of ranks


@pytest.mark.long
@pytest.mark.parametrize("engine", ["zero0", "zero1", "zero2", "zero3", "pipeline"])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_an_experiment_continues_on_another_number_of_slots_with_the_records_that_are_left(
    engine: str, before: int, after: int
) -> None:
    slots = "resources.slots_per_trial={}"
    story = EngineStory.with_engine(engine, 1, slots.format(before), "searcher.max_length.batches=6", launcher="direct")
    story.wait()
    overrides = ("--config", slots.format(after), "--config", "searcher.max_length.batches=14")
    hpc_det("experiment", "continue", story.number, *overrides)
    story.wait()
    assert story.describe()["batches"] == 14
    assert [steps for kind, steps, _ in story.series if kind == "training"] == list(range(1, 15))
    trained = Counter(record for rank in range(4) for line in story.micro_batches(rank) for record in records(line))
    assert set(trained.values()) == {1}  # all records belong to one epoch


def records(line: str) -> list[int]:
    numbers: list[int] = ast.literal_eval(line.partition(": ")[2])
    return numbers


# --- without a launcher of ours


def test_one_batch_is_tried_in_this_process(hpc_det_with_torch: WithTorch) -> None:
    trial = ("--config", "entrypoint=python3 -m hpc_det.launch.deepspeed --trial model_def:Zero")
    config, context = HERE / "engines.yaml", HERE / "engines"
    done = hpc_det_with_torch("experiment", "create", config, context, "--local", "--test", *trial)
    assert not unnamed(done.stdout.splitlines()[-1], "One batch")
    assert done.stderr == ""


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["deepspeed --no_local_rank --", "torch_distributed", "direct"])
def test_a_script_with_a_trainer_in_a_job_is_stopped_and_goes_on(
    undisturbed_engines: UndisturbedEngines, launcher: str
) -> None:
    options = ("hyperparameters.stage=2", "hyperparameters.accumulation=4", "hyperparameters.waits_at=[13]", TWO_SLOTS)
    entrypoint = f"entrypoint=python3 -m hpc_det.launch.{launcher} train.py 40"
    begun = EngineStory.begin(entrypoint, *options, config=HERE / "engines.yaml", context=HERE / "engines")
    story = EngineStory(begun.number, begun.trial)
    story.until_waiting(13)
    (agent,) = story.pids("hpc_det.launch.agent")
    os.kill(agent, signal.SIGTERM)
    story.wait()
    assert story.causes == ["preempted", "finished"]
    assert story.same_as(undisturbed_engines("zero2", 4, 2))


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.parametrize("under", [[], TORCHRUN], ids=["alone", "torchrun"])
def test_a_script_by_hand_is_stopped_and_goes_on_alone(tmp_path: Path, under: list[str]) -> None:
    process = by_hand(tmp_path, sys.executable, *under, "train.py", "100000")
    try:
        test_trainer.until_batch(tmp_path, 5, process)
        os.kill(max(test_trainer.ranks(process.pid)), signal.SIGTERM)
        output, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, output
    (folder,) = map(TrialFolder, (tmp_path / "local").iterdir())
    stopped = committed(folder.checkpoints)[0]
    assert f"micro batch of {stopped.steps - 1}" in output
    alone = by_hand(tmp_path, sys.executable, "train.py", str(stopped.steps + 2), str(stopped.path))
    output, _ = alone.communicate(timeout=DEADLINE_S)
    assert alone.returncode == 0, output
    assert not unnamed(output, stopped.path)
    numbers = [line.partition(":")[0] for line in output.splitlines() if line.startswith("micro batch of ")]
    assert numbers == [f"micro batch of {stopped.steps + n}" for n in (0, 1) for _ in range(4)]


def by_hand(root: Path, *command: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "HPC_DET_ROOT": str(root), "DS_ACCELERATOR": "cpu"}
    return subprocess.Popen(
        command, cwd=HERE / "engines", env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
