"""Tests that need a GPU: its generators, streams, memory in checkpoints, and NCCL."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hpc_det.checkpoint.committed import committed
from hpc_det.core.run import process_group
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.rng import restore_rng, rng_state, unchanged_generators
from hpc_det.errors import UsageError
from hpc_det.pytorch import PyTorchTrialContext, load_trial_from_checkpoint_path
from hpc_det.pytorch.loop.loop import Loop
from hpc_det.pytorch.strategies.ddp import data_parallel, synchronized_batch_norm
from hpc_det.pytorch.strategies.device import ToDevice, prefetched
from tests.distributed.ranks import OnRanks
from tests.facts import refused
from tests.pytorch.gpu_trial import Images
from tests.pytorch.trials import Life, StopAt, assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # fork of the DataLoader
]

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def begin(path: Path, aggregation: int = 1, **hparams: Any) -> Life:
    config = {"optimizations": {"aggregation_frequency": aggregation}, "searcher": {"max_length": {"batches": 18}}}
    return Life.begin(path, Images, {"amp": None, "workers": 0, **hparams}, **config)


# --- stop and resume


@pytest.mark.parametrize(
    ("amp", "workers", "aggregation"), [*itertools.product([None, "float16", "bfloat16"], [0, 2], [1, 4])]
)
def test_stops_change_no_bit(tmp_path: Path, amp: str | None, workers: int, aggregation: int) -> None:
    undisturbed, stopped = (begin(tmp_path / name, aggregation, amp=amp, workers=workers) for name in ("a", "b"))
    undisturbed.attempt()
    answers = [stopped.attempt(StopAt(tick, look=2)).end == "stopped" for tick in (3, 6, math.inf)]
    assert answers == [True, True, False]
    assert_same(stopped, undisturbed)


def live(distributed: Distributed, undisturbed: Life, stopped: Life) -> list[bool]:
    torch.backends.cudnn.deterministic = True
    assert distributed.device == GPU
    undisturbed.attempt(StopAt(), distributed)
    return [stopped.attempt(StopAt(tick, look=2), distributed).end == "stopped" for tick in (3, 6, math.inf)]


@pytest.mark.parametrize(("amp", "aggregation"), [(None, 1), ("float16", 4)])
def test_stops_change_no_bit_of_a_gang(on_ranks: OnRanks, tmp_path: Path, amp: str | None, aggregation: int) -> None:
    """The model is in DDP, with its buckets and buffers on the GPU."""
    undisturbed, stopped = (begin(tmp_path / name, aggregation, amp=amp) for name in ("a", "b"))
    assert on_ranks(2, live, undisturbed, stopped, on_a_gpu=True) == [[True, True, False]] * 2
    assert_same(stopped, undisturbed)


def test_a_trial_goes_on_from_a_gpu_on_a_cpu_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = begin(tmp_path / "trial")
    life.attempt(StopAt(5))
    with monkeypatch.context() as without:
        without.setattr(torch.cuda, "is_available", lambda: False)
        assert life.attempt(StopAt(5)).end == "stopped"
    assert life.attempt().end == "finished"
    assert life.steps("training") == [4, 5, 7, 8, 10, 12, 14, 15, 16, 18]


def test_weights_of_a_gpu_load_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = begin(tmp_path / "trial", amp="float16")
    life.attempt()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trial = load_trial_from_checkpoint_path(committed(life.folder.checkpoints)[0].path, trial_class=Images)
    assert isinstance(trial, Images)
    assert {parameter.device.type for parameter in trial.model.parameters()} == {"cpu"}


def test_the_gpus_generator_is_one_of_those_that_are_put_back() -> None:
    with unchanged_generators():
        drawn = torch.rand(100, device=GPU)
    assert torch.equal(torch.rand(100, device=GPU), drawn)
    state = rng_state()
    drawn = torch.rand(100, device=GPU)
    torch.cuda.manual_seed(1)
    restore_rng(state)
    assert torch.equal(torch.rand(100, device=GPU), drawn)


# --- batches


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize(("workers", "amp"), [(0, None), (2, None), (2, "float16")])
def test_between_reports_nothing_waits_for_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, amp: str | None
) -> None:
    train = Loop._train

    def without_waiting(*arguments: Any) -> int:
        try:
            torch.cuda.set_sync_debug_mode("error")
            return train(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Loop, "_train", without_waiting)
    begin(tmp_path / "trial", workers=workers, amp=amp).attempt()


def test_a_prefetched_batch_is_whole_until_the_gpu_is_done_with_it() -> None:
    """The batch is released at once, as in training, while the kernels that read it are still queued."""
    batches = (torch.full((1000, 1000), float(number)).pin_memory() for number in range(12))
    sums = []
    for batch in prefetched(batches, ToDevice(GPU), GPU):
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        sums.append(batch.mean())
    assert torch.stack(sums).tolist() == [*range(12)]


def test_a_copy_of_pinned_memory_is_whole_when_it_is_used() -> None:
    data = {"x": [torch.arange(10_000_000.0).pin_memory()]}
    moved = ToDevice(GPU)(data)["x"][0]
    del data
    assert torch.equal(moved, torch.arange(10_000_000.0, device=GPU))


def test_autocast_computes_in_float16_by_default_and_gives_float32() -> None:
    context = PyTorchTrialContext.from_config({})
    context.experimental.use_amp()
    model = context.wrap_model(nn.Linear(4, 2))
    computed_in = []
    # prepend: runs before the hook that ends autocast
    model.register_forward_hook(lambda _, inputs, output: computed_in.append(output.dtype), prepend=True)
    assert model(torch.ones(3, 4, device=context.device)).dtype == torch.float32
    assert computed_in == [torch.float16]
    assert context.precision.scaler is not None


# --- ranks


@pytest.fixture
def _group() -> Iterator[None]:
    """Create a group of one rank, because NCCL requires a GPU for each rank."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
def test_ddp_over_nccl_trains_what_the_model_alone_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).to(GPU)
    alone, inputs = copy.deepcopy(model), torch.randn(16, 6, device=GPU)
    with process_group(Distributed()):
        wrapped = data_parallel(model, GPU, {})
        for each in (wrapped, alone):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for _ in range(3):
                each(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        wrapped.let_go()
    assert all(map(torch.equal, model.state_dict().values(), alone.state_dict().values()))


@pytest.mark.usefixtures("_group")
def test_compressed_gradients_and_shared_batch_norms_train_over_nccl() -> None:
    model = synchronized_batch_norm(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).to(GPU), GPU)
    assert isinstance(model[1], nn.SyncBatchNorm)  # type: ignore[index]
    with process_group(Distributed()):
        wrapped = data_parallel(model, GPU, {})
        wrapped.compress_gradients()
        wrapped(torch.randn(16, 6, device=GPU)).square().mean().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        wrapped.let_go()


def test_a_rank_without_a_gpu_of_its_own_is_refused_before_nccl_could() -> None:
    count = torch.cuda.device_count()
    one_too_many = Distributed(rank=count, size=count + 1, local_rank=count, local_size=count + 1)
    with refused(UsageError, f"rank {count}", count + 1, "slots_per_node"):
        one_too_many.start()
